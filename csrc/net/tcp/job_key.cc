#include "net/tcp/job_key.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/config.h"
#include "base/error.h"
#include "base/library.h"
#include "base/log.h"
#include "base/text.h"

namespace nvx::net {
namespace {

constexpr size_t kLeast = 16, kMost = 4096;
constexpr char kHowTo[] = "make one with 'openssl rand -hex 32' and give it to all ranks";

/// OpenSSL's libcrypto, from 1.1 on.
struct Crypto {
  Library from;
  NVX_FUNCTION(const void*, EVP_sha256, );
  NVX_FUNCTION(unsigned char*, HMAC, const void* digest, const void* key, int key_bytes, const unsigned char* data,
               size_t bytes, unsigned char* mac, unsigned* mac_bytes);
  NVX_FUNCTION(int, CRYPTO_memcmp, const void* a, const void* b, size_t bytes);
};

Crypto load() {
  std::string last;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.4", "libcrypto.so.1.1", "libcrypto.so"}) {
    const Library library(name, "nvx needs OpenSSL 1.1 or later");
    if (library) return Crypto{library};
    if (last.empty()) last = library.error();
  }
  throw Error(Code::kSystem, "nvx: NVX_JOB_KEY needs OpenSSL's libcrypto, which could not be loaded (" + last + ")",
              "type 'apt-get install libssl3' or 'dnf install openssl-libs', or add its folder to LD_LIBRARY_PATH");
}

const Crypto& crypto() {
  static const Crypto* const kCrypto = new Crypto(load());
  return *kCrypto;
}

std::string read_key(const std::string& path) {
  const auto refuse = [&](const std::string& why) -> Error {
    return {Code::kInvalid, "nvx: the file of the job's key, " + path + " (NVX_JOB_KEY), " + why, kHowTo};
  };
  std::optional<std::string> key = content_of(path, kMost + 1);
  if (!key) throw refuse(errno == 0 ? "is not a file" : std::string("cannot be read: ") + std::strerror(errno));
  struct stat what {};
  if (stat(path.c_str(), &what) == 0 && (what.st_mode & 077))
    NVX_LOG(kWarn, "other users have access to the job's key in %s: type 'chmod 600 %s'", path.c_str(), path.c_str());
  return key->erase(key->find_last_not_of(" \t\r\n") + 1);
}

}  // namespace

const JobKey* JobKey::instance() {
  static const bool kSet = std::getenv("NVX_JOB_KEY") != nullptr;
  if (config().job_key.empty() && !kSet) return nullptr;
  // A user who sets the variable wants authentication: the command that should have printed the key may have failed.
  if (config().job_key.empty())
    throw Error(Code::kInvalid, "nvx: NVX_JOB_KEY is set, but it was empty or unset when this process loaded nvx",
                std::string(kHowTo) + " before they start, or unset it");
  static const JobKey* const kKey = new JobKey(config().job_key);
  return kKey;
}

JobKey::JobKey(const std::string& setting) : secret_(setting.starts_with('@') ? read_key(setting.substr(1)) : setting) {
  if (secret_.size() < kLeast || secret_.size() > kMost) {
    throw Error(Code::kInvalid,
                "nvx: the job's key (NVX_JOB_KEY) has " + std::to_string(secret_.size()) + " characters; nvx takes " +
                    std::to_string(kLeast) + " to " + std::to_string(kMost),
                kHowTo);
  }
  crypto();
}

Mac JobKey::sign(const char* purpose, std::initializer_list<Part> parts) const {
  const Part label = std::as_bytes(std::span(purpose, std::strlen(purpose) + 1));
  std::vector<std::byte> all(label.begin(), label.end());
  for (const Part part : parts) all.insert(all.end(), part.begin(), part.end());
  Mac mac;
  unsigned bytes = 0;
  if (!crypto().HMAC(crypto().EVP_sha256(), secret_.data(), int(secret_.size()),
                     reinterpret_cast<const unsigned char*>(all.data()), all.size(),
                     reinterpret_cast<unsigned char*>(mac.data()), &bytes) ||
      bytes != mac.size())
    throw Error(Code::kSystem, "nvx: " + crypto().from.path() + " computes no HMAC-SHA-256");
  return mac;
}

bool JobKey::same(const Mac& a, const Mac& b) { return crypto().CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

uint64_t JobKey::tag() const {
  const Mac mac = sign("nvx tag of the job's key", {});
  uint64_t tag;
  std::memcpy(&tag, mac.data(), sizeof tag);
  return std::max<uint64_t>(tag, 1);
}

}  // namespace nvx::net
