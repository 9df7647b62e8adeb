#pragma once

#include <cerrno>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/failure.h"

namespace nvx {

/// The text of an error without its leading "nvx: ", for use inside another message.
inline std::string without_name(const std::string& text) { return text.starts_with("nvx: ") ? text.substr(5) : text; }

/// The result of an operation in flight. Copies share the failure; success allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  /// `what` begins with "nvx: ". `advice` states what to do about it, without "Next: ".
  Status(Code code, const std::string& what, const std::string& advice = "");
  Status(const Failure& failure);

  bool ok() const { return state_ == nullptr; }
  Code code() const { return state_->failure.reported_code(); }
  const std::string& what() const { return state_->text; }
  /// what() without its leading "nvx: ".
  std::string reason() const { return without_name(state_->text); }
  const Failure& failure() const { return state_->failure; }

 private:
  struct State {
    Failure failure;
    std::string text;
  };
  std::shared_ptr<const State> state_;
};

/// The advice where ranks exchange formats of different versions.
inline constexpr const char* kOneVersion = "install one version of nvx on all hosts";

/// The exception of set-up. Its text begins with "nvx: ".
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what, const std::string& advice = "") : Error(Status(code, what, advice)) {}
  explicit Error(Status status) : std::runtime_error(status.what()), status_(std::move(status)) {}
  Code code() const { return status_.code(); }
  /// what() without its leading "nvx: ".
  std::string reason() const { return status_.reason(); }
  const Status& status() const { return status_; }
  const Failure& failure() const { return status_.failure(); }

 private:
  Status status_;
};

inline Status with_context(const Status& status, const std::string& context) {
  return with_context(status.failure(), context);
}

/// Converts an exception into a `Failure`. An exception that is not an nvx::Error becomes `kSystem`.
Failure failure_of(const std::exception& thrown);

/// An exception on this rank as the cause of `what`. The code is always `kSystem`, whatever the exception carried.
Failure system_failure(const std::string& what, const std::exception& thrown);

/// The Error for a system call that has failed: "nvx: <what>: <strerror(error)>", with advice that fits.
Error system_error(const std::string& what, int error = errno);

}  // namespace nvx

#define NVX_TRY(expression)                                                           \
  do {                                                                                \
    if (::nvx::Status nvx_status = (expression); !nvx_status.ok()) return nvx_status; \
  } while (0)

#define NVX_CHECK(condition, what)                                                              \
  do {                                                                                          \
    if (!(condition)) throw ::nvx::Error(::nvx::Code::kInvalid, std::string("nvx: ") + (what)); \
  } while (0)
