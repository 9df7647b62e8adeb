#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/text.h"
#include "group/core/thread_pool.h"
#include "group/setup/store.h"

namespace nvx {

/// Calls the store. torch's errors for a lost one name neither it nor its server, so this adds them.
template <class Call>
auto call_store(Call call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    std::string what = error.what_without_backtrace();
    what.resize(std::min(what.size(), what.find('\n')));
    while (what.ends_with('.') || what.ends_with('?')) what.pop_back();
    for (const int lack : {ENFILE, EMFILE}) {  // a FileStore opens its file for each call; one text contains the other
      if (what.find(std::strerror(lack)) == std::string::npos) continue;
      throw system_error(
          "process " + std::to_string(getpid()) + " cannot use the store, through which the ranks connect", lack);
    }
    throw Error(Code::kSystem, "nvx: the store, through which the ranks connect, has failed: " + what,
                "check that the process that serves it, usually rank 0, still runs; see its log");
  } catch (const std::runtime_error& error) {
    const std::string what = error.what();
    if (what.find("pure virtual function") == std::string::npos) throw;
    throw Error(Code::kInvalid, "nvx: the store, through which the ranks connect, lacks a method: " + what,
                "define set(), get(), add() and check() in the store's class");
  }
}

/// Adapts a c10d store to the group's interface, for one thread at a time. A request to a TCPStore, which has no
/// timeout, runs on a pool thread: its caller stops waiting after `patience`, at Ctrl-C, and when it is aborted. Then
/// the thread and the store's connection are left alone. If no thread can be made, a request runs here, without these
/// limits.
class TorchStore final : public Store {
 public:
  /// patience: 0: the store's timeout. aborted: may throw the cause.
  TorchStore(c10::intrusive_ptr<c10d::Store> store, int ranks, std::chrono::milliseconds patience = {},
             std::function<bool()> aborted = nullptr)
      : store_(std::move(store)),
        is_remote_(dynamic_cast<c10d::TCPStore*>(innermost().get()) != nullptr),
        patience_(patience.count() > 0 ? patience : store_->getTimeout()),
        aborted_(std::move(aborted)),
        first_pause_(std::max(kFirstPause, ranks * kPauseOfARank / 40)),
        longest_pause_(std::max(kLongestPause, ranks * kPauseOfARank)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    for (size_t p = value.size() / kPart + 1; p-- > 0;) {  // the first part last: who finds it finds the others
      const auto first = value.begin() + ptrdiff_t(p * kPart);
      std::vector<uint8_t> part(first, first + ptrdiff_t(std::min(kPart, value.size() - p * kPart)));
      ask([store = store_, name = part_of(key, p), part = std::move(part)] { store->set(name, part); });
    }
  }
  std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) override {
    // Not Store::wait(): torch logs to stderr when that times out, and here it often times out.
    if (span.count() == 0) return read(key);  // perhaps while another key is waited for
    const auto end = Clock::now() + span;
    if (key != awaited_key_) {
      awaited_key_ = key;
      began_ = next_ = Clock::now();
    }
    for (;;) {
      if (Clock::now() >= next_) {
        if (auto value = read(key)) return value;
        const Clock::time_point now = Clock::now();
        next_ = now + std::clamp<std::chrono::nanoseconds>((now - began_) / 4, first_pause_, longest_pause_);
      }
      if (Clock::now() >= end) return std::nullopt;
      std::this_thread::sleep_until(std::min<Clock::time_point>(next_, end));
    }
  }
  int64_t add(const std::string& key, int64_t n) override {
    return ask([store = store_, key, n] { return store->add(key, n); });
  }
  /// In one step, so no rank ends between its claim and its value.
  std::vector<uint8_t> claim(const std::string& key, const std::vector<uint8_t>& value) override {
    if (is_remote_) return ask([store = store_, key, value] { return store->compareSet(key, {}, value); });
    try {
      return store_->compareSet(key, {}, value);
    } catch (const std::exception&) {  // not every store supports compareSet()
      return Store::claim(key, value);
    }
  }
  std::string host() const override {
    const c10::intrusive_ptr<c10d::Store> store = innermost();
    const auto* served = dynamic_cast<c10d::TCPStore*>(store.get());
    return served ? served->getHost() : "";
  }
  bool is_lost() const override { return silent_ || lost_; }
  /// The value, or `absent`, in one request that never waits: get() would, for a key that its owner removes meanwhile.
  std::vector<uint8_t> peek(const std::string& key, const std::vector<uint8_t>& absent) {
    const auto request = [store = store_, key, absent] { return store->compareSet(key, absent, absent); };
    if (is_remote_) return ask(request);
    try {
      return request();
    } catch (const std::exception&) {  // not every store supports compareSet()
      return absent;
    }
  }
  void remove(const std::string& key) override {
    try {
      ask([store = store_, key] { store->deleteKey(key); });
    } catch (const std::exception&) {  // not every store supports deleteKey()
    }
  }

 private:
  /// torch's TCPStore closes a connection on which more than 8 MiB arrive as one value. So large values are stored in
  /// parts: a part of this size is followed by another one. A value that has parts is written once; remove()
  /// leaves the parts.
  static constexpr size_t kPart = size_t(4) << 20;
  static std::string part_of(const std::string& key, size_t p) { return p == 0 ? key : key + "#" + std::to_string(p); }
  void hurry(int change) override { hurries_ += change; }
  c10::intrusive_ptr<c10d::Store> innermost() const {
    auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store_.get());
    return prefixed ? prefixed->getUnderlyingNonPrefixStore() : store_;
  }
  std::optional<std::vector<uint8_t>> read(const std::string& key) {
    auto value = read_part(key);
    for (size_t p = 1; value && value->size() == p * kPart; ++p) {
      const auto part = read_part(part_of(key, p));
      if (!part) return std::nullopt;
      value->insert(value->end(), part->begin(), part->end());
    }
    return value;
  }
  /// The value, if it exists. A store in another process gets one request: compareSet() with a value that no rank sets
  /// returns that value if the key does not exist, and changes nothing. check() and get() would need three.
  std::optional<std::vector<uint8_t>> read_part(const std::string& key) {
    using Value = std::optional<std::vector<uint8_t>>;
    if (!is_remote_) return call_store([&] { return store_->check({key}) ? Value(store_->get(key)) : std::nullopt; });
    static const std::vector<uint8_t> kNone = {'n', 'v', 'x', ':', ' ', 'n', 'o', 'n', 'e', 0};
    std::vector<uint8_t> value = peek(key, kNone);
    return value == kNone ? std::nullopt : Value(std::move(value));
  }

  /// `call` may outlive this object.
  template <class Call>
  auto ask(Call call) -> decltype(call()) {
    if (!is_remote_) return call_store(std::move(call));
    if (silent_) throw_silent(0);
    const auto task = std::make_shared<std::packaged_task<decltype(call())()>>(
        [call = std::move(call)]() mutable { return call_store(std::move(call)); });
    auto answer = task->get_future();
    if (!ThreadPool::instance().start([task] { (*task)(); })) (*task)();
    constexpr std::chrono::milliseconds kSlice{20}, kHurry{2000}, kNoticeable{2000};
    const bool hurry = hurries_ > 0 && (patience_.count() <= 0 || patience_ > kHurry);  // 0 or less: no limit
    const Deadline limit = Deadline::after(hurry ? kHurry : patience_);
    while (answer.wait_for(kSlice) == std::future_status::timeout) {
      if (limit.passed(Clock::now())) silent_ = true, throw_silent(limit.elapsed_s());
      if (hurries_ == 0) check_whether_to_wait();
      if (Clock::now() - limit.start < kNoticeable || std::exchange(noticed_, true)) continue;
      NVX_LOG(
          kWarn,
          "the store at %s has not answered for 2 s. Next: check the process that serves it, usually rank 0, whether "
          "its host is short of CPU time, and whether another thread of this process is waiting for a key in it",
          host().c_str());
    }
    try {
      return answer.get();
    } catch (const Error&) {
      lost_ = true;
      throw;
    }
  }
  void check_whether_to_wait() const {
    if (stop_requested())
      throw Error(Code::kInterrupted, "nvx: " + interrupt_text() + ", waiting for the store at " + host());
    if (aborted_ && aborted_())
      throw Error(Code::kAborted, "nvx: the group was aborted while this rank waited for the store at " + host());
  }
  [[noreturn]] void throw_silent(double span) const {
    const std::string waited = span > 0 ? " for " + nvx::seconds(span) : "";
    throw Error(Code::kTimeout,
                "nvx: the store at " + host() + ", through which the ranks connect, has not answered" + waited,
                "check whether the process that serves it, usually rank 0, is stopped, or its host down; see its log");
  }

  static constexpr std::chrono::microseconds kFirstPause{100}, kLongestPause{10'000};
  static constexpr std::chrono::microseconds kPauseOfARank{200};  // so all ranks together make 5000 requests a second

  c10::intrusive_ptr<c10d::Store> store_;
  const bool is_remote_;
  const std::chrono::milliseconds patience_;
  const std::function<bool()> aborted_;
  bool silent_ = false, lost_ = false, noticed_ = false;
  int hurries_ = 0;
  const std::chrono::nanoseconds first_pause_, longest_pause_;
  std::string awaited_key_;  // the key that is waited for, over several calls
  Clock::time_point began_{}, next_{};
};

}  // namespace nvx
