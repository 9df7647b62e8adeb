#pragma once

#include <cstdint>
#include <string_view>

namespace nvx {

/// Hashes numbers and texts into 64 bits (the finaliser of splitmix64), for ranks to compare. Not cryptographic.
class Hash {
 public:
  constexpr Hash& add(uint64_t x) {
    uint64_t z = (value_ ^ x) + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    value_ = z ^ (z >> 31);
    return *this;
  }
  constexpr Hash& add(std::string_view text) {
    for (const char c : text) add(uint64_t(uint8_t(c)));
    return add(text.size());
  }
  constexpr uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0;
};

}  // namespace nvx
