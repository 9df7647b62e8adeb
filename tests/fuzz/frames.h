#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <string>

#include "net/tcp/tcp_wire.h"

namespace nvx::net {

/// A frame of nvx's TCP, well-formed or damaged, with its message.
inline std::string framed(FuzzedDataProvider& from) {
  Frame frame{.bytes = from.ConsumeIntegralInRange<uint64_t>(0, 40'000),
              .header_bytes = from.ConsumeIntegralInRange<uint8_t>(0, kMostHeader)};
  const size_t bytes = frame.bytes;
  switch (from.ConsumeIntegralInRange(0, 7)) {
    case 0: frame.bytes = from.ConsumeIntegral<uint64_t>(); break;
    case 1: frame.header_bytes = from.ConsumeIntegral<uint8_t>(); break;
    case 2: frame.kind = Frame::Kind(from.ConsumeIntegral<uint8_t>()); break;
    default: break;
  }
  std::string message(reinterpret_cast<const char*>(&frame), sizeof frame);
  message.resize(message.size() + frame.header_bytes + bytes, 'b');
  return message;
}

}  // namespace nvx::net
