#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "group/group.h"
#include "group/meet/store_exchange.h"
#include "torch/core/store.h"

namespace nvx {

/// What a rank tells the others about itself before another backend is set up to serve its tensors.
struct DelegateCard {
  std::string gpu;      ///< which GPU of its host it has; ranks that share one cannot be served
  std::string why_not;  ///< why this rank cannot be served; empty where it can
};

/// These call Python: nvx/delegate.py, which makes NCCL's backend, or that of a test. They throw what it throws.
DelegateCard look_for_delegate(at::Device device);
c10::intrusive_ptr<c10d::Backend> make_delegate(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device);
/// Whether this thread's current stream of the device is being captured. For versions of torch whose C++ cannot tell.
bool python_sees_capture(at::Device device);

/// The first ends what a backend is doing, and returns within a moment. The second lets go of it in good order, and
/// returns within the span. Both return even if the backend does not.
void abort_delegate(const c10::intrusive_ptr<c10d::Backend>& backend);
void shut_delegate_down(const c10::intrusive_ptr<c10d::Backend>& backend, std::chrono::milliseconds span);

/// How the ranks of a group come to have another backend beside it, or agree that none of them has one. Used once.
class DelegateSetup {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  /// topology: that of a group that was made for this, as the keys in the store are named by it. group: while anything
  /// is waited for, it is asked whether the user, an abort, or a rank that has ended has made the waiting pointless.
  DelegateSetup(Group& group, const Topology& topology, c10::intrusive_ptr<c10d::Store> store, at::Device device);

  /// A step of all ranks together. Null on all of them if any cannot have the backend; why_not() is then the same on
  /// all.
  ///
  /// Connecting calls code that may never return. It gets half of the group's timeout, so that the ranks have the other
  /// half to agree. A rank that cannot connect says so at once, as the others may be waiting for it inside their calls.
  ///
  /// Throws Error if it is not known what the others do now: a rank was not heard, or has ended, or all was called off.
  Backend agree();
  const std::string& why_not() const { return why_not_; }

 private:
  enum class Kind : char { kConnected = '+', kCannot = '-', kCalledOff = '0' };
  /// What a rank says of how its connecting went.
  struct Said {
    Kind kind;
    std::string text;
  };
  class Attempt;

  DelegateCard look() const;
  std::string refusal_of(const std::vector<std::vector<std::byte>>& cards) const;
  std::string refusal_of_connecting(const std::vector<std::vector<std::byte>>& said) const;
  Said connect();
  Said await(Attempt& attempt);
  Said cannot(const std::string& why);
  /// Throws if waiting has become pointless.
  void look_about() const;
  std::string key(const std::string& what) const { return prefix_ + what; }

  Group& group_;
  const Topology& topology_;
  const c10::intrusive_ptr<c10d::Store> torch_store_;
  const at::Device device_;
  const std::chrono::milliseconds span_;
  const std::string prefix_;
  TorchStore store_;
  StoreExchange exchange_;
  Backend backend_;
  std::string why_not_;
};

}  // namespace nvx
