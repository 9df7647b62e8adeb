#include "group/plan/simulate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/round_up.h"
#include "group/plan/estimate.h"

namespace nvx {
namespace {

using kernel::Collective;
using schedule::Block;
using schedule::Layout;
using schedule::Range;
using schedule::Step;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr uint64_t kMessages = 1'000'000, kMost = 20'000'000;  ///< steps that are simulated, and the most
constexpr double kReducedByte = 3;                             ///< reads and writes: two terms and the result

/// One slice: its run between hosts, and the seconds of the steps inside a host.
struct Slice {
  std::vector<Block> blocks;
  RunBetween run{};
  double before = 0, beside = 0, after = 0;
};

/// Whether every host does what host 0 does, counted from itself. Checked for three other hosts.
bool all_alike(const schedule::Row& row, const RunBetween& run) {
  const Layout& l = run.layout;
  const int hosts = l.size / run.host_ranks;
  const auto turned = [&](int peer, int by) { return peer < 0 ? -1 : schedule::mod(peer + by, l.size); };
  const auto about = [&](size_t a, size_t b) { return (a > b ? a - b : b - a) <= l.width; };
  for (const int host : {1, hosts / 2, hosts - 1}) {
    for (int role = 0; role < run.host_ranks; ++role) {
      const int by = host * run.host_ranks, rank = role + by;
      const uint64_t steps = row.steps(l, role);
      if (row.steps(l, rank) != steps) return false;
      for (uint64_t i = 0; i < steps; ++i) {
        const Step a = row.at(l, role, i), b = row.at(l, rank, i);
        if (turned(a.send_to, by) != b.send_to || turned(a.recv_from, by) != b.recv_from) return false;
        if (!about(a.send.bytes, b.send.bytes) || !about(a.recv.bytes, b.recv.bytes) || a.reduce != b.reduce)
          return false;
      }
    }
  }
  return true;
}

/// Simulates slices of one kind and a last one, over all places of the layout, or over host 0's if all hosts do the
/// same.
class Simulator {
 public:
  /// `ranks_per_card`: ranks that share a card and of which one is simulated. Requires at most 2^32 slices.
  Simulator(const schedule::Row& row, const Slice& each, const Slice& last, size_t slices, bool alike,
            double ranks_per_card, const Fabric& fabric)
      : row_(row),
        each_(each),
        last_(last),
        fabric_(fabric),
        byte_(ranks_per_card / fabric.between),
        places_(alike ? each.run.host_ranks : each.run.layout.size),
        count_(slices),
        cards_(size_t(places_ / each.run.host_ranks) * fabric.cards),
        ranks_(size_t(places_)) {}

  double run() {
    for (int place = 0; place < places_; ++place) go_on(place, 0);
    while (!events_.empty()) {
      const Event e = events_.top();
      events_.pop();
      if (e.kind == Event::kAdvance) advance(e.place, e.slice, e.at);
      if (e.kind == Event::kLeave) leave(e);
      if (e.kind == Event::kArrive) arrive(e);
    }
    double ends = 0;
    for (const Rank& r : ranks_) {
      NVX_CHECK(r.turn == count_ + kSlicesInFlight, "a simulated rank waits for a message that no rank sends");
      ends = std::max(ends, r.free);
    }
    return ends;
  }
  /// Of `slices` slices, as large as those simulated.
  void add_up(size_t slices, Simulation& s) const {
    double sent = 0, reduced = 0;
    const auto scaled = [&](const double(&bytes)[2]) {
      return bytes[0] * double(slices - 1) / double(std::max<size_t>(count_ - 1, 1)) + bytes[1];
    };
    for (const Rank& r : ranks_) reduced = std::max(reduced, scaled(r.reduced));
    s.inside_bytes += size_t(reduced), s.inside_seconds += reduced / fabric_.inside;
    for (size_t c = 0; c < cards_.size(); c += fabric_.cards) {
      double out = 0, in = 0;
      for (size_t i = c; i < c + fabric_.cards; ++i) {
        const double o = scaled(cards_[i].sent), g = scaled(cards_[i].got);
        s.between_seconds = std::max(s.between_seconds, std::max(o, g) * byte_);
        out += o, in += g;
      }
      s.between_bytes = std::max(s.between_bytes, size_t(std::max(out, in)));
      sent += out;
    }
    s.all_bytes = size_t(sent) * size_t(each_.run.layout.size / places_);
  }

