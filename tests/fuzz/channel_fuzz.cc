// One collective beside a peer whose pad has any content: it ends with a result or a verdict, reads only the channel's
// memory and writes only its own.

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>

#include "support/channels.h"

namespace nvx::test {
namespace {

using kernel::Algorithm;
using kernel::Collective;
using kernel::Piece;

constexpr size_t kMost = 20'000;

void write_what_it_likes(FuzzedDataProvider& from, kernel::Pad pad, size_t arena_bytes,
                         const kernel::Fingerprint& right, int me) {
  kernel::Arrival& there = pad.arrival(1);
  there.fingerprint = right;
  if (from.ConsumeIntegralInRange(0, 7) == 0) from.ConsumeData(&there.fingerprint, sizeof there.fingerprint);
  const bool plausible = from.ConsumeBool();
  const auto number = [&] {
    return plausible ? from.ConsumeIntegralInRange<uint64_t>(0, arena_bytes) : from.ConsumeIntegral<uint64_t>();
  };
  there.lease_offset = number();
  there.lease_bytes = number();
  // Mostly the expected values, so that the unexpected ones are used in computations.
  const bool expected = from.ConsumeIntegralInRange(0, 3) != 0;
  for (int r = 0; r < 2; ++r) pad.counts(1)[r] = plausible ? from.ConsumeIntegralInRange<uint64_t>(0, kMost) : number();
  if (expected) pad.counts(1)[me] = right.count * 4;
  for (Flag* flag : {&there.flag, &pad.staged(), &pad.reduced(), &pad.fetched(), &pad.done()}) {
    flag->value = from.ConsumeBool() ? stamp(1, from.ConsumeIntegral<uint8_t>()) : from.ConsumeIntegral<uint64_t>();
  }
}

void try_input(FuzzedDataProvider& from) {
  static Channels& channels = *new Channels(2, 0, 8 << 10);
  channels.begin(0);
  const auto algorithm = Algorithm(from.ConsumeIntegralInRange(0, int(Algorithm::kExchange)));
  const size_t n = from.ConsumeIntegralInRange<size_t>(0, kMost / 8);
  std::vector<std::byte> in(4 * n), out(8 * n);
  std::vector<std::byte> pieces(8 * n);
  const Piece send[] = {{pieces.data(), 4 * n}, {pieces.data() + 4 * n, 4 * n}};
  const Piece recv[] = {{out.data(), 4 * n}, {out.data() + 4 * n, 4 * n}};
  kernel::CollectiveArgs args;
  args.call.fingerprint.collective = Collective(from.ConsumeIntegralInRange(0, int(Collective::kBarrier)));
  args.call.fingerprint.root = from.ConsumeIntegralInRange(-1, 1);
  args.call.root = args.call.fingerprint.root;
  args.call.fingerprint.count = n;
  args.in = in.data();
  args.out = out.data();
  args.count = n;
  args.send = send;
  args.recv = recv;
  args.meets_all = from.ConsumeBool();
  args.meets = from.ConsumeIntegralInRange(-1, 1);
  const int me = from.ConsumeIntegralInRange(0, 1);  // the rank beside which the other one's parts come first, or last
  write_what_it_likes(from, channels.pad(1 - me), channels.memory()[size_t(1 - me)].arena_bytes, args.call.fingerprint,
                      me);
  WaitRules rules;
  rules.deadline.end = Clock::now();  // data that is not there yet will not arrive
  CpuExec ex(4, kernel::level().reduce(DType::kF32, ReduceOp::kSum), channels[me].factors().data(), rules);
  if (run_on_cpu(algorithm, ex, channels[me], args) != (ex.verdict().cause == kernel::Verdict::Cause::kNone))
    std::abort();
  if (!channels.guards_are_whole()) std::abort();
}

}  // namespace
}  // namespace nvx::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider from(data, size);
  nvx::test::try_input(from);
  return 0;
}
