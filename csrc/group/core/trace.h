#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nvx {

/// A call, message or wait that has ended. Times are nanoseconds of Clock.
struct TraceRecord {
  enum Kind : uint8_t { kCall, kWait, kSend, kRecv, kLaunch };

  uint64_t began = 0, ended = 0;
  uint64_t number = 0;  ///< of the call; a message's tag
  uint64_t count = 0, bytes = 0;
  uint32_t what = 0;  ///< the first four bytes of the call's fingerprint; a message's type in the second
  int32_t peer = -1;  ///< of a call: its root
  uint16_t slot = 0;  ///< the group's
  Kind kind = kCall;
  uint8_t algorithm = 0, schedule = 0;  ///< inside and between hosts; places in the page's lists, plus one
};

/// The last records of a process, in the file of its `StatusPage`. Any thread adds to it.
class TraceRing {
 public:
  static constexpr size_t kRecords = 1 << 17;
  struct Entry {
    std::atomic<uint64_t> stamp;  ///< the records that the process has begun, this one included; 0 during a write
    TraceRecord record;
  };

  explicit TraceRing(void* memory) : entries_(static_cast<Entry*>(memory)) {}

  void add(const TraceRecord& record) {
    const uint64_t before = begun_.fetch_add(1, std::memory_order_relaxed);
    Entry& entry = entries_[before % kRecords];
    entry.stamp.exchange(0, std::memory_order_acq_rel);  // before the record's stores
    entry.record = record;
    entry.stamp.store(before + 1, std::memory_order_release);
  }

 private:
  Entry* const entries_;
  std::atomic<uint64_t> begun_{0};
};
static_assert(sizeof(TraceRing::Entry) == 64);

}  // namespace nvx
