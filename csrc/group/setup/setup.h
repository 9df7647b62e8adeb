#pragma once

#include <memory>

#include "base/deadline.h"
#include "group/setup/group_options.h"
#include "group/setup/members.h"
#include "group/setup/store.h"
#include "group/setup/store_setup.h"
#include "net/group_port.h"

namespace nvx {

/// The set-up of a group on one rank. The rank exchanges its description with the others through the store, then memory
/// with the ranks of its host over Unix sockets, and waits until all have mapped it. If the set-up fails, it reports
/// that to the ranks that wait. Lives until the group is complete.
class SetUp {
 public:
  /// The result of a set-up.
  struct Made {
    Members members;
    std::unique_ptr<net::GroupPort> port;  ///< connected to the other hosts; null if there are none
    /// Lives until this rank leaves the group or fails it. While it lives, the process watches the peers of the group;
    /// see `ShmRegistry::note_rank()`.
    std::shared_ptr<bool> membership;
  };

  /// `store` and `options` must outlive it.
  SetUp(Store& store, const GroupOptions& options) : store_(store), options_(options), store_setup_(store, options) {}

  /// Returns when all ranks have mapped each other. Throws Error after `give_up()`.
  Made run();
  /// Call if no group can be made of the result: notifies the ranks that wait for this one. Peers may have mapped its
  /// pad, or may still do so. The pad stays until they cannot access it, and shows that its rank has left, and why.
  void give_up(Made made, const Failure& why);

 private:
  Made made();
  void begin(const IpcSocket& ipc);
  void find_members(IpcSocket& ipc);
  void shrink_pad();
  void map_peers(IpcSocket& ipc);
  void await_ready(IpcSocket& ipc);
  void check_local_ranks();
  std::vector<AddressPrefix> sources() const;
  std::shared_ptr<net::Messenger> messenger() const;
  void open_port();
  std::vector<std::vector<std::byte>> exchange_addresses(const std::vector<std::byte>& own);
  int rank() const { return options_.rank; }
  size_t size() const { return size_t(options_.size); }
  const std::string& name() const { return options_.name; }
  std::string rank_name(int rank) const { return nvx::rank_name(rank, options_.global_ranks); }

  Store& store_;
  const GroupOptions& options_;
  StoreSetUp store_setup_;
  Deadline deadline_;  // set when the set-up begins
  Overrides tuning_;
  Members members_;
  std::unique_ptr<net::GroupPort> port_;
  std::shared_ptr<bool> membership_ = std::make_shared<bool>(true);
};

}  // namespace nvx
