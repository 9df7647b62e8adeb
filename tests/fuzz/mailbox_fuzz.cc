// Messages from a peer that writes anything into its outbox and inbox.

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>

#include "support/impostor.h"

namespace nvx::test {
namespace {

constexpr size_t kBytes[] = {0, 8, 976, 977, 50'000};

void scribble(FuzzedDataProvider& from, kernel::Outbox& out, kernel::Inbox& in) {
  kernel::Envelope& envelope = out.envelopes[from.ConsumeIntegralInRange<size_t>(0, kernel::kEnvelopes - 1)];
  envelope.message = from.ConsumeIntegralInRange<uint64_t>(0, 20);
  envelope.tag = from.ConsumeIntegralInRange(0, 1);
  envelope.bytes = from.ConsumeBool() ? from.PickValueInArray(kBytes) : from.ConsumeIntegral<uint64_t>();
  envelope.dtype = from.ConsumeBool() ? DType::kBytes : DType(from.ConsumeIntegral<uint8_t>());
  envelope.carries_data = from.ConsumeIntegral<uint8_t>();
  out.lease_offset =
      from.ConsumeBool() ? from.ConsumeIntegralInRange<uint64_t>(0, 1 << 20) : from.ConsumeIntegral<uint64_t>();
  out.lease_bytes =
      from.ConsumeBool() ? from.ConsumeIntegralInRange<uint64_t>(0, 1 << 20) : from.ConsumeIntegral<uint64_t>();
  in.grants[from.ConsumeIntegralInRange<size_t>(0, kernel::kEnvelopes - 1)] =
      from.ConsumeIntegralInRange<uint64_t>(0, 20);
  for (kernel::FlagLine* line : {&out.posted, &out.streamed, &in.taken, &in.granted, &in.consumed}) {
    const uint64_t value =
        from.ConsumeBool() ? from.ConsumeIntegralInRange<uint64_t>(0, 20) : from.ConsumeIntegral<uint64_t>();
    line->flag.value = value;
  }
}

void try_input(FuzzedDataProvider& from) {
  Impostor impostor;
  Group group(impostor, options("fuzz", 0, 2));
  std::vector<std::unique_ptr<Bytes>> memory;
  for (int step = 0; step < 12 && from.remaining_bytes() > 0; ++step) {
    scribble(from, impostor.pad().outbox(0), impostor.pad().inbox(0));
    memory.push_back(std::make_unique<Bytes>(from.PickValueInArray(kBytes)));
    const auto request = message(from.ConsumeBool() ? 1 : kAnySource, from.ConsumeIntegralInRange(0, 1),
                                 memory.back()->data(), memory.back()->size());
    if (from.ConsumeBool()) {
      group.mailbox().receive(request, Runner::kCaller);  // moves everything that can move
    } else {
      request->peer = 1;
      group.mailbox().send(request, Runner::kCaller);
    }
  }
  group.abort("the input is used up");
  impostor.leave();
}

}  // namespace
}  // namespace nvx::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider from(data, size);
  nvx::test::try_input(from);
  return 0;
}
