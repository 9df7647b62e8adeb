#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "group/group.h"

namespace nvx {

class Communicator;

/// A rendezvous of a block: where each rank of a group has its own.
struct Rendezvous {
  std::shared_ptr<Symmetric> ranks;
  at::Tensor addresses;  ///< on the block's device: of the data by rank, then of the pads by rank
  c10::weak_intrusive_ptr<c10d::Backend> backend;
  std::weak_ptr<Communicator> communicator;
};

/// A block of memory for `torch.distributed._symmetric_memory`: the data of one tensor, and behind it its signal pad.
/// Host memory is of the process's `TensorMemory`, a GPU's of its pool. It returns there when this rank and all ranks
/// of its rendezvous have dropped their tensors and handles, or have ended. The drop of GPU memory waits for the GPU.
class Block {
 public:
  /// Zeroes the pad. `group`: the default of rendezvous. Throws Error.
  Block(size_t bytes, size_t pad_bytes, c10::Device device, std::optional<std::string> group);
  ~Block();
  Block(const Block&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return place_.bytes; }
  c10::Device device() const { return device_; }
  const std::optional<std::string>& group() const { return group_; }

  /// The rendezvous with the current ranks of the group. The first call is a collective call. Throws Error.
  std::shared_ptr<const Rendezvous> rendezvous(const c10::intrusive_ptr<c10d::Backend>& backend,
                                               const std::shared_ptr<Communicator>& communicator) EXCLUDES(mutex_);

 private:
  using AllRendezvous = std::vector<std::shared_ptr<const Rendezvous>>;
  void take_host_memory(size_t bytes);
  void take_device_memory(size_t bytes);
  std::shared_ptr<const Rendezvous> make_rendezvous(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                    const std::shared_ptr<Communicator>& communicator, Group& group);
  void free_device_memory(AllRendezvous&& all);
  static std::function<bool()> leave(AllRendezvous&& all);

  SymmetricBlock place_;
  const c10::Device device_;
  const std::optional<std::string> group_;
  const uint32_t fork_generation_;
  std::shared_ptr<ShmRegistry> shm_;
  Span span_;  // of host memory
  std::byte* data_ = nullptr;
  Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<const Rendezvous>> rendezvous_ GUARDED_BY(mutex_);  // by the id of the group
  std::atomic<bool> unsure_{false};  // a peer may use the block although a rendezvous failed here: it is never freed
};

}  // namespace nvx
