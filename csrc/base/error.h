#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/failure.h"

namespace nvx {

/// What an error says, without the "nvx: " that it begins with: for use inside another message.
inline std::string without_name(const std::string& text) { return text.starts_with("nvx: ") ? text.substr(5) : text; }

/// What an operation in flight ends in. Copying is cheap; success holds nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  /// what: begins with "nvx: ". advice: what to do about it, without "Next: ".
  Status(Code code, const std::string& what, const std::string& advice = "");
  Status(const Failure& failure);

  bool ok() const { return met_ == nullptr; }
  Code code() const { return met_->failure.met_as(); }
  const std::string& what() const { return met_->words; }
  /// What what() says, without "nvx: ": for a sentence that begins with it already.
  std::string reason() const { return without_name(met_->words); }
  const Failure& failure() const { return met_->failure; }

 private:
  struct Met {
    Failure failure;
    std::string words;
  };
  std::shared_ptr<const Met> met_;
};

/// What set-up throws. Its text begins with "nvx: ".
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what, const std::string& advice = "") : Error(Status(code, what, advice)) {}
  explicit Error(Status status) : std::runtime_error(status.what()), status_(std::move(status)) {}
  Code code() const { return status_.code(); }
  /// The text without "nvx: ".
  std::string reason() const { return status_.reason(); }
  const Status& status() const { return status_; }
  const Failure& failure() const { return status_.failure(); }

 private:
  Status status_;
};

/// It, and where it was met, too.
inline Status met_in(const Status& status, const std::string& context) { return met_in(status.failure(), context); }

/// What was thrown, as what has happened to a group.
Failure failure_of(const std::exception& thrown);

/// "nvx: <what>: <strerror>", and what to do about it, for a system call that failed just now.
Error system_error(const std::string& what);

}  // namespace nvx

#define NVX_TRY(expression)                                                           \
  do {                                                                                \
    if (::nvx::Status nvx_status = (expression); !nvx_status.ok()) return nvx_status; \
  } while (0)

#define NVX_CHECK(condition, what)                                                              \
  do {                                                                                          \
    if (!(condition)) throw ::nvx::Error(::nvx::Code::kInvalid, std::string("nvx: ") + (what)); \
  } while (0)
