// nvx_gpu PART [--seconds N] [--patience MS] [--ranks 2,4] [--lean] [--together] [--kind host]: runs one part of the
// GPU tests.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>

#include "base/error.h"
#include "gpu/parts.h"

namespace nvx::gpu {
namespace {

struct Part {
  const char* name;
  int (*run)(const PartOptions&);
};
constexpr Part kParts[] = {
    {"facts", facts},           {"correct", correct},
    {"streams", streams},       {"absent", absent},
    {"abort", abort_word},      {"graph", graph},
    {"bench", bench},           {"product", product},
    {"host_calls", host_calls}, {"copies", copies},
    {"pairs", pairs},           {"killed", killed},
    {"processes", processes},   {"bench_processes", bench_processes},
};

int usage() {
  std::fprintf(stderr,
               "usage: nvx_gpu PART [--seconds N] [--patience MS] [--ranks 2,4] [--lean] [--together] [--kind KIND], "
               "PART one of");
  for (const Part& part : kParts) std::fprintf(stderr, " %s", part.name);
  std::fprintf(stderr, ", KIND one of");
  for (const KindWord& one : kKindWords) std::fprintf(stderr, " %s", one.word);
  std::fprintf(stderr, "\n");
  return 2;
}

/// False: the options are invalid.
bool read_options(const std::vector<std::string>& arguments, PartOptions* options) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool has_value = i + 1 < arguments.size();
    if (arguments[i] == "--lean") {
      options->lean = true;
    } else if (arguments[i] == "--together") {
      options->together = true;
    } else if (arguments[i] == "--seconds" && has_value) {
      options->span = std::chrono::milliseconds(int64_t(std::atof(arguments[++i].c_str()) * 1000));
    } else if (arguments[i] == "--patience" && has_value) {
      options->patience = std::chrono::milliseconds(std::atoi(arguments[++i].c_str()));
    } else if (arguments[i] == "--kind" && has_value) {
      options->kind = arguments[++i];
      const auto known = [&](const KindWord& one) { return options->kind == one.word; };
      if (std::none_of(std::begin(kKindWords), std::end(kKindWords), known)) return false;
    } else if (arguments[i] == "--ranks" && has_value) {
      for (const char* at = arguments[++i].c_str(); *at;) {
        char* end = nullptr;
        const unsigned long n = std::strtoul(at, &end, 10);
        if (end == at || n == 0 || n > 64) return false;
        options->ranks.push_back(uint32_t(n));
        at = *end == ',' ? end + 1 : end;
      }
    } else {
      return false;
    }
  }
  return true;
}

int run(const Part& part, const PartOptions& options) {
  const Report report(part.name, options.span);
  try {
    const bool asks_itself = part.run == processes || part.run == killed || part.run == bench_processes;
    // A process that forks must not have initialized CUDA, so these parts query the device in a child.
    if (const std::string none = asks_itself ? "" : no_device(); !none.empty()) return report.skip(none);
    return part.run(options);
  } catch (const std::exception& error) {
    return report.break_down(error.what());
  }
}

int run_command(std::vector<std::string> arguments) {
  // These are set before the first CUDA call. Kernels of several streams run concurrently only if each has its own
  // connection. A kernel that is loaded lazily at its first launch may wait for kernels that wait for it.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  if (arguments.empty()) return usage();
  const std::string name = arguments.front();
  arguments.erase(arguments.begin());
  if (name == "rank") return be_rank(arguments);
  PartOptions options;
  if (!read_options(arguments, &options)) return usage();
  for (const Part& part : kParts) {
    if (name == part.name) return run(part, options);
  }
  return usage();
}

}  // namespace
}  // namespace nvx::gpu

int main(int count, char** words) {
  const int code = nvx::gpu::run_command({words + 1, words + count});
  std::fflush(nullptr);
  _Exit(code);  // skips destructors: they would wait for a kernel that hangs
}
