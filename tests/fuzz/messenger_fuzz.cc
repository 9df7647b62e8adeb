// A messenger with a port, an open run and open messages receives any messages: only the memory of the run and of
// messages is written, memory stays bounded, and everything ends.

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdlib>
#include <span>

#include "kernel/reduce/level.h"
#include "net/executor.h"
#include "support/scripted_link.h"

namespace nvx::test {
namespace {

using net::Kind;
using net::MessageHeader;

constexpr size_t kSegment = 64, kBytes = 160;
constexpr uint64_t kGroup = 5;

Sent make_up(FuzzedDataProvider& from) {
  MessageHeader header;
  constexpr Kind kOfData[] = {Kind::kFirst, Kind::kNext, Kind::kSegment, Kind::kFingerprint, Kind::kEnvelope};
  header.kind =
      from.ConsumeBool() ? from.PickValueInArray(kOfData) : Kind(from.ConsumeIntegralInRange(0, int(Kind::kKinds)));
  header.group = from.ConsumeIntegralInRange(0, 9) == 0 ? from.ConsumeIntegral<uint64_t>() : kGroup;
  header.from = uint32_t(from.ConsumeIntegralInRange(0, 9) == 0 ? from.ConsumeIntegral<int>() : 1);
  header.to = uint32_t(from.ConsumeIntegralInRange(0, 9) == 0 ? from.ConsumeIntegral<int>() : 0);
  header.op = uint32_t(from.ConsumeIntegralInRange(0, 9) == 0 ? from.ConsumeIntegral<int>()
                                                              : from.ConsumeIntegralInRange(0, 3));
  header.value = from.ConsumeBool() ? from.ConsumeIntegral<uint64_t>() : 0;
  if (from.ConsumeBool()) {
    header.run = 0;
    header.message = from.ConsumeIntegralInRange<uint16_t>(0, 1);
    header.segment = from.ConsumeIntegralInRange<uint32_t>(0, 4);
  }
  Sent sent;
  append(sent.header, header);
  const bool honest = from.ConsumeBool();
  net::FingerprintBytes fingerprint{};
  if (honest && from.ConsumeIntegralInRange(0, 3) == 0)
    std::memset(&fingerprint, 1, sizeof fingerprint);  // of another call
  if (honest && header.kind == Kind::kFirst) {
    append(sent.header, net::First{fingerprint, from.ConsumeBool() ? from.PickValueInArray({kBytes, kBytes / 2})
                                                                   : from.ConsumeIntegral<uint64_t>()});
  } else if (honest && header.kind == Kind::kFingerprint) {
    append(sent.header, fingerprint);
  } else if (honest && header.kind == Kind::kEnvelope) {
    append(sent.header, net::Envelope{0,
                                      from.ConsumeIntegral<uint64_t>(),
                                      from.ConsumeIntegral<uint8_t>(),
                                      from.ConsumeIntegral<uint8_t>(),
                                      from.ConsumeIntegral<uint8_t>(),
                                      {}});
  } else if (honest && (header.kind == Kind::kPing || header.kind == Kind::kPong)) {
    append(sent.header, uint64_t(0));  // the process at rank 1's address
    if (from.ConsumeBool()) std::memcpy(sent.header.data() + offsetof(MessageHeader, value), "\2\0\0\0\0\0\0", 8);
  } else {
    const auto bytes = from.ConsumeBytes<uint8_t>(from.ConsumeIntegralInRange<size_t>(0, net::kMostHeader - 32));
    for (const uint8_t byte : bytes) append(sent.header, byte);
  }
  if (from.ConsumeIntegralInRange(0, 30) == 0) sent.header.resize(from.ConsumeIntegralInRange<size_t>(0, 40));
  constexpr size_t kLengths[] = {0, 1, 16, 22, 32, kSegment, kSegment + 1, 1500};
  if (header.kind == Kind::kPoison || header.kind == Kind::kOtherFailure) {
    const FailureNote note = FailureNote::of({.code = Code::kTimeout, .cause = from.ConsumeRandomLengthString(90)});
    sent.body.assign(note.used().begin(), note.used().end());
    if (honest) return sent;
    for (const uint8_t byte : from.ConsumeBytes<uint8_t>(20)) sent.body[byte % sent.body.size()] ^= std::byte(byte | 1);
    return sent;
  }
  sent.body.resize(from.ConsumeBool() ? kSegment : from.PickValueInArray(kLengths));
  return sent;
}

/// The schedules whose layout needs no blocks. The catalog begins with them.
std::span<const schedule::Row> all_reduces() {
  const auto rows = schedule::catalog();
  const auto is = [](const schedule::Row& row) { return row.collective == schedule::Collective::kAllReduce; };
  return rows.first(size_t(std::ranges::find_if_not(rows, is) - rows.begin()));
}

/// All memory that may be written, in separate allocations for AddressSanitizer.
struct Memory {
  Bytes input = Bytes(kBytes), output = Bytes(kBytes), scratch, transfer = Bytes(150), message = Bytes(100);
};

void run(FuzzedDataProvider& from) {
  Memory memory;
  const schedule::Row& row = all_reduces()[from.ConsumeIntegralInRange<size_t>(0, all_reduces().size() - 1)];
  const schedule::Row* const rows[] = {&row, schedule::find(schedule::Collective::kBroadcast, "binomial")};
  auto* const link = new ScriptedLink(kSegment);
  const auto messenger =
      std::make_shared<net::Messenger>(std::unique_ptr<net::Link>(link), std::chrono::milliseconds(200));
  net::GroupPort port(messenger, kGroup, 0, 3);
  MutexLock lock(messenger->mutex());
  port.mutex().held_by_caller();
  Bytes address(16);
  port.connect(1, address);
  link->fetches = from.ConsumeBool();
  const int members[] = {0, 1};
  net::ScheduleArgs args;
  args.row = rows[from.ConsumeBool()];
  args.layout.size = 2;
  args.layout.root = 1;
  args.layout.width = 4;
  args.layout.bytes = kBytes;
  args.members = members;
  memory.scratch.resize(args.row->scratch(args.layout, 0));
  args.input = memory.input.data();
  args.output = memory.output.data();
  args.scratch = memory.scratch.data();
  args.reduce = kernel::level().reduce(DType::kI32, ReduceOp::kSum);
  args.op = 1;
  port.calls().begin(args.op, {});
  std::unique_ptr<net::ScheduleRun> run;
  const int opens_at = from.ConsumeIntegralInRange(0, 3);  // messages may arrive before it
  port.p2p().grant(1, 1, memory.transfer.data(), memory.transfer.size());
  port.p2p().send(1, 2, memory.message.data(), memory.message.size(), /*is_full=*/false);
  for (int step = 0; step < 60 && from.remaining_bytes() > 0; ++step) {
    if (step >= opens_at && !run) run = std::make_unique<net::ScheduleRun>(port, args);
    link->to_come.push_back(make_up(from));
    switch (from.ConsumeIntegralInRange(0, 15)) {
      case 0: link->finish_fetches(); break;
      case 1: (void)port.p2p().next_control(); break;
      case 2: (void)port.p2p().next_done(); break;
      case 3:
        if (run) run->check_peers();
        break;
      case 4: link->to_lose.push_back(from.ConsumeIntegralInRange<net::PeerId>(0, 3)); break;
      case 5: link->reads_posts = from.ConsumeBool(); break;
      case 6: port.end_operation(from.ConsumeIntegralInRange<uint32_t>(0, 3)); break;
      case 7: port.ping(1); break;
      case 8:
        port.report_other_failure({Code::kSystem, std::string(from.ConsumeIntegralInRange<size_t>(0, 3000), 'x')});
        break;
      case 9:
        if (port.reported() && port.reported()->failure.cause.empty()) std::abort();
        if (port.other_failure(1).text.size() > 1500 || (port.departure(1) && port.departure(1)->why.size() > 1500))
          std::abort();
        break;
      default: break;
    }
    messenger->progress();
    if (run) run->advance();
  }
  link->finish_fetches();
  link->reads_posts = true;
  run.reset();
  port.p2p().drop();
  lock.unlock();
}

}  // namespace
}  // namespace nvx::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider from(data, size);
  nvx::test::run(from);
  return 0;
}
