#pragma once

#include <span>
#include <string_view>

#include "schedule/step.h"

/// Every schedule there is, one row each. A row is what tests prove, simulations run, and a plan chooses from.
namespace nvx::schedule {

/// What each leaves behind, whatever its schedule. `whole` and `blocks` are those of the Layout.
///
///   all_reduce      input whole                   output whole, the sum of all inputs
///   reduce_scatter  input blocks                  output the own block, from 0: the sum of what all have there
///   all_gather      input the own block, from 0   output blocks, each its rank's input
///   broadcast       root's input whole            output whole, on the root too
///   reduce          input whole                   root's output whole, the sum of all inputs
///   gather          input the own block, from 0   root's output blocks
///   scatter         root's input blocks           output the own block, from 0
///   all_to_all      input `to`                    output `from`
///   barrier         nothing; nobody ends before everybody has begun
///
/// Inputs stay as they are and nothing else is written, least of all the output of a rank that is due none. Where the
/// bytes due are the same, the output may be memory of the input (or the input of the output): in all of them but
/// all_to_all.
enum class Collective : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier
};

/// In which order an element's terms are combined. In every schedule this is settled by the layout alone and never by
/// when a message comes; and all ranks that get an element get the same bits, if combining a with b gives the bits of b
/// with a.
enum class Order : uint8_t {
  kNone,     ///< nothing is combined
  kByPlace,  ///< differs with the place of the element in the whole, so with the size of the buckets it is sent in
  kUniform,  ///< the same for all elements: settled by the number of ranks, and the root
  kRank      ///< ((x0 + x1) + x2) + ...: as inside a host
};

/// No rank does more than this. With a for the latency of a message, b for the time of a byte, and no more than w steps
/// in flight, a call takes about max(depth, messages / w) * a + sent * b.
struct Guarantee {
  Order order;
  uint64_t (*messages)(int size);  ///< that a rank sends, and that it receives
  uint64_t (*depth)(int size);     ///< messages of which each carries something of the one before
  size_t (*sent)(const Layout&);   ///< bytes that a rank with this layout sends to others
};

/// The functions are pure. They take a layout for which legal() holds.
struct Row {
  Collective collective;
  const char* name;
  uint64_t (*steps)(const Layout&, int rank);
  Step (*at)(const Layout&, int rank, uint64_t i);
  size_t (*scratch)(const Layout&, int rank);  ///< bytes of scratch
  /// Whether the schedule can serve a layout. The same on every rank; all_to_all's looks at the blocks of this rank,
  /// and is to be asked where those of all ranks are known to be alike.
  bool (*legal)(const Layout&);
  Guarantee guarantee;
};

std::span<const Row> catalog();

/// Null where there is none.
const Row* find(Collective collective, std::string_view name);

const char* name(Collective collective);

/// What a schedule says of itself unless it says otherwise.
struct AnyLayout {
  static constexpr size_t scratch(const Layout&, int) { return 0; }
  static constexpr bool legal(const Layout&) { return true; }
};

}  // namespace nvx::schedule
