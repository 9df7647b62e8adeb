#pragma once

#include <memory>
#include <string>
#include <vector>

#include "net/messenger.h"
#include "support/groups.h"
#include "support/loopback.h"

/// Groups of threads as ranks of several hosts: each rank has its own messenger, all of them over one loopback network.
namespace nvx::test {

class Hosts {
 public:
  /// The host of each rank.
  explicit Hosts(std::vector<int> host_of, net::LoopbackNet::Options options = {},
                 std::chrono::milliseconds silence = std::chrono::seconds(10))
      : host_of_(std::move(host_of)), net_(options) {
    for (size_t r = 0; r < host_of_.size(); ++r)
      messenger_.push_back(std::make_shared<net::Messenger>(net_.open(), silence));
  }

  int ranks() const { return int(host_of_.size()); }
  net::LoopbackNet& net() { return net_; }

  GroupOptions options(const std::string& name, int rank, uint32_t first_epoch = 0) const {
    return options_of(name, rank, ranks(), size_t(rank), first_epoch);
  }
  /// The options for a group of some of them: `rank` of `size` there, for the rank that is `who` here.
  GroupOptions options_of(const std::string& name, int rank, int size, size_t who, uint32_t first_epoch = 0) const {
    GroupOptions o = test::options(name, rank, size, first_epoch);
    o.host = "host" + std::to_string(host_of_[who]);
    o.messenger = [messenger = messenger_[who]] { return messenger; };
    return o;
  }
  /// As test::in_group(), of all of them.
  void in_group(const std::string& name, const std::function<void(Group& group, int rank)>& body) const {
    MemoryStore store;
    as_threads(ranks(), [&](int rank) {
      Group group(store, options(name, rank));
      body(group, rank);
    });
  }

 private:
  std::vector<int> host_of_;
  net::LoopbackNet net_;
  std::vector<std::shared_ptr<net::Messenger>> messenger_;
};

}  // namespace nvx::test
