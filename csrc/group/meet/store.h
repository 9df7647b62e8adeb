#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nvx {

/// Where the ranks of a group first find each other. Keys are this group's own.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<uint8_t>& value) = 0;
  /// Waits for the key for at most this long; nothing when it has not come. Throws when the store itself fails.
  virtual std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) = 0;
  /// Adds to the number under this key, which begins at 0, and returns the sum: add(key, 0) reads it.
  virtual int64_t add(const std::string& key, int64_t n) = 0;
  /// The host that serves it, by name or address, where it is served over a network: one that all ranks have reached.
  virtual std::string host() const { return ""; }
  /// Forgets the key, where the store can: nobody asks for it any more.
  virtual void remove(const std::string& /*key*/) {}
};

}  // namespace nvx
