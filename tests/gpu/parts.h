#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gpu/report.h"
#include "memory/driver/device_driver.h"

/// The parts, one function each. A part returns the exit code and throws Error if it cannot continue.
namespace nvx::gpu {

struct PartOptions {
  std::chrono::milliseconds span{60'000};
  std::chrono::milliseconds patience{30};  ///< of a kernel whose peer never comes
  bool lean = false;                       ///< a few of each: the sanitizers are watching
  std::vector<uint32_t> ranks{};           ///< empty: the part's own choice
  bool together = false;                   ///< processes share the device at once (MPS), or have one each
  std::string kind{};  ///< of memory that processes share, a word of kKindWords; empty: the best there is
};

/// The name of a kind of shared memory on the command line.
struct KindWord {
  const char* word;
  ShareKind kind;
};
inline constexpr KindWord kKindWords[] = {
    {"fabric", ShareKind::kFabric}, {"fd", ShareKind::kFd}, {"ipc", ShareKind::kIpc}, {"host", ShareKind::kHost}};
/// None for an empty word. Throws Error for an unknown one.
std::optional<ShareKind> kind_of(const std::string& word);

int facts(const PartOptions& options);
int correct(const PartOptions& options);
int streams(const PartOptions& options);
int absent(const PartOptions& options);
int abort_word(const PartOptions& options);
int graph(const PartOptions& options);
int bench(const PartOptions& options);
/// The same with a group's own blocks, packets and chunks; and without words in host memory, and without fences.
int product(const PartOptions& options);
int host_calls(const PartOptions& options);
int copies(const PartOptions& options);
int pairs(const PartOptions& options);
int processes(const PartOptions& options);
int killed(const PartOptions& options);
int bench_processes(const PartOptions& options);

/// Runs a rank of `processes`, `killed` or `bench_processes`. The arguments follow the part's name.
int be_rank(const std::vector<std::string>& arguments);

/// The reason why no part can run here; empty if there is a device.
std::string no_device();

}  // namespace nvx::gpu