 private:
  /// `peer`: a place of the layout, as `place` names it.
  struct Event {
    double at;
    size_t bytes;
    int place, peer;
    uint32_t slice;
    enum Kind : uint8_t { kAdvance, kLeave, kArrive } kind;
    bool operator<(const Event& other) const { return at > other.at; }
  };
  /// When the outgoing message has left, and when the incoming one is stored.
  struct Flight {
    Step step;
    double sent = 0, stored = 0;
  };
  struct Run {
    size_t slice = SIZE_MAX;
    double begins = 0, wakes = 0;
    uint64_t next = 0;
    std::vector<Flight> flights = {};
    bool over = false;
  };
  /// The thread of a rank does the steps inside its host, and waits for runs. Another one reduces what arrives.
  struct Rank {
    Run runs[kSlicesInFlight + 1];
    double free = 0, reduces = 0;  // until then
    double reduced[2] = {};        // bytes read and written for that: of the equal slices, and of the last one
    size_t turn = 0;
    bool issued = false;
  };
  struct Card {
    double out = 0, in = 0;            ///< free again
    double sent[2] = {}, got[2] = {};  ///< bytes of the equal slices, and of the last one
  };

  const Slice& slice(size_t k) const { return k + 1 == count_ ? last_ : each_; }
  Run& run_of(int place, size_t k) { return ranks_[size_t(place)].runs[k % (kSlicesInFlight + 1)]; }
  Card& card_of(int place) {
    const size_t host_ranks = size_t(each_.run.host_ranks);
    return cards_[size_t(place) / host_ranks * fabric_.cards + size_t(place) % host_ranks % fabric_.cards];
  }
  void push(double at, Event::Kind kind, int place, size_t slice, int peer = 0) {
    events_.push({at, 0, place, peer, uint32_t(slice), kind});
  }
  uint64_t key(int place, size_t slice, int from) const {
    return (uint64_t(slice) * uint64_t(places_) + uint64_t(place)) * uint64_t(each_.run.layout.size) + uint64_t(from);
  }

  /// As `Hierarchical::overlap()`.
  void go_on(int place, double now) {
    Rank& r = ranks_[size_t(place)];
    for (r.free = std::max(r.free, now); r.turn < count_ + kSlicesInFlight; ++r.turn, r.issued = false) {
      if (r.turn < count_ && !r.issued) {
        r.free += slice(r.turn).before;
        run_of(place, r.turn) = Run{r.turn, r.free};
        push(r.free, Event::kAdvance, place, r.turn);
        r.free += slice(r.turn).beside;
      }
      r.issued = true;
      if (r.turn < kSlicesInFlight || r.turn - kSlicesInFlight >= count_) continue;
      if (!run_of(place, r.turn - kSlicesInFlight).over) return;
      r.free += slice(r.turn - kSlicesInFlight).after;
    }
  }

  void advance(int place, size_t k, double now) {
    Run& run = run_of(place, k);
    if (run.slice != k || now < run.begins || run.over) return;
    const Layout& layout = slice(k).run.layout;
    const uint64_t steps = row_.steps(layout, place);
    const int host_ranks = each_.run.host_ranks;
    for (;;) {
      const auto open = [&](const Flight& f) { return std::max(f.sent, f.stored) > now; };
      run.flights.erase(run.flights.begin(), std::ranges::find_if(run.flights, open));
      if (run.next == steps || run.flights.size() >= schedule::kMaxDepth) break;
      Step step = row_.at(layout, place, run.next);
      if (step.send_to / host_ranks == place / host_ranks) step.send_to = -1;
      if (step.recv_from / host_ranks == place / host_ranks) step.recv_from = -1;
      if (!clear_for(run, step, now)) break;
      ++run.next;
      if (step.send_to >= 0 || step.recv_from >= 0) begin(place, k, run, step, now);
    }
    if (run.next == steps && run.flights.empty()) {
      run.over = true;
      return go_on(place, now);
    }
    double wakes = kNever;
    for (const Flight& f : run.flights) {
      for (const double at : {f.sent, f.stored}) wakes = at > now ? std::min(wakes, at) : wakes;
    }
    if (wakes != kNever && (run.wakes <= now || wakes < run.wakes)) push(run.wakes = wakes, Event::kAdvance, place, k);
  }

