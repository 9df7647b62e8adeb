// Stands in for kernel/gpu/launch_cuda.cu where nvx is built without CUDA.

#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"
#include "kernel/gpu/signals.h"
#include "memory/driver/relaxed_capture_guard.h"

namespace nvx::kernel {
namespace {

Status refusal() {
  return {Code::kInvalid, "nvx: this build has no CUDA kernels: build nvx with nvcc and without NVX_CUDA=0"};
}

}  // namespace

bool built_with_cuda() { return false; }

Status launch_cuda(const DeviceChannel&, std::span<const Job>, std::span<const Piece>, void*) { return refusal(); }

Status launch_multicast_cuda(const DeviceChannel&, const Job&, const MulticastView&, void*) { return refusal(); }

Status signal_cuda(const DeviceChannel&, const SignalJob&, void*) { return refusal(); }

Status load_cuda(std::vector<KernelAttributes>*) { return refusal(); }

uint64_t capture_of(void* stream) { return is_captured(stream) ? UINT64_MAX : 0; }

Status call_host(void*, void (*)(void*), void*) { return refusal(); }

Status TailEvent::make() { return refusal(); }

Status TailEvent::block(void*, bool) { return make(); }

Status TailEvent::record(void*, uint64_t) { return make(); }

bool TailEvent::passed() const { return true; }

}  // namespace nvx::kernel
