// Negative controls of the proof: it must detect spoiled schedules, and an executor without the hazard rule.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "support/verify.h"

namespace nvx::test {
namespace {

using schedule::catalog;
using schedule::Collective;
using schedule::kInput;
using schedule::kOutput;
using schedule::kScratch;
using schedule::Range;
using schedule::Row;
using schedule::Step;

constexpr Conditions kTrials[] = {{.depth = 16, .timing = Timing::kPostFirst, .seed = 1},
                                  {.depth = 1, .timing = Timing::kPostLast, .seed = 2},
                                  {.depth = 4, .memory = Memory::kShared, .seed = 3}};

bool found_out(const Row& row, const Script& script) {
  const auto wrong = [&](const Conditions& c) { return !breach(row, script.shape, run_script(script, c)).empty(); };
  if (std::any_of(std::begin(kTrials), std::end(kTrials), wrong)) return true;
  for (int late = 0; late < script.shape.size; ++late) {
    if (wrong({.depth = 16, .timing = Timing::kPostFirst, .late = late, .seed = 1})) return true;
  }
  return false;
}

Shape typical(Collective collective, int size) {
  const size_t elements = size_t(size) * (collective == Collective::kAllToAll ? 2 : 3);
  return shape_of({.collective = collective, .size = size, .elements = elements, .width = 4, .root = size / 2});
}

bool same(const Range& a, const Range& b) {
  return a.bytes == b.bytes && (a.bytes == 0 || (a.buffer == b.buffer && a.offset == b.offset));
}
bool same(const Step& a, const Step& b) {
  return a.send_to == b.send_to && a.recv_from == b.recv_from && a.reduce == b.reduce && same(a.send, b.send) &&
         same(a.recv, b.recv) && same(a.with, b.with);
}

/// The place at which a script is spoiled.
struct Spot {
  Script& script;
  int rank;
  size_t step, other;  ///< and another step of the same rank

