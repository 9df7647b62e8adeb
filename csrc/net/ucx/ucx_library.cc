#include "net/ucx/ucx_library.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "net/descriptors.h"
#include "net/interfaces.h"
#include "net/ucx/ucx_search.h"

namespace nvx::net {
namespace {

/// The libraries to try, best first. A loaded one comes before all others: a second one would share its parts.
std::vector<std::string> what_to_load() {
  const std::string& wanted = config().libucp;
  if (const std::vector<std::string> there = loaded_ucx(); !there.empty()) {
    const std::string& loaded = there.front();
    const bool other = !wanted.empty() && (candidates_at(wanted).empty() || candidates_at(loaded).empty() ||
                                           candidates_at(wanted)[0].path != candidates_at(loaded)[0].path);
    if (other) {
      NVX_LOG(kWarn, "%s is already loaded in this process and is used; NVX_LIBUCP=%s is ignored", loaded.c_str(),
              wanted.c_str());
    } else {
      NVX_LOG(kInfo, "%s is already loaded in this process and is used", loaded.c_str());
    }
    return {loaded};
  }
  if (!wanted.empty()) {
    const std::vector<UcxCandidate> named = candidates_at(wanted);
    if (named.empty())
      throw Error(Code::kInvalid, "nvx: NVX_LIBUCP=" + wanted + " is neither a file nor a folder with a libucp.so.0",
                  "name one, or unset it");
    return {named[0].path};
  }
  std::vector<std::string> paths;
  for (const UcxCandidate& candidate : in_order(find_ucx(), has_rdma())) {
    NVX_LOG(kInfo, "found UCX %s%s: %s", candidate.version.text().c_str(), candidate.rdma ? ", built with RDMA" : "",
            candidate.path.c_str());
    paths.push_back(candidate.path);
  }
  paths.emplace_back("libucp.so.0");  // last resort: the loader's own search
  return paths;
}

UcxLibrary load() {
  // Up to 1.19, libucs installs handlers of SIGSEGV and similar signals when it is loaded; later versions would warn of
  // this setting.
  if (loaded_ucx().empty()) setenv("UCX_HANDLE_ERRORS", "none", /*overwrite=*/0);
  std::string last;
  for (const std::string& path : what_to_load()) {
    const Library library(path, "nvx cannot use it");
    if (library) return UcxLibrary{library};
    last = library.error();
    NVX_LOG(kInfo, "cannot load %s", last.c_str());
  }
  throw Error(Code::kSystem, "nvx: ranks on several hosts need UCX, and no libucp.so.0 could be loaded (" + last + ")",
              "type 'pip install libucx-cu13' or 'apt-get install libucx0', or set NVX_LIBUCP to its path");
}

}  // namespace

UcxVersion UcxLibrary::version_or_throw() const {
  UcxVersion own;
  get_version(&own.major, &own.minor, &own.patch);
  if (own >= kOldestUcx) return own;
  throw Error(Code::kSystem,
              "nvx: " + from.path() + " is UCX " + own.text() + "; nvx needs " + kOldestUcx.text() + " or later",
              "set NVX_LIBUCP to the libucp.so.0 to load");
}

std::string UcxLibrary::explain(ucs_status_t status) const {
  const std::string detail = std::string(" (UCX: ") + status_string(status) + ")";
  switch (status) {
    case UCS_ERR_IO_ERROR:
      if (const std::string own = descriptor_limit_hint(); !own.empty())
        return "cannot be reached from here" + detail + own;
      [[fallthrough]];
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_TIMED_OUT:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_REJECTED: return "its process has ended, or the network to it has failed" + detail;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_NO_DEVICE:
      return "its host cannot be reached" + detail + "; NVX_SOCKET_IFNAME names the interfaces to use";
    case UCS_ERR_EXCEEDS_LIMIT: return "a message was larger than its receiver accepts" + detail;
    default: return "sending failed" + detail;
  }
}

void warn_of_second_ucx(const UcxLibrary& own) {
  static std::atomic<bool> logged{false};
  if (logged.load(std::memory_order_relaxed)) return;
  const auto same = [](const std::string& a, const std::string& b) {
    std::error_code error;
    return a == b || std::filesystem::equivalent(a, b, error);
  };
  for (const std::string& path : loaded_ucx()) {
    if (same(path, own.from.path()) || logged.exchange(true)) continue;
    NVX_LOG(kWarn,
            "this process has loaded a second UCX: %s, beside %s, which nvx uses. They may share libucs and crash. "
            "Use only one: set NVX_LIBUCP=%s, or load that one before the first group over several hosts",
            path.c_str(), own.from.path().c_str(), path.c_str());
    return;
  }
}

/// Never destroyed: links may outlive static destructors.
const UcxLibrary& ucx_library() {
  static const UcxLibrary* const kLibrary = new UcxLibrary(load());
  return *kLibrary;
}

}  // namespace nvx::net
