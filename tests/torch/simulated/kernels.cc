// nvx's kernels on the fake accelerator: host threads simulate them on its streams and in its memory.

#include <dlfcn.h>

#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"
#include "support/simulated_device.h"
#include "torch/streams/staging_copies.h"

namespace nvx::kernel {
namespace {

constexpr int kSimulatedLanes = 2;
/// Resident blocks. Where three processes share them, the first group gets four: two cores cannot run more threads.
/// Groups of failed tests keep theirs.
constexpr int kResident = 48;

/// A symbol of `fake_device`, which is loaded with `RTLD_GLOBAL`.
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
  using Task = std::function<void()>;
  static auto* const enqueue = of_device<void(void*, void (*)(void*), void (*)(void*), void*)>("fake_device_push");
  enqueue(
      stream, [](void* context) { (*static_cast<Task*>(context))(); },
      [](void* context) { delete static_cast<Task*>(context); }, new Task(std::move(task)));
}

/// The stream handle of the tests' libcuda, which is no stream of the fake accelerator.
bool is_drivers_own(void* stream) { return reinterpret_cast<intptr_t>(stream) == 77; }

/// A kernel of a trial: at once; or behind the ones before, and slowly, as where processes take turns on a GPU.
void run_on_drivers_own(std::function<void()> kernel) {
  static std::shared_future<void> last;
  const int ms = *of_device<int>("fake_device_trials_take_ms");
  if (ms == 0) return kernel();
  last = std::async(std::launch::async, [before = last, kernel = std::move(kernel), ms] {
           if (before.valid()) before.wait();
           std::this_thread::sleep_for(std::chrono::milliseconds(ms));
           kernel();
         }).share();
}

}  // namespace

bool built_with_cuda() { return true; }

Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
                   void* stream) {
  NVX_TRY(check_launch(channel, jobs, table));
  std::vector<Job> mine(jobs.begin(), jobs.end());
  std::vector<Piece> pieces(table.begin(), table.end());
  if (is_drivers_own(stream)) {
    run_on_drivers_own([channel, mine = std::move(mine), pieces = std::move(pieces)] {
      (void)test::simulate_kernel(channel, mine, pieces.data(), kSimulatedLanes);
    });
    return {};
  }
  for (Job& job : mine) job.send.base = real(job.send.base), job.recv.base = real(job.recv.base);
  for (Piece& piece : pieces) piece.data = real(piece.data);
  push(stream, [channel, mine = std::move(mine), pieces = std::move(pieces)] {
    (void)test::simulate_kernel(channel, mine, pieces.data(), kSimulatedLanes);
  });
  return {};
}

Status launch_multicast_cuda(const DeviceChannel&, const Job&, const MulticastView&, void*) {
  return {Code::kInvalid, "nvx: the fake accelerator has no multicast"};
}

Status signal_cuda(const DeviceChannel& channel, const SignalJob& job, void* stream) {
  push(stream, [channel, job] {
    SignalJob mine = job;
    mine.pads =
        reinterpret_cast<uint32_t* const*>(real(reinterpret_cast<std::byte*>(const_cast<uint32_t**>(job.pads))));
    (void)test::simulate_signals(channel, mine);
  });
  return {};
}

Status load_cuda(std::vector<KernelAttributes>* attributes) {
  attributes->push_back({"simulated", 0, 0, kResident});
  return {};
}

uint64_t capture_of(void* stream) {
  static auto* const query = of_device<uint64_t(void*)>("fake_device_capture");
  return query(stream);
}

Status call_host(void* stream, void (*what)(void*), void* with) {
  push(stream, [what, with] { what(with); });
  return {};
}

Status TailEvent::make() {
  static auto* const event = of_device<void*()>("fake_device_event");
  if (!event_) event_ = event();
  return {};
}

Status TailEvent::block(void* stream, bool) {
  static auto* const wait = of_device<void(void*, void*)>("fake_device_wait");
  NVX_TRY(make());
  wait(event_, stream);
  return {};
}

Status TailEvent::record(void* stream, uint64_t capture) {
  static auto* const record = of_device<void(void*, void*)>("fake_device_record");
  static auto* const record_beside = of_device<void(void*, void*)>("fake_device_record_beside");
  NVX_TRY(make());
  (capture == 0 ? record : record_beside)(event_, stream);
  return {};
}

bool TailEvent::passed() const {
  static auto* const passed = of_device<bool(void*)>("fake_device_passed");
  return !event_ || passed(event_);
}

}  // namespace nvx::kernel

namespace nvx {

at::DeviceType kernel_device() { return at::kPrivateUse1; }

}  // namespace nvx
