#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/handle.h"

namespace nvx {

/// What one process of a host has read elsewhere, handed on to others of its host, so that not each of them must read
/// it there: sheets, which everybody gets in their order.
class Handout {
 public:
  Handout();
  /// For a Receipt.
  const std::string& name() const { return name_; }
  /// Readable when somebody has come.
  int fd() const { return listener_.get(); }

  /// The next sheet. Throws Error if there is no memory for it.
  void give(std::span<const uint8_t> sheet);
  /// Lets in who has come, and gives what there is. Never blocks.
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
  /// False when its handout is gone: what has not come by then will not come.
  bool open() const { return bool(socket_); }
  /// The next sheet; nothing if none comes within the span.
  std::optional<std::vector<uint8_t>> next(std::chrono::milliseconds span);

 private:
  Fd socket_;
};

}  // namespace nvx
