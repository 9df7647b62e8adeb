#pragma once

#include <span>
#include <string_view>

#include "base/collective.h"
#include "schedule/step.h"

/// All schedules, one row each. Tests prove the rows, simulations run them, and a plan chooses among them.
namespace nvx::schedule {

/// The contract of each collective, whatever its schedule. `whole` and `blocks` are those of the Layout.
///
///   all_reduce      input whole                   output whole, the sum of all inputs
///   reduce_scatter  input blocks                  output the own block, from 0: the sum of all inputs there
///   all_gather      input the own block, from 0   output blocks, each its rank's input
///   broadcast       root's input whole            output whole, on the root too
///   reduce          input whole                   root's output whole, the sum of all inputs
///   gather          input the own block, from 0   root's output blocks
///   scatter         root's input blocks           output the own block, from 0
///   all_to_all      input `to`                    output `from`
///   barrier         nothing; no rank returns before all ranks have called it
///
/// Inputs stay unchanged, and nothing outside the listed output is written, in particular no output of a rank that
/// receives no result. Except in all_to_all, input and output may share memory: bytes of the input may be at the place
/// of the same bytes of the output.
using nvx::Collective;

/// The order in which the terms of an element are combined. It depends on the layout alone, never on the arrival of
/// messages. All ranks that receive an element receive the same bits, provided that combining a with b gives the same
/// bits as b with a.
enum class Order : uint8_t {
  kNone,     ///< nothing is combined
  kByPlace,  ///< depends on the element's offset in the whole, so on the size of the bucket it is sent in
  kUniform,  ///< the same for all elements: depends on the number of ranks and on the root
  kRank      ///< ((x0 + x1) + x2) + ..., as inside a host
};

/// Tests prove it for every rank.
struct Guarantee {
  Order order;
  uint64_t (*depth)(int size);  ///< an upper bound of the longest chain of messages that each depend on the one before
};

/// The functions are pure. They require a layout for which legal() holds.
struct Row {
  Collective collective;
  const char* name;
  uint64_t (*steps)(const Layout&, int rank);
  Step (*at)(const Layout&, int rank, uint64_t i);
  size_t (*scratch)(const Layout&, int rank);  ///< bytes of scratch
  /// Whether the schedule supports a layout. The answer is the same on every rank.
  bool (*legal)(const Layout&);
  Guarantee guarantee;
};

std::span<const Row> catalog();

/// Null if there is no such row.
const Row* find(Collective collective, std::string_view name);

/// The defaults of a schedule: no scratch, any layout, no sums.
struct AnyLayout {
  static constexpr Order kOrder = Order::kNone;
  static constexpr size_t scratch(const Layout&, int) { return 0; }
  static constexpr bool legal(const Layout&) { return true; }
};

}  // namespace nvx::schedule
