#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nvx {

/// The advice if a store still holds values of an earlier job.
inline constexpr const char* kNewStore = "use a new store, or another prefix in it";

/// The key of the table of all ranks' hellos.
inline constexpr const char* kHellos = "table";
/// A key of one set-up of a group. A store, and a prefix in it, may serve several set-ups one after another.
inline std::string key_in(int64_t generation, const std::string& what) {
  return "nvx/" + std::to_string(generation) + "/" + what;
}
/// The key of the number of a rank's set-ups, its generation.
inline std::string generation_of(int rank) { return "nvx/generation/" + std::to_string(rank); }

/// The key-value store through which the ranks of a group find each other. No other group uses its keys.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<uint8_t>& value) = 0;
  /// Waits for the key for at most this long; empty if it has not come. Throws if the store itself fails.
  virtual std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) = 0;
  /// Adds to the number under this key, which starts at 0, and returns the sum: `add(key, 0)` reads it.
  virtual int64_t add(const std::string& key, int64_t n) = 0;
  /// Sets the key if no rank has set it, and returns its value. Empty if the rank that claimed it has not written it
  /// soon.
  virtual std::vector<uint8_t> claim(const std::string& key, const std::vector<uint8_t>& value) {
    constexpr std::chrono::milliseconds kSpan{2000};
    if (add(key + "/asked", 1) != 1) return get(key, kSpan).value_or(std::vector<uint8_t>());
    set(key, value);
    return value;
  }
  /// The name or address of the host that serves the store, if it is served over a network; all ranks have reached it.
  virtual std::string host() const { return ""; }
  /// Whether a request to its server has failed, so that later ones would fail too.
  virtual bool is_lost() const { return false; }
  /// Removes a key that no rank needs any more, if the store can.
  virtual void remove(const std::string& /*key*/) {}
  /// A rank that gives up leaves notes for the others while this exists: requests wait for a moment at most, and
  /// neither an abort nor Ctrl-C ends them.
  class Hurry {
   public:
    explicit Hurry(Store& store) : store_(store) { store_.hurry(1); }
    ~Hurry() { store_.hurry(-1); }
    Hurry(const Hurry&) = delete;
    Hurry& operator=(const Hurry&) = delete;

   private:
    Store& store_;
  };

 private:
  virtual void hurry(int /*change*/) {}  // of the number of those that exist
};

}  // namespace nvx
