#pragma once

#include <memory>
#include <stdexcept>
#include <string>

namespace nvx {

enum class Code {
  kTimeout,      ///< a wait outlived its deadline
  kMismatch,     ///< two ranks called different operations
  kPeerDied,     ///< the process of a rank has ended
  kPeerLeft,     ///< a rank has destroyed the group that this one still waits in
  kPeerFailed,   ///< another rank reported a failure first; its words are repeated
  kAborted,      ///< this rank has called the operation off itself: by abort(), or by leaving the group
  kInterrupted,  ///< Ctrl-C on the main thread
  kInvalid,      ///< an argument nobody can serve; the group stays usable
  kSystem,       ///< the operating system refused something
};

const char* name(Code code);

/// What set-up throws. Its text begins with "nvx: ".
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what) : std::runtime_error(what), code_(code) {}
  Code code() const { return code_; }
  /// The text without "nvx: ", for a sentence that begins with it already.
  std::string reason() const { return what() + 5; }

 private:
  Code code_;
};

/// What an operation in flight ends in. Copying is cheap; success holds nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string what) : failure_(std::make_shared<const Failure>(Failure{code, std::move(what)})) {}

  bool ok() const { return failure_ == nullptr; }
  Code code() const { return failure_->code; }
  const std::string& what() const { return failure_->what; }

 private:
  struct Failure {
    Code code;
    std::string what;
  };
  std::shared_ptr<const Failure> failure_;
};

/// "nvx: <what>: <strerror>", and what to do about it, for a system call that failed just now.
Error system_error(const std::string& what);

/// What an error says, without the "nvx: " that it begins with: for use inside another message.
inline std::string without_name(const std::string& text) { return text.starts_with("nvx: ") ? text.substr(5) : text; }

}  // namespace nvx

#define NVX_TRY(expression)                                                           \
  do {                                                                                \
    if (::nvx::Status nvx_status = (expression); !nvx_status.ok()) return nvx_status; \
  } while (0)

#define NVX_CHECK(condition, what)                                                              \
  do {                                                                                          \
    if (!(condition)) throw ::nvx::Error(::nvx::Code::kInvalid, std::string("nvx: ") + (what)); \
  } while (0)