  /// The input and the output of a whole are one memory, as of torch's tensors.
  bool clear_for(const Run& run, const Step& step, double now) const {
    const bool one = each_.run.layout.bytes != 0;
    const auto overlap = [&](const Range& a, const Range& b) {
      const auto scratch = [](const Range& r) { return r.buffer == schedule::kScratch; };
      if (a.buffer != b.buffer && (!one || scratch(a) || scratch(b))) return false;
      return a.bytes && b.bytes && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
    };
    return std::ranges::all_of(run.flights, [&](const Flight& f) {
      return schedule::may_begin_beside(f.step, f.stored <= now, f.sent <= now, step, overlap);
    });
  }

  void begin(int place, size_t k, Run& run, const Step& step, double now) {
    Flight f{step};
    if (step.send_to >= 0) {
      Card& card = card_of(place);
      const double at = std::max(now, card.out);
      f.sent = card.out = at + double(step.send.bytes) * byte_;
      card.sent[k + 1 == count_] += double(step.send.bytes);
      const Event e{at, step.send.bytes, place, step.send_to, uint32_t(k), Event::kLeave};
      at > now ? events_.push(e) : leave(e);
    }
    if (step.recv_from >= 0) {
      const auto early = early_.find(key(place, k, step.recv_from));
      f.stored = early == early_.end() ? kNever : reduced(place, k, step, now);
      if (early != early_.end() && --early->second == 0) early_.erase(early);
    }
    run.flights.push_back(f);
  }

  /// The first byte leaves the sender's card. Where only host 0 is simulated, the receiver's part is that of its own.
  void leave(const Event& e) {
    const int size = each_.run.layout.size, to = e.peer % places_;
    Card& card = card_of(to);
    card.in = std::max(e.at + fabric_.latency, card.in) + double(e.bytes) * byte_;
    card.got[e.slice + 1 == count_] += double(e.bytes);
    push(card.in, Event::kArrive, to, e.slice, schedule::mod(e.place - (e.peer - to), size));
  }

  void arrive(const Event& e) {
    Run& run = run_of(e.place, e.slice);
    const auto awaits = [&](const Flight& f) { return f.stored == kNever && f.step.recv_from == e.peer; };
    const auto flight = std::ranges::find_if(run.flights, awaits);
    if (run.slice != e.slice || flight == run.flights.end()) {
      ++early_[key(e.place, e.slice, e.peer)];
      return;
    }
    flight->stored = reduced(e.place, e.slice, flight->step, e.at);
    advance(e.place, e.slice, e.at);
  }

  /// When a message that has arrived is reduced, if it is to be.
  double reduced(int place, size_t k, const Step& step, double now) {
    if (!step.reduce) return now;
    Rank& r = ranks_[size_t(place)];
    const double bytes = kReducedByte * double(step.recv.bytes);
    r.reduced[k + 1 == count_] += bytes;
    return r.reduces = std::max(r.reduces, now) + bytes / fabric_.inside;
  }

  const schedule::Row& row_;
  const Slice &each_, &last_;
  const Fabric& fabric_;
  const double byte_;
  const int places_;
  const size_t count_;
  std::vector<Card> cards_;
  std::vector<Rank> ranks_;
  std::priority_queue<Event> events_;
  std::unordered_map<uint64_t, uint32_t> early_;  ///< messages that have arrived before their step began
};

/// Adds up what the ranks of a host do for each slice.
struct Inside {
  const PlanFacts& facts;
  const Fabric& fabric;
  double bytes = 0, seconds = 0;

