#include "torch/symmetric/allocator.h"

#include <c10/core/DeviceGuard.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "base/contain.h"
#include "base/per_process.h"
#include "kernel/gpu/launch_cuda.h"
#include "kernel/gpu/signals.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/backend.h"
#include "torch/core/argument_error.h"
#include "torch/core/interrupt.h"
#include "torch/symmetric/block.h"

namespace nvx {
namespace {

namespace symm_mem = c10d::symmetric_memory;

/// The handle that rendezvous returns: all ranks' blocks, as this rank maps them.
class Handle final : public symm_mem::SymmetricMemory {
 public:
  Handle(std::shared_ptr<Block> block, std::shared_ptr<const Rendezvous> rendezvous, size_t offset)
      : block_(std::move(block)), rendezvous_(std::move(rendezvous)), offset_(offset) {}

  std::vector<void*> get_buffer_ptrs() override { return by_rank(&Symmetric::data); }
  std::vector<void*> get_signal_pad_ptrs() override { return by_rank(&Symmetric::pad); }
  void** get_buffer_ptrs_dev() override { return static_cast<void**>(rendezvous_->addresses.data_ptr()); }
  void** get_signal_pad_ptrs_dev() override { return get_buffer_ptrs_dev() + get_world_size(); }
  size_t get_buffer_size() override { return block_->bytes(); }
  size_t get_offset() override { return offset_; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return ranks().rank(); }
  int get_world_size() override { return ranks().size(); }
  c10::Device get_device() override { return block_->device(); }
  bool world_within_direct_access() override { return true; }

  void barrier(int channel, size_t timeout_ms) override {
    check("barrier", channel);
    in_group("barrier", {.puts = true, .waits = true}, channel, timeout_ms, &Symmetric::barrier);
  }
  void put_signal(int to, int channel, size_t timeout_ms) override {
    check("put_signal", channel, to);
    in_group("put_signal", {.peer = to, .puts = true}, channel, timeout_ms, &Symmetric::put, to);
  }
  void wait_signal(int from, int channel, size_t timeout_ms) override {
    check("wait_signal", channel, from);
    in_group("wait_signal", {.peer = from, .waits = true}, channel, timeout_ms, &Symmetric::wait, from);
  }

 private:
  Symmetric& ranks() const { return *rendezvous_->ranks; }
  static std::chrono::milliseconds span_of(size_t timeout_ms) {
    return std::chrono::milliseconds(std::min<size_t>(timeout_ms, INT64_MAX / 2'000'000));
  }

  std::vector<void*> by_rank(std::byte* (Symmetric::*place)(int) const) const {
    std::vector<void*> all;
    for (int r = 0; r < ranks().size(); ++r) all.push_back((ranks().*place)(r));
    return all;
  }

  /// The texts have torch's words.
  void check(const char* called, int channel, int peer = 0) const {
    const auto channels = int64_t(ranks().channels());
    if (channel < 0 || channel >= channels) {
      throw_argument_error("nvx: symm_mem ", called, ": the maximum supported channel for ", ranks().size(),
                           " ranks is ", channels - 1, ", and this is ", channel,
                           ". Next: call symm_mem.set_signal_pad_size before symm_mem.empty");
    }
    if (peer < 0 || peer >= ranks().size())
      throw_argument_error("nvx: symm_mem ", called, ": rank must be in [0, ", ranks().size(), ") (got ", peer, ")");
  }

  /// On the host the caller waits, on a GPU its stream does. Raises unless the group can be used: a handle may outlive
  /// it.
  template <class Act, class... Peer>
  void in_group(const char* called, kernel::SignalJob job, int channel, size_t timeout_ms, Act act,
                Peer... peer) const {
    const auto backend = rendezvous_->backend.lock();
    const auto communicator = rendezvous_->communicator.lock();
    if (!backend || !communicator)
      throw_argument_error("nvx: symm_mem ", called, ": the group of this handle has been destroyed");
    Status status;
    const c10::Device device = block_->device();
    without_python_lock([&] {
      Group& group = communicator->context.checked_group();  // its kernels serve device tensors
      if (device.is_cpu()) {
        status = (ranks().*act)(group.core(), peer..., uint64_t(channel), span_of(timeout_ms));
        return;
      }
      const RelaxedCaptureGuard relaxed;
      const c10::OptionalDeviceGuard on(device);
      const c10::Stream stream = current_stream(device);
      if (capture_of(stream) != 0) {
        throw_argument_error("nvx: symm_mem ", called,
                             " cannot be captured into a graph; torch's operators can, which "
                             "signal in their own kernels");
      }
      job.pads = reinterpret_cast<uint32_t**>(const_cast<Handle*>(this)->get_signal_pad_ptrs_dev());
      job.channel = uint32_t(channel);
      void* const native = c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(stream);
      status = group.device().signal(job, {native}, span_of(timeout_ms));
    });
    raise_interrupt();
    if (!status.ok() && status.code() == Code::kInvalid) throw_argument_error(status.what());
    communicator->context.raise_if_failed(status);
  }

