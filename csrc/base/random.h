#pragma once

#include <sys/random.h>

#include <type_traits>

#include "base/error.h"

namespace nvx {

/// A value of random bits: a name that no other process gives, a key that no other process guesses. Throws Error.
template <class T>
T random_value() {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  if (getrandom(&value, sizeof value, 0) != ssize_t(sizeof value)) throw system_error("getrandom failed");
  return value;
}

}  // namespace nvx
