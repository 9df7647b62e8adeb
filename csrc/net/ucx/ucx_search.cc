#include "net/ucx/ucx_search.h"

#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/mutex.h"

namespace nvx::net {
namespace {

namespace fs = std::filesystem;

constexpr char kName[] = "libucp.so.0";

std::string contents(const std::string& path) {
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  if (error) return "";
  std::string bytes(size, '\0');
  std::ifstream(path, std::ios::binary).read(bytes.data(), std::streamsize(bytes.size()));
  return bytes;
}

/// libucp contains its version once as a separate string; strings after a '_' are symbol versions.
UcxVersion version_in(const std::string& path) {
  const std::string bytes = contents(path);
  for (size_t dot = bytes.find('.'); dot != std::string::npos; dot = bytes.find('.', dot + 1)) {
    size_t begin = dot, end = dot;
    const auto of_version = [](char c) { return (c >= '0' && c <= '9') || c == '.'; };
    while (begin > 0 && of_version(bytes[begin - 1])) --begin;
    while (end < bytes.size() && of_version(bytes[end])) ++end;
    dot = end - 1;
    if (end == bytes.size() || bytes[end] != '\0' || end - begin > 12) continue;
    if (begin > 0 && bytes[begin - 1] == '_') continue;
    UcxVersion found;
    int length = 0;
    if (std::sscanf(bytes.data() + begin, "%u.%u.%u%n", &found.major, &found.minor, &found.patch, &length) == 3 &&
        begin + size_t(length) == end)
      return found;
  }
  return {};
}

void add_folders(const char* variable, const char* below, std::vector<std::string>& folders) {
  const char* set = std::getenv(variable);
  std::stringstream list(set ? set : "");
  for (std::string folder; std::getline(list, folder, ':');) {
    if (!folder.empty()) folders.push_back(folder + below);
  }
}

/// ldconfig's cache contains its paths as strings.
void add_from_cache(std::vector<std::string>& paths) {
  const std::string cache = contents("/etc/ld.so.cache"), wanted = std::string("/") + kName + '\0';
  for (size_t at = cache.find(wanted); at != std::string::npos; at = cache.find(wanted, at + 1)) {
    const size_t begin = cache.rfind('\0', at);
    if (begin != std::string::npos) paths.push_back(cache.substr(begin + 1, at + sizeof kName - begin - 1));
  }
}

struct AddedPlaces {
  Mutex mutex;
  std::vector<std::string> paths GUARDED_BY(mutex);
};

AddedPlaces& added_places() {
  static AddedPlaces* const kPlaces = new AddedPlaces;
  return *kPlaces;
}

}  // namespace

void add_ucx_place(std::string path) {
  AddedPlaces& added = added_places();
  MutexLock lock(added.mutex);
  added.paths.push_back(std::move(path));
}

std::vector<UcxCandidate> candidates_at(const std::string& path) {
  std::error_code error;
  fs::path file(path);
  if (fs::is_directory(file, error)) file /= kName;
  file = fs::canonical(file, error);
  if (error || !fs::is_regular_file(file, error)) return {};
  const bool rdma = fs::exists(file.parent_path() / "ucx" / "libuct_ib.so.0", error);
  return {{file.string(), version_in(file.string()), rdma}};
}

std::vector<UcxCandidate> find_ucx() {
  std::vector<std::string> places;
  add_folders("LD_LIBRARY_PATH", "", places);
  add_folders("UCX_HOME", "/lib", places);
  add_folders("HPCX_UCX_DIR", "/lib", places);
  add_from_cache(places);
  for (const char* folder : {"/usr/lib64", "/usr/lib", "/usr/local/lib"}) places.emplace_back(folder);
  {
    AddedPlaces& added = added_places();
    MutexLock lock(added.mutex);
    places.insert(places.end(), added.paths.begin(), added.paths.end());
  }
  std::vector<UcxCandidate> found;
  for (const std::string& place : places) {
    for (UcxCandidate& candidate : candidates_at(place)) {
      if (std::ranges::find(found, candidate.path, &UcxCandidate::path) == found.end())
        found.push_back(std::move(candidate));
    }
  }
  return found;
}

std::vector<UcxCandidate> in_order(std::vector<UcxCandidate> candidates, bool machine_has_rdma) {
  std::erase_if(candidates, [](const UcxCandidate& c) { return c.version != UcxVersion() && c.version < kOldestUcx; });
  std::ranges::stable_sort(candidates, [&](const UcxCandidate& a, const UcxCandidate& b) {
    if (machine_has_rdma && a.rdma != b.rdma) return a.rdma;
    return a.version > b.version;
  });
  return candidates;
}

std::vector<std::string> loaded_ucx() {
  std::vector<std::string> paths;
  const auto collect = [](dl_phdr_info* info, size_t, void* result) {
    try {
      const std::string name = info->dlpi_name ? info->dlpi_name : "";
      if (name.substr(name.rfind('/') + 1).starts_with("libucp"))
        static_cast<std::vector<std::string>*>(result)->push_back(name);
    } catch (const std::exception&) {
      return 1;  // out of memory: return what was found so far
    }
    return 0;
  };
  dl_iterate_phdr(collect, &paths);
  return paths;
}

}  // namespace nvx::net