  const std::shared_ptr<Block> block_;
  const std::shared_ptr<const Rendezvous> rendezvous_;
  const size_t offset_;
};

/// The blocks of this process. A forked child has none: the tensors that it inherits are its parent's.
struct Blocks {
  Mutex mutex;
  std::map<std::byte*, std::shared_ptr<Block>> by_address GUARDED_BY(mutex);
  static Blocks& instance() { return of_this_process<Blocks>(); }

  /// The block of this address, which may be inside it; null if there is none.
  std::shared_ptr<Block> find(const void* at) {
    auto* const address = static_cast<std::byte*>(const_cast<void*>(at));
    MutexLock lock(mutex);
    auto found = by_address.upper_bound(address);
    if (found == by_address.begin()) return nullptr;
    const auto& [begin, block] = *--found;
    return address == begin || address < begin + block->bytes() ? block : nullptr;
  }
};

/// The group's nvx, and the backend that keeps it.
std::pair<c10::intrusive_ptr<c10d::Backend>, std::shared_ptr<Communicator>> communicator_of(const std::string& group,
                                                                                            c10::Device device) {
  const c10::intrusive_ptr<c10d::Backend> backend = c10d::resolve_process_group(group)->getBackend(device.type());
  const auto* const nvx = dynamic_cast<ProcessGroupNVX*>(backend.get());
  if (!nvx) {
    throw_argument_error("nvx: rendezvous: group ", group, " uses ", backend->getBackendName(), " for tensors of ",
                         c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                         ", and memory of nvx needs nvx, without the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL");
  }
  return {backend, nvx->communicator()};
}

class Allocator final : public symm_mem::SymmetricMemoryAllocator {
 public:
  explicit Allocator(c10::DeviceType type) : type_(type) {}

  void* alloc(size_t size, int device, const std::optional<std::string>& group) override {
    try {
      const bool current = device < 0 && type_ != c10::kCPU;
      const c10::Device on =
          current ? c10::impl::VirtualGuardImpl(type_).getDevice() : c10::Device(type_, c10::DeviceIndex(device));
      const auto block = std::make_shared<Block>(size, symm_mem::get_signal_pad_size(), on, group);
      Blocks& all = Blocks::instance();
      MutexLock lock(all.mutex);
      all.by_address[block->data()] = block;
      return block->data();
    } catch (const Error& error) {
      raise(error.status());
    }
  }

  /// torch may free memory at the very end of the process, when nothing can be torn down any more.
  void free(void* at) override {
    if (symm_mem::is_finalizing()) return;
    contain("freeing symmetric memory", [&] {
      std::shared_ptr<Block> last;  // destroyed after the lock's release
      Blocks& all = Blocks::instance();
      MutexLock lock(all.mutex);
      const auto found = all.by_address.find(static_cast<std::byte*>(at));
      if (found == all.by_address.end()) return;
      last = std::move(found->second);
      all.by_address.erase(found);
      lock.unlock();
    });
  }

  size_t get_alloc_size(void* at) override {
    const auto block = Blocks::instance().find(at);
    if (!block) throw_argument_error("nvx: get_alloc_size: this memory does not come from symm_mem.empty");
    return block->bytes();
  }

  /// Returns null, as torch's own do, for memory that is not of this allocator: torch's operators then refuse it.
  c10::intrusive_ptr<symm_mem::SymmetricMemory> rendezvous(void* at, const std::optional<std::string>& group) override {
    const std::shared_ptr<Block> block = Blocks::instance().find(at);
    if (!block) {
      TORCH_WARN("nvx: rendezvous: this tensor does not come from symm_mem.empty, so no other rank can map it");
      return nullptr;
    }
    const std::string name = group && !group->empty() ? *group : block->group().value_or("");
    if (name.empty()) throw_argument_error("nvx: rendezvous: no group is given, here or to symm_mem.empty");
    const auto [backend, communicator] = communicator_of(name, block->device());
    std::shared_ptr<const Rendezvous> rendezvous;
    Status status;
    without_python_lock([&, &backend = backend, &communicator = communicator] {
      try {
        rendezvous = block->rendezvous(backend, communicator);
      } catch (const Error& error) {
        status = error.status();
      }
    });
    raise_interrupt();
    if (!status.ok() && status.code() == Code::kInvalid) throw_argument_error("nvx: rendezvous: ", status.reason());
    communicator->context.raise_if_failed(status);
    return c10::make_intrusive<Handle>(block, rendezvous, size_t(static_cast<std::byte*>(at) - block->data()));
  }

  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return type_; }
  std::string name() override { return "NVX"; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  bool has_allocation(void* at) override { return Blocks::instance().find(at) != nullptr; }
#endif

 private:
  const c10::DeviceType type_;
};

}  // namespace

/// torch keeps one allocator of a name, so "NVX" is the device's where there are kernels.
void register_symmetric_memory() {
  std::vector<c10::DeviceType> types{c10::kCPU};
  if (kernel::built_with_cuda()) types.push_back(kernel_device());
  for (const c10::DeviceType type : types) {
    const auto made = c10::make_intrusive<Allocator>(type);
    symm_mem::register_availability(made->name(), made);
    if (!symm_mem::has_allocator(type)) symm_mem::register_allocator(type, made);
  }
}

}  // namespace nvx
