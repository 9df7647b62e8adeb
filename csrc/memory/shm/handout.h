#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/handle.h"

namespace nvx {

/// Data that one process has read elsewhere and passes on to the others of its host, so that not each of them reads it
/// there. It consists of sheets, which all processes get in the same order.
class Handout {
 public:
  Handout();
  /// The name that a Receipt is made with.
  const std::string& name() const { return name_; }
  /// Readable when somebody has come to fetch.
  int fd() const { return listener_.get(); }

  /// Adds the next sheet. Throws Error if there is no memory for it.
  void give(std::span<const uint8_t> sheet);
  /// Accepts a bounded number of those who have come, and gives everybody the sheets that there are by now. Never
  /// blocks.
  void serve();

 private:
  struct Guest {
    Fd socket;
    size_t given;
  };

  std::string name_;
  Fd listener_;
  std::vector<Fd> sheets_;
  std::vector<Guest> guests_;
};

/// The other side: takes the sheets as they come.
class Receipt {
 public:
  explicit Receipt(const std::string& name);
  /// False once its handout is gone: sheets that have not come by then will not come.
  bool open() const { return open_; }
  /// The next sheet; nothing if none comes within the span.
  std::optional<std::vector<uint8_t>> next(std::chrono::milliseconds span);

 private:
  void connect();

  std::string name_;
  bool open_ = false;
  Fd socket_;  // none while the handout's backlog is full
};

}  // namespace nvx
