#include "group/meet/host_meeting.h"

#include <algorithm>
#include <cstring>

#include "base/failure_note.h"
#include "base/log.h"
#include "base/words.h"

namespace nvx {
namespace {

/// The leader of a host, in the store. Fixed layout; comes from peers.
struct Leader {
  Card card;
  char name[48] = {};  // of its handout
};

template <class T>
std::vector<uint8_t> bytes_of(const T& value) {
  const auto* begin = reinterpret_cast<const uint8_t*>(&value);
  return {begin, begin + sizeof value};
}

}  // namespace

void HostMeeting::enter(int64_t generation, const Hello& own) {
  leave();
  generation_ = generation;
  reads_itself_ = leader_was_there_ = false;
  const Card card = Card::of(options_.rank, described(rank_name(options_.rank, options_.global_ranks), place_of(own)));
  auto handout = std::make_unique<Handout>(card);
  Leader leader{card};
  std::memcpy(leader.name, handout->name().data(), std::min(handout->name().size(), sizeof leader.name - 1));
  const Value mine = bytes_of(leader);
  // The size too: worlds of several sizes may be made one after another over one store.
  const std::string place =
      std::to_string(own.host) + "/" + std::to_string(own.machine) + "/" + std::to_string(options_.size);
  const Value first = store_.claim(key_in(generation, "host/" + place), mine);
  if (first == mine) {
    handout_ = std::move(handout);
  } else if (first.size() == sizeof leader) {
    std::memcpy(&leader, first.data(), sizeof leader);
    leader.name[sizeof leader.name - 1] = leader.card.who[sizeof leader.card.who - 1] = '\0';
    leader_ = leader.card;
    receipt_ = std::make_unique<Receipt>(leader.name, card);
  }
}

void HostMeeting::leave() {
  handout_.reset();
  receipt_.reset();
}

void HostMeeting::give(const Value& value) {
  if (!handout_ || reads_itself_) return;
  try {
    handout_->give(value);
  } catch (const Error&) {
    reads_itself_ = true;  // the others do so too: they get no further value
  }
}

void HostMeeting::give_up(const Failure& why) {
  if (!handout_) return;
  const FailureNote note = FailureNote::of(why);
  const auto* begin = reinterpret_cast<const uint8_t*>(note.used().data());
  handout_->give_up({begin, note.used().size()});
}

bool HostMeeting::proceed() {
  if (handout_) handout_->serve();
  const bool there = follows();
  const bool left = handout_ ? handout_->has_lost_guests() : leader_was_there_ && !there;
  leader_was_there_ = there;
  return left;
}

std::optional<Failure> HostMeeting::reason() const {
  if (!receipt_ || !receipt_->reason()) return std::nullopt;
  return FailureNote::read(std::as_bytes(std::span(*receipt_->reason())), options_.size)
      .value_or(unreadable_note("a rank"));
}

void HostMeeting::look() {
  if (handout_) {
    for (const Acquaintance& guest : handout_->guests()) look_at(guest.process, guest.card);
  }
  if (!receipt_) return;
  look_at(receipt_->process(), leader_);
  if (!receipt_->open() && !receipt_->met()) look_for_leader();
}

void HostMeeting::look_at(const ProcessWatch& process, const Card& card) {
  if (process.ended()) end_as_died(card, process.ending());
  if (met(card.rank)) return;  // watched by look_for_deaths()
  if (const std::string news = process.news(); !news.empty())
    NVX_LOG(kWarn, "%s %s; this rank waits for it to create group %s", printable(card.who).c_str(), news.c_str(),
            options_.name.c_str());
}

/// The leader was gone before this rank could connect to it. It has ended, or has begun another set-up, or was an
/// earlier process of this rank, or the set-up is complete, without this process.
void HostMeeting::look_for_leader() {
  if (leader_.rank == options_.rank || store_.add(generation_of(leader_.rank), 0) > generation_) return;
  if (!store_.get(key_in(generation_, kHellos), std::chrono::milliseconds(0))) end_as_died(leader_, {});
}

void HostMeeting::end_as_died(const Card& card, const Ending& ending) {
  const int who = card.rank >= 0 && card.rank < options_.size ? card.rank : kNobody;
  throw Error(Failure{.code = Code::kPeerDied,
                      .cause = printable(card.who) + " has ended" + words_of(ending, " (", ")") + " while group " +
                               options_.name + " was being created",
                      .advice = see_log_of(who == kNobody ? "that rank" : rank_name(who, options_.global_ranks)),
                      .who = who,
                      .ending = ending});
}

std::shared_ptr<Neighbour> met_before(const GroupOptions& options, int rank) {
  const size_t r = size_t(rank);  // none, -1, exceeds all sizes
  if (r < options.processes.size() && options.processes[r].near) return options.processes[r].near;
  const std::shared_ptr<Neighbours> neighbours = Neighbours::opened();
  return neighbours && r < options.global_ranks.size() ? neighbours->met(options.global_ranks[r]) : nullptr;
}

bool HostMeeting::has_ended(int rank) const {
  if (const auto neighbour = met(rank); neighbour && neighbour->dead()) return true;
  if (receipt_ && leader_.rank == rank) return receipt_->process().ended();
  return handout_ && std::ranges::any_of(handout_->guests(), [&](const Acquaintance& guest) {
           return guest.card.rank == rank && guest.process.ended();
         });
}

}  // namespace nvx
