#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/handle.h"

namespace nvx {

/// Passes data that one process has read elsewhere to the others of its host, so that not each of them reads it from
/// there. The data consists of sheets, which all processes receive in the same order.
class Handout {
 public:
  Handout();
  /// The name for the constructor of a Receipt.
  const std::string& name() const { return name_; }
  /// Readable when a process has connected.
  int fd() const { return listener_.get(); }

  /// Adds the next sheet. Throws Error if there is no memory for it.
  void give(std::span<const uint8_t> sheet);
  /// Accepts a bounded number of new connections, and sends all connected processes the sheets that exist by now. Never
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

/// The receiving side: takes the sheets as they come.
class Receipt {
 public:
  explicit Receipt(const std::string& name) : name_(name) { connect(); }
  /// False once its handout is gone: no further sheets will come.
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
