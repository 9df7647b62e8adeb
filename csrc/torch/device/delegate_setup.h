#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include "base/deadline.h"
#include "group/group.h"
#include "group/setup/store_bootstrap.h"
#include "torch/call/coalescing.h"
#include "torch/core/store.h"

namespace nvx {

/// A rank's information for the others, exchanged before another backend is set up to serve its tensors.
struct DelegateInfo {
  std::string gpu;      ///< the GPU of its host that it uses; ranks that share one cannot be served
  std::string why_not;  ///< why this rank cannot be served; empty if it can
};

/// These call Python, `nvx/delegate.py`, which makes NCCL's backend or a test's. They throw its exceptions.
DelegateInfo find_delegate(at::Device device);
c10::intrusive_ptr<c10d::Backend> make_delegate(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device);

/// Runs an operation on a backend, on the current stream. The call is synchronous in torch's sense. Throws the
/// backend's errors.
void call_delegate(c10d::Backend& backend, const Operation& operation, at::Device device);
/// The same for a batch of messages, in this order. A single message is a batch, too: torch's NCCL has a communicator
/// of its own for each pair whose messages are not in batches, and makes it at the first message.
void call_delegate(c10d::Backend& backend, const DelegatedMessages& batch);

/// abort_delegate() aborts a backend's work and returns within a moment. shut_delegate_down() shuts it down in good
/// order and returns within the span. Both return even if the backend hangs.
void abort_delegate(const c10::intrusive_ptr<c10d::Backend>& backend);
void shut_delegate_down(const c10::intrusive_ptr<c10d::Backend>& backend, std::chrono::milliseconds span);

/// Sets up another backend beside a group, or makes all ranks agree that none of them has one. Used once.
class DelegateSetup {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  /// topology: of a group that was made for this setup, because its name is part of the store's keys. group: checked
  /// during waits, which end if the user interrupts, the group is aborted, or a rank has ended.
  DelegateSetup(Group& group, const Topology& topology, c10::intrusive_ptr<c10d::Store> store, at::Device device);

  /// A collective call. Returns null on all ranks if any rank cannot have the backend; why_not() is then the
  /// same on all ranks.
  /// Connecting calls code that may never return. It gets half of the group's timeout, so that the ranks have the other
  /// half to agree. A rank that cannot connect reports that at once, because the others may be waiting for it inside
  /// their calls.
  /// Throws Error if the state of the other ranks is unknown: a rank did not answer or has ended, or the setup was
  /// aborted.
  Backend agree();
  const std::string& why_not() const { return why_not_; }

 private:
  enum class Kind : char { kConnected = '+', kCannot = '-', kCancelled = '0' };
  /// A rank's report of its connecting.
  struct Outcome {
    Kind kind;
    std::string text;
  };
  class Attempt;

  DelegateInfo local_info() const;
  std::string refusal_of(const std::vector<std::vector<std::byte>>& infos) const;
  std::string refusal_of_connecting(const std::vector<std::vector<std::byte>>& reports) const;
  Outcome connect();
  Outcome await(Attempt& attempt);
  Outcome cannot(const std::string& why);
  /// Throws if the wait must end: see the constructor.
  void check_wait() const;
  std::string key(const std::string& what) const { return prefix_ + what; }

  Group& group_;
  const Topology& topology_;
  const c10::intrusive_ptr<c10d::Store> torch_store_;
  const at::Device device_;
  const std::chrono::milliseconds span_;
  const std::string prefix_;
  TorchStore store_;
  StoreBootstrap bootstrap_;
  Backend backend_;
  std::string why_not_;
};

}  // namespace nvx
