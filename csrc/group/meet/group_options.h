#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace nvx {

namespace net {
class Messenger;
}

/// What a group is asked to be, from one of its ranks.
struct GroupOptions {
  std::string name;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};  ///< of an operation, and of set-up; 0: none
  std::vector<uint64_t> global_ranks;    ///< of the ranks, if known: whom to look after during set-up
  uint32_t first_epoch = 0;              ///< where the counters begin; tests begin near their wrap
  std::string host;                      ///< which host this rank is on, instead of what it finds; for tests
  int shared_reads_from = 32;            ///< ranks from which on one of each host reads the store for the others
  std::function<bool()> unwanted;        ///< asked while the group is being made: it need not be any more
  std::function<std::shared_ptr<net::Messenger>()> messenger;  ///< instead of the process's; for tests
};

}  // namespace nvx
