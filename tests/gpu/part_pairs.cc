// Several GPUs: the bandwidth of copies between each pair, and the round-trip time of a flag.

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "gpu/control.h"
#include "gpu/device.h"
#include "gpu/parts.h"
#include "memory/driver/driver_library.h"
#include "memory/gpu/device_measure.h"

namespace nvx::gpu {
namespace {

/// Flag round-trip time by kernels of both devices; negative if they cannot. `broken` is set if they should work and do
/// not.
double flag_round_us(int a, int b, std::string* why_not, std::string* broken) {
  int there = 0, back = 0;
  must(cudaDeviceCanAccessPeer(&there, a, b), "cudaDeviceCanAccessPeer");
  must(cudaDeviceCanAccessPeer(&back, b, a), "cudaDeviceCanAccessPeer");
  if (!there || !back) {
    *why_not = "no peer access";
    return -1;
  }
  const auto enable = [](int device, int peer) {
    must(cudaSetDevice(device), "cudaSetDevice");
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) must(error, "cudaDeviceEnablePeerAccess");
    (void)cudaGetLastError();
  };
  enable(a, b);
  enable(b, a);
  must(cudaSetDevice(a), "cudaSetDevice");
  const Memory of_a(256);
  const Stream on_a;
  must(cudaSetDevice(b), "cudaSetDevice");
  const Memory of_b(256);
  const Stream on_b;
  auto* const flag_a = reinterpret_cast<Stamp*>(of_a.data());
  auto* const flag_b = reinterpret_cast<Stamp*>(of_b.data());
  const Memory late(sizeof(uint32_t), Memory::Where::kPinned);
  auto* const raised = reinterpret_cast<uint32_t*>(late.data());
  double best = -1;
  Stamp from = 0;
  for (int round = 0; round < 4; ++round) {
    constexpr uint32_t kRounds = 2000;
    must(cudaSetDevice(b), "cudaSetDevice");
    must(cudaError_t(launch_ping({flag_b, flag_a, 0, from, kRounds, raised}, on_b.get())), "a ping");
    must(cudaSetDevice(a), "cudaSetDevice");
    Timer timer;
    timer.start(on_a);
    must(cudaError_t(launch_ping({flag_a, flag_b, 1, from, kRounds, raised}, on_a.get())), "a ping");
    timer.stop(on_a);
    for (const Stream* stream : {&on_a, &on_b}) {
      if (*why_not = stream->wait(std::chrono::seconds(20)); !why_not->empty()) return -1;
    }
    if (*raised != 0) {
      *broken = "a flag that one GPU raised did not reach the other in 5 s, though they have peer access";
      return -1;
    }
    from += kRounds;
    const double us = timer.us() / kRounds;
    best = round == 0 || us < best ? us : best;
  }
  return best;
}

}  // namespace

int pairs(const PartOptions& options) {
  Report report("pairs", options.span);
  int devices = 0;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) return report.skip("there is one GPU here: pairs need two");
  const auto driver = driver_library();
  for (int a = 0; a < devices; ++a) {
    for (int b = 0; b < devices; ++b) {
      if (a == b) continue;
      const std::string pair = std::to_string(a) + " to " + std::to_string(b);
      if (!report.has_time()) {
        report.cut_short(pair);
        continue;
      }
      const PairSpeed speed = measure_pair(driver, a, b, Deadline::after(std::chrono::seconds(10)));
      Line line;
      line.add("pair", pair).add("gb_s", speed.gb_s).add("copy_us", speed.us).add("own_copy_us", speed.own_us);
      std::string why_not = speed.why_not;
      std::string broken;
      if (a < b && why_not.empty()) line.add("flag_round_us", flag_round_us(a, b, &why_not, &broken));
      if (!why_not.empty()) line.add("why_not", why_not);
      report.check(pair, broken);  // a pair that reports no support is a fact of the machine
      report.print(line);
    }
  }
  return report.finish();
}

}  // namespace nvx::gpu