  Step& at() const { return script.steps[size_t(rank)][step]; }
  Step& second() const { return script.steps[size_t(rank)][other]; }
};

enum What { kMessages, kRanges };

/// A way to spoil a script. Returns false if it would change nothing there.
struct Mutation {
  const char* name;
  What what;
  bool (*apply)(const Spot&);
};

template <Range Step::*kRange, int kElements>
bool shift(const Spot& s) {
  Range& range = s.at().*kRange;
  if (range.bytes == 0) return false;
  range.offset += size_t(kElements) * s.script.shape.width;
  return true;
}

template <Range Step::*kRange>
bool replace(const Spot& s) {
  Range &range = s.at().*kRange, other = s.second().*kRange;
  if (range.bytes == 0 || other.bytes != range.bytes || same(range, other)) return false;
  range = other;
  return true;
}

template <int Step::*kPeer>
bool change_peer(const Spot& s) {
  int& peer = s.at().*kPeer;
  if (peer < 0 || peer == s.rank || s.script.shape.size < 3) return false;
  do {
    peer = (peer + 1) % s.script.shape.size;
  } while (peer == s.rank);
  return true;
}

bool drop(const Spot& s) {
  const Step step = s.at();
  if (step.send_to == s.rank && step.send.bytes == 0) return false;
  auto& steps = s.script.steps[size_t(s.rank)];
  steps.erase(steps.begin() + ptrdiff_t(s.step));
  return true;
}

bool drop_reduce(const Spot& s) {
  if (!s.at().reduce || s.at().recv.bytes == 0) return false;
  s.at().reduce = false;
  return true;
}

bool only_send(const Spot& s) {
  if (s.at().recv_from < 0 || s.at().send_to < 0) return false;
  s.at().recv_from = -1;
  return true;
}

bool shorten(const Spot& s) {
  if (s.at().send.bytes == 0) return false;
  s.at().send.bytes -= s.script.shape.width;
  return true;
}

bool swap_ranges(const Spot& s) {
  Step &a = s.at(), &b = s.second();
  const Step before = a;
  std::swap(a.send, b.send), std::swap(a.recv, b.recv), std::swap(a.with, b.with);
  // Exchanging two whole moves within a rank only changes their order.
  const bool moves = a.send_to == s.rank && b.send_to == s.rank && !a.reduce && !b.reduce;
  return !same(a, before) && !moves;
}

bool swap_receives(const Spot& s) {
  Step &a = s.at(), &b = s.second();
  const Step before = a;
  std::swap(a.recv, b.recv);
  return !same(a, before);
}

constexpr Mutation kMutations[] = {
    {"drop", kMessages, drop},
    {"drop_reduce", kRanges, drop_reduce},
    {"only_send", kMessages, only_send},
    {"shorten", kMessages, shorten},
    {"change_send_to", kMessages, change_peer<&Step::send_to>},
    {"change_recv_from", kMessages, change_peer<&Step::recv_from>},
    {"shift_send_up", kRanges, shift<&Step::send, 1>},
    {"shift_send_down", kRanges, shift<&Step::send, -1>},
    {"shift_recv_up", kRanges, shift<&Step::recv, 1>},
    {"shift_recv_down", kRanges, shift<&Step::recv, -1>},
    {"shift_with_up", kRanges, shift<&Step::with, 1>},
    {"shift_with_down", kRanges, shift<&Step::with, -1>},
    {"replace_send", kRanges, replace<&Step::send>},
    {"replace_recv", kRanges, replace<&Step::recv>},
    {"replace_with", kRanges, replace<&Step::with>},
    {"swap_ranges", kRanges, swap_ranges},
    {"swap_receives", kRanges, swap_receives},
};

/// A mutation that can be harmless, and the reason.
struct Harmless {
  Collective collective;
  std::string_view row, mutation;
  bool (*holds)(const Spot&);
  const char* why;
};

bool one_rank(const Spot& s) { return s.script.shape.size == 1; }

constexpr Harmless kHarmless[] = {
    {Collective::kAllGather, "bruck", "swap_receives", one_rank, "the input goes to the output at once"},
};

bool harmless(const Row& row, const Mutation& mutation, const Spot& before) {
  return std::any_of(std::begin(kHarmless), std::end(kHarmless), [&](const Harmless& h) {
    return h.collective == row.collective && h.row == row.name && h.mutation == mutation.name && h.holds(before);
  });
}

struct Count {
  int tried = 0, found = 0, harmless = 0;
};

/// Applies a mutation to every step of every rank.
void spoil(const Row& row, const Script& whole, const Mutation& mutation, Count& count) {
  for (int rank = 0; rank < whole.shape.size; ++rank) {
    const size_t steps = whole.steps[size_t(rank)].size();
    for (size_t i = 0; i < steps; ++i) {
      Script script = whole, before = whole;
      if (!mutation.apply({script, rank, i, (i + 1) % steps})) continue;
      ++count.tried;
      if (found_out(row, script)) {
        ++count.found;
      } else if (harmless(row, mutation, {before, rank, i, (i + 1) % steps})) {
        ++count.harmless;
      } else {
        ADD_FAILURE() << name(row.collective) << " " << row.name << ": " << mutation.name << " at rank " << rank
                      << " step " << i << " of " << whole.shape.text() << " went unnoticed";
      }
    }
  }
}

TEST(Mutation, IsFoundUnlessItIsHarmless) {
  std::map<std::string, Count> counts;
  for (const Row& row : catalog()) {
    for (const int size : {1, 2, 3, 4, 5, 7, 8}) {
      const Shape shape = typical(row.collective, size);
      if (!legal(row, shape)) continue;
      const Script whole = write_out(row, shape);
      for (const Mutation& mutation : kMutations) {
        if (row.collective == Collective::kBarrier && mutation.what == kRanges) continue;  // see the test after this
        spoil(row, whole, mutation, counts[mutation.name]);
      }
    }
  }
  for (const auto& [mutation, count] : counts) {
    std::printf("%-17s %5d tried %5d found %3d harmless\n", mutation.c_str(), count.tried, count.found, count.harmless);
    EXPECT_GT(count.found, 0) << mutation;
    EXPECT_LE(count.harmless * 10, count.tried) << mutation;
  }
}

/// The bytes of a barrier have no meaning; a round only has to wait for the one before. It does so by the place of its
/// bytes, and rounds that do not wait are detected.
TEST(Mutation, BarrierRoundsThatDoNotWaitAreFound) {
  const Row& row = *schedule::find(Collective::kBarrier, "dissemination");
  for (const int size : {4, 8, 16}) {
    const Script whole = write_out(row, typical(row.collective, size));
    for (int rank = 0; rank < size; ++rank) {
      Script empty = whole, elsewhere = whole;
      for (Step& step : empty.steps[size_t(rank)]) step.send.bytes = 0;
      for (auto& steps : empty.steps) {
        for (Step& step : steps) step.recv.bytes *= size_t(step.recv_from != rank);
      }
      for (Step& step : elsewhere.steps[size_t(rank)]) step.send.offset = 0;
      EXPECT_TRUE(found_out(row, empty)) << size << " " << rank;
      EXPECT_TRUE(found_out(row, elsewhere)) << size << " " << rank;
    }
  }
}

/// Without the hazard rule, a step begins before its data is there. Only where no step depends on another may this go
/// undetected.
TEST(Mutation, AnExecutorThatIgnoresHazardsIsDetected) {
  for (const Row& row : catalog()) {
    const Shape shape = typical(row.collective, row.legal(typical(row.collective, 8).layout(0)) ? 8 : 2);
    const Script script = write_out(row, shape);
    bool found = false;
    for (uint64_t seed = 0; seed < 20 && !found; ++seed) {
      const Conditions careless{.depth = 16, .timing = Timing::kPostFirst, .seed = seed, .hazards = Hazards::kIgnored};
      found = !run_script(script, careless).error.empty();
    }
    const bool in_order = row.guarantee.depth(shape.size) > 1 || row.guarantee.order != schedule::Order::kNone;
    EXPECT_EQ(found, in_order && shape.size > 2) << name(row.collective) << " " << row.name;
  }
}

struct Fault {
  const char* name;
  Collective collective;
  std::vector<Step> steps[2];  ///< of ranks 0 and 1
};

TEST(Mutation, EachFaultHasItsName) {
  constexpr Range kInputs{kInput, 0, 8}, kOutputs{kOutput, 0, 8}, kNothing{kScratch, 0, 0}, kBytes{kScratch, 0, 8};
  const Step from_0{.recv_from = 0, .recv = kNothing}, from_1{.recv_from = 1, .recv = kNothing};
  const Step to_0{.send_to = 0, .send = kNothing}, to_1{.send_to = 1, .send = kNothing};
  constexpr Collective kAny = Collective::kBarrier, kReduce = Collective::kReduce;
  const Fault faults[] = {
      {"waits for ever", kAny, {{from_1, to_1}, {from_0, to_0}}},
      {"ends before all have begun", kAny, {{to_1}, {from_0}}},
      {"is received by nobody", kReduce, {{to_1}, {}}},
      {"does nothing", kAny, {{{}}, {}}},
      {"names no rank", kAny, {{{.send_to = 2}}, {}}},
      {"another length", kAny, {{to_1}, {{.recv_from = 0, .recv = kBytes}}}},
      {"only half", kAny, {{to_0}, {}}},
      {"out of bounds", kAny, {{{.send_to = 1, .send = {kScratch, 60, 8}}}, {}}},
      {"overlap", kAny, {{{.send_to = 1, .send = {kScratch, 0, 4}, .recv_from = 1, .recv = {kScratch, 3, 4}}}, {}}},
      {"over what it sends", kAny, {{{.send_to = 1, .send = kBytes, .recv_from = 1, .recv = kBytes}}, {}}},
      {"writes to the input", kReduce, {{{.recv_from = 1, .recv = kInputs}}, {}}},
      {"out of bounds", kReduce, {{}, {schedule::move(1, kInputs, kOutputs)}}},
      {"another sum", kReduce, {{schedule::move(0, kInputs, kOutputs)}, {}}},
      {"something else", Collective::kBroadcast, {{schedule::move(0, kInputs, kOutputs)}, {}}},
  };
  for (const Fault& f : faults) {
    const Shape shape = shape_of({.collective = f.collective, .size = 2, .elements = 8});
    std::string error;
    for (uint64_t seed = 0; seed < 10 && error.find(f.name) == std::string::npos; ++seed) {
      error = run_script({shape, {f.steps[0], f.steps[1]}, {64, 64}}, {.seed = seed}).error;
    }
    EXPECT_NE(error.find(f.name), std::string::npos) << f.name << " was: " << error;
  }
}

}  // namespace
}  // namespace nvx::test
