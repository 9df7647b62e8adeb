// nvx's kernels on the fake accelerator: threads of the host play them, on its streams and in its memory.

#include <dlfcn.h>

#include <functional>
#include <memory>
#include <vector>

#include "kernel/launch_cuda.h"
#include "support/twin.h"
#include "torch/kernel_path.h"

namespace nvx::kernel {
namespace {

constexpr int kPlayedLanes = 2;
constexpr int kResident = 4;  ///< blocks: as many threads as two cores can bear

/// A name of fake_device's, which was loaded for all to see.
template <class Function>
Function* of_device(const char* name) {
  auto* const found = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  if (!found) throw Error(Code::kSystem, std::string("nvx: the fake accelerator has no ") + name);
  return found;
}

std::byte* real(std::byte* address) {
  static auto* const translate = of_device<void*(void*)>("fake_device_real");
  return static_cast<std::byte*>(translate(address));
}

void push(void* stream, std::function<void()> task) {
  static auto* const enqueue = of_device<void(void*, void (*)(void*), void*)>("fake_device_push");
  enqueue(
      stream,
      [](void* context) {
        const std::unique_ptr<std::function<void()>> mine(static_cast<std::function<void()>*>(context));
        (*mine)();
      },
      new std::function<void()>(std::move(task)));
}

}  // namespace

bool built_with_cuda() { return true; }

Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
                   void* stream) {
  NVX_TRY(check_launch(channel, jobs, table));
  std::vector<Job> mine(jobs.begin(), jobs.end());
  std::vector<Piece> pieces(table.begin(), table.end());
  push(stream, [channel, mine = std::move(mine), pieces = std::move(pieces)]() mutable {
    for (Job& job : mine) job.send.base = real(job.send.base), job.recv.base = real(job.recv.base);
    for (Piece& piece : pieces) piece.data = real(piece.data);
    (void)test::play_kernel(channel, mine, pieces.data(), kPlayedLanes);
  });
  return {};
}

Status load_cuda(std::vector<KernelFacts>* facts) {
  facts->push_back({"played", 0, 0, kResident});
  return {};
}

Status launch_fused(const FusedRank*, uint32_t, uint32_t, void*) {
  return {Code::kInvalid, "nvx: fused launches are not played here"};
}

}  // namespace nvx::kernel

namespace nvx {

at::DeviceType kernel_device() { return at::kPrivateUse1; }

}  // namespace nvx
