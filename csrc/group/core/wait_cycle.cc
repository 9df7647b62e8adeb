#include "group/core/wait_cycle.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "group/core/status.h"
#include "memory/shm/process_watch.h"

namespace nvx {
namespace {

constexpr size_t kMostProcesses = 32;

template <class T>
T value(const std::atomic<T>& field) {
  return field.load(std::memory_order_relaxed);
}

/// A wait of the process of global rank `from` for a rank of a group.
struct Wait {
  uint64_t group = 0;
  int rank = 0;
  pid_t pid = 0;  ///< of that rank
  int from = 0, to = 0;
  std::string name, call;
  uint64_t began = 0, ended = UINT64_MAX;
};

std::string text_of(const char* field, size_t size) { return printable(std::string(field, strnlen(field, size))); }

bool is_message(const std::string& call) { return call == "send" || call == "recv"; }

bool stopped(pid_t pid) {
  const std::string stat = stat_of(pid);
  return stat.empty() || stat[0] == 'T' || stat[0] == 't';
}

/// `seen`: when the slot was read, which counts as the end of a wait in progress. If a wait was given up, it is the
/// only one.
void add_waits(const StatusSlot& slot, uint64_t seen, std::vector<Wait>& found) {
  for (const StatusSlot::Wait* wait : {&slot.given_up, &slot.current, &slot.of_message}) {
    const uint32_t rank = value(wait->rank);
    if (rank == 0) continue;
    const uint64_t ended = value(wait->ended);
    found.push_back({.group = value(slot.id),
                     .rank = int(rank) - 1,
                     .pid = pid_t(value(wait->pid)),
                     .from = slot.global_rank,
                     .name = text_of(slot.name, sizeof slot.name),
                     .call = name_of_call(value(wait->call)),
                     .began = value(wait->began),
                     .ended = ended == 0 ? seen : ended});
    if (ended != 0) return;
  }
}

/// Follows waits from process to process, until one leads to this process.
class Search {
 public:
  bool follow(Wait wait) {
    if (!pages_.contains(wait.pid)) {
      if (pages_.size() == kMostProcesses) return false;
      const uint64_t now = ns_of(Clock::now());
      pages_[wait.pid] = {now, StatusPage::read(wait.pid)};
    }
    const auto& [seen, page] = pages_[wait.pid];
    const StatusSlot* member = nullptr;
    std::vector<Wait> next;
    for (size_t at = 0; at + StatusPage::kSlotBytes <= page.size(); at += StatusPage::kSlotBytes) {
      const auto& slot = *reinterpret_cast<const StatusSlot*>(page.data() + at);
      const uint32_t state = slot.state.load(std::memory_order_acquire);
      if (state != StatusSlot::kOpen && state != StatusSlot::kFailed) continue;
      if (value(slot.id) == wait.group && slot.rank == wait.rank) member = &slot;
      add_waits(slot, seen, next);
    }
    if (!member) return false;  // another process with this number, in another pid namespace
    wait.to = member->global_rank;
    path_.push_back(wait);
    if (wait.pid == getpid()) {
      if (is_cycle()) return true;
    } else if (followed_.insert(wait.pid).second && !stopped(wait.pid)) {
      for (const Wait& each : next) {
        if (follow(each)) return true;
      }
    }
    path_.pop_back();
    return false;
  }

  std::string text() const {
    std::vector<std::string> waits;
    for (const Wait& wait : path_)
      waits.push_back("rank " + std::to_string(wait.from) + " waits in group " + wait.name + " (" + wait.call +
                      ") for rank " + std::to_string(wait.to));
    return joined(waits);
  }

 private:
  bool is_cycle() const {
    uint64_t began = 0, ended = UINT64_MAX;
    bool one_group = true;
    for (const Wait& wait : path_) {
      began = std::max(began, wait.began), ended = std::min(ended, wait.ended);
      one_group &= wait.group == path_.front().group && !is_message(wait.call);
    }
    return began < ended && !one_group;
  }

  std::vector<Wait> path_;
  std::map<pid_t, std::pair<uint64_t, std::vector<std::byte>>> pages_;  // and when they were read
  std::set<pid_t> followed_;
};

}  // namespace

std::string cycle_of_waits(const Members& members, const Awaited& awaited, const std::string& call,
                           Clock::time_point began) {
  const std::string name = call.substr(0, call.find_first_of("( "));
  // A rank that gives up now, or is between two sleeps, shows its wait in a moment.
  for (int attempt = 0; attempt < 3; ++attempt) {
    if (attempt > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Search search;
    for (const int rank : awaited.ranks) {
      const pid_t pid = members.pid_of(rank);
      if (pid != 0 && search.follow({.group = members.id,
                                     .rank = rank,
                                     .pid = pid,
                                     .from = members.global_rank(members.rank),
                                     .name = members.name,
                                     .call = name,
                                     .began = ns_of(began)}))
        return search.text();
    }
  }
  return "";
}

}  // namespace nvx
