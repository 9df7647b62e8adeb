// A description of the machine, and the correctness of the kernels: all ranks fused in a launch, and on separate
// streams.

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "gpu/parts.h"
#include "gpu/rank_program.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = -1;
  (void)cudaDeviceGetAttribute(&value, which, device);
  return value;
}

Line describe_device(int device) {
  cudaDeviceProp properties{};
  must(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  size_t free = 0, total = 0;
  must(cudaSetDevice(device), "cudaSetDevice");
  must(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  char bus[32] = "";
  (void)cudaDeviceGetPCIBusId(bus, sizeof bus, device);
  const double mhz = attribute(cudaDevAttrMemoryClockRate, device) / 1e3;
  const int bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
  return Line()
      .add("gpu", device)
      .add("name", properties.name)
      .add("bus", bus)
      .add("compute", std::to_string(properties.major) + "." + std::to_string(properties.minor))
      .add("processors", properties.multiProcessorCount)
      .add("memory_bytes", uint64_t(total))
      .add("free_bytes", uint64_t(free))
      .add("l2_bytes", uint64_t(properties.l2CacheSize))
      .add("memory_mhz", mhz)
      .add("memory_bus_bits", bits)
      .add("memory_gb_s_by_clock", mhz > 0 && bits > 0 ? 2 * mhz * 1e6 * bits / 8 / 1e9 : -1.0)
      .add("compute_mode", attribute(cudaDevAttrComputeMode, device))
      .add("ecc", attribute(cudaDevAttrEccEnabled, device))
      .add("cooperative_launch", attribute(cudaDevAttrCooperativeLaunch, device))
      .add("compute_preemption", attribute(cudaDevAttrComputePreemptionSupported, device));
}

}  // namespace

std::string no_device() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return "";
  return std::string("no GPU: ") + (error == cudaSuccess ? "CUDA counts none" : cudaGetErrorString(error));
}

int facts(const PartOptions& options) {
  Report report("facts", options.span);
  int devices = 0, driver = 0, runtime = 0;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  must(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  must(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  report.print(Line().add("gpus", devices).add("driver_cuda", driver).add("runtime_cuda", runtime));
  for (int device = 0; device < devices; ++device) report.print(describe_device(device));
  must(cudaSetDevice(0), "cudaSetDevice");
  std::vector<kernel::KernelAttributes> kernels;
  const Status status = kernel::load_cuda(&kernels);
  report.check("every kernel is loaded", status.ok() ? "" : status.what());
  for (const kernel::KernelAttributes& f : kernels) {
    report.print(Line()
                     .add("kernel", f.name)
                     .add("registers", f.registers)
                     .add("local_bytes", uint64_t(f.local_bytes))
                     .add("resident_blocks", f.resident));
    report.check(f.name, f.resident >= 1 ? "" : "not one block of it fits on a processor");
  }
  return report.finish();
}

int correct(const PartOptions& options) {
  Report report("correct", options.span);
  CaseOptions cases;
  cases.most_blocks = resident_blocks();
  cases.lean = options.lean;
  if (!options.ranks.empty()) cases.ranks = options.ranks;
  const MakeChannel make = [](const ChannelShape& shape) { return std::make_unique<World>(shape, World::How::kFused); };
  run_cases(make, cases, report);
  if (!options.lean) run_cpu_path({.ranks = {2, 3, 8}}, report);
  return report.finish();
}

int streams(const PartOptions& options) {
  Report report("streams", options.span);
  const uint32_t resident = resident_blocks();
  struct Way {
    const char* name;
    World::How how;
  };
  constexpr Way kWays[] = {{"an operation a launch", World::How::kStreams},
                           {"several operations a launch", World::How::kBatches},
                           {"a thread a rank", World::How::kThreads}};
  const std::vector<uint32_t> ranks = options.ranks.empty() ? std::vector<uint32_t>{2, 3, 8} : options.ranks;
  for (const auto& [name, how] : kWays) {
    for (const uint32_t n : ranks) {
      if (!report.has_time()) {
        report.cut_short(std::string(name) + ", " + std::to_string(n) + " ranks");
        continue;
      }
      const uint32_t blocks = std::min(4u, resident / n);
      if (blocks == 0) continue;
      // All operations are launched before any is waited for, so the ranks run several rounds without the host in
      // between.
      World world({{n, blocks, 256, 2048}, uint32_t(-20), 0}, how);
      const std::vector<Case> cases = some_cases(n, world.shape(), 100 * n);
      uint64_t done = 0;
      for (size_t at = 0; at < cases.size(); at += kernel::kLaunchJobs) {
        const size_t end = std::min(at + kernel::kLaunchJobs, cases.size());
        const std::vector<Case> some(cases.begin() + long(at), cases.begin() + long(end));
        if (!report.check(std::string(name) + ", " + std::to_string(n) + " ranks", world.perform(some))) break;
        done += some.size();
      }
      report.print(Line().add("how", name).add("ranks", n).add("blocks", blocks).add("operations", done));
    }
  }
  return report.finish();
}

}  // namespace nvx::gpu