  double step(Collective what, size_t staged, size_t moved, double slices, size_t times) {
    const Estimate e = count_inside(plan(what, staged, facts).algorithm, what, moved, facts);
    const double took = double(e.steps) * signal_seconds(facts) + double(e.bytes) / fabric.inside;
    bytes += double(e.bytes) * double(times) * slices, seconds += took * double(times) * slices;
    return took * double(times);
  }
};

/// `bytes`: of the collective, if it is `slices` such slices. `packs`: an all-gather's ranks pack what they have.
Slice slice_of(Collective collective, size_t bytes, double slices, bool packs, const InterHostPlan& plan,
               Inside& inside) {
  const PlanFacts& facts = inside.facts;
  Slice s;
  s.run = run_between(collective, bytes, plan, facts, s.blocks);
  const Sizes size = sizes(across(collective), bytes, plan, facts);
  if (s.run.host_ranks > 1 || size.sliced == 0) {  // exchanges beside the run, and the barrier
    const size_t here = collective == Collective::kGather ? bytes : bytes / facts.hosts;
    const bool exchanges = collective != Collective::kBarrier;
    if (!exchanges) s.before = inside.step(plan.before, size.before, 0, slices, 1);
    (exchanges ? s.beside : s.after) = inside.step(plan.after, size.after, here, slices, 1);
    return s;
  }
  const bool by_host = collective == Collective::kReduceScatter || collective == Collective::kAllGather;
  const size_t times = by_host && !packs ? facts.hosts : 1, after = size.after * (packs ? facts.hosts : 1);
  s.before = inside.step(plan.before, size.before, size.before, slices, times);
  s.after = inside.step(plan.after, after, after, slices, times);
  return s;
}

}  // namespace

std::optional<Simulation> simulate(Collective collective, size_t bytes, const PlanFacts& facts, const Fabric& fabric) {
  const InterHostPlan plan = plan_between(across(collective), bytes, facts);
  const Sizes size = sizes(across(collective), bytes, plan, facts);
  const size_t slices = size.sliced ? ceil_div(size.sliced, plan.slice) : 1;
  const size_t whole = collective == Collective::kReduceScatter ? facts.world : 1;  // blocks of this size
  const size_t rest = slices > 1 ? (size.sliced - (slices - 1) * plan.slice) * whole : bytes;
  Inside inside{facts, fabric};
  const bool packs = collective == Collective::kAllGather && packs_all_gather(bytes, facts);
  const Slice last = slice_of(collective, rest, 1, packs, plan, inside);
  const Slice each =
      slices > 1 ? slice_of(collective, plan.slice * whole, double(slices - 1), packs, plan, inside) : last;
  const bool rails = !plan.by_leader && each.run.host_ranks == 1, alike = all_alike(*plan.row, each.run);
  const double ranks_per_card = rails ? std::ceil(double(facts.rails) / double(fabric.cards)) : 1;
  const int places = alike ? each.run.host_ranks : each.run.layout.size;
  uint64_t steps = 1;
  for (int place = 0; place < places; ++place) steps += plan.row->steps(each.run.layout, place);
  // Slices run in turns of kSlicesInFlight + 1, so the simulated slices, and half of them, are whole turns.
  constexpr size_t kTurns = 2 * (kSlicesInFlight + 1);
  const size_t simulated = std::min(slices, std::max<size_t>(kMessages / steps / kTurns, 1) * kTurns);
  if (steps * simulated > kMost) return {};
  Simulator simulator(*plan.row, each, last, simulated, alike, ranks_per_card, fabric);
  Simulation s;
  s.seconds = simulator.run();
  if (simulated < slices) {
    const double half = Simulator(*plan.row, each, last, simulated / 2, alike, ranks_per_card, fabric).run();
    s.seconds += double(slices - simulated) * (s.seconds - half) / double(simulated - simulated / 2);
  }
  simulator.add_up(slices, s);
  s.slices = slices;
  s.inside_bytes += size_t(inside.bytes), s.inside_seconds += inside.seconds;
  if (rails) s.between_bytes *= facts.rails, s.all_bytes *= facts.rails;  // one rail was simulated
  return s;
}

}  // namespace nvx
