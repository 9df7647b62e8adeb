#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "group/group.h"
#include "group/store_exchange.h"
#include "torch/store.h"

namespace nvx {

/// What another backend needs of a rank, so that it can serve its tensors.
struct DelegateCard {
  std::string gpu;      ///< which of the host's it has; ranks that share one cannot be served
  std::string why_not;  ///< this rank cannot be served; empty where it can
};

/// Python's side, nvx/delegate.py: NCCL's, or what tests put there. These throw what it throws.
DelegateCard look_for_delegate(at::Device device);
c10::intrusive_ptr<c10d::Backend> make_delegate(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device);
/// Whether this thread's current stream of the device is being captured, where torch's C++ cannot tell.
bool python_sees_capture(at::Device device);

/// Ends what a backend is at, within a moment, or lets go of it in good order, within the span: whatever becomes of the
/// call.
void abort_delegate(const c10::intrusive_ptr<c10d::Backend>& backend);
void shut_delegate_down(const c10::intrusive_ptr<c10d::Backend>& backend, std::chrono::milliseconds span);

/// How the ranks of a group come to have another backend beside it, or agree that none of them has one. Used once.
class DelegateSetup {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  /// topology: names its keys in the store, and so is of a group made for this. The group is asked, while anything is
  /// waited for, whether the user, an abort or a rank that has ended has made it pointless.
  DelegateSetup(Group& group, const Topology& topology, c10::intrusive_ptr<c10d::Store> store, at::Device device);

  /// A step of all ranks together. Null where any of them cannot have it; why_not() then says the same on all.
  ///
  /// Connecting calls what may never return. It gets half of the group's timeout, so that the ranks have the other half
  /// to agree; and where one cannot, it says so at once, as the others may be waiting for it in there.
  ///
  /// Throws Error where what the others do now is not known: one of them was not heard, or ended, or it was called off.
  Backend agree();
  const std::string& why_not() const { return why_not_; }

 private:
  enum class Kind : char { kConnected = '+', kCannot = '-', kCalledOff = '0' };
  /// What a rank says of its connecting.
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
  /// Throws where waiting has become pointless.
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
