#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace nvx {

/// A bad argument. gloo raises RuntimeError for it, NCCL ValueError. In Python this error is both.
class ArgumentError : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

/// A tensor of the wrong type: TypeError and RuntimeError.
class ArgumentTypeError : public c10::TypeError {
 public:
  using c10::TypeError::TypeError;
};

/// what: parts of the text, of any type that torch can print.
template <class... Parts>
[[noreturn]] void throw_argument_error(const Parts&... what) {
  throw ArgumentError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(what...));
}
template <class... Parts>
[[noreturn]] void throw_argument_type_error(const Parts&... what) {
  throw ArgumentTypeError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, c10::str(what...));
}

}  // namespace nvx
