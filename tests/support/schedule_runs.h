#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernel/reduce/level.h"
#include "net/executor.h"
#include "support/inputs.h"
#include "support/loopback.h"
#include "support/verify.h"

/// Schedule runs of a group in one process, in which every rank has its own port and messenger.
namespace nvx::test {

/// A fingerprint that distinguishes calls.
inline net::FingerprintBytes fingerprint(uint8_t what) {
  net::FingerprintBytes fingerprint{};
  fingerprint[0] = std::byte(what);
  return fingerprint;
}

/// Messengers, and their ports.
class Messengers {
 public:
  explicit Messengers(int ranks, net::LoopbackNet::Options options = {},
                      std::chrono::milliseconds silence = std::chrono::seconds(10))
      : net_(options) {
    for (int r = 0; r < ranks; ++r) messenger_.push_back(std::make_shared<net::Messenger>(net_.open(), silence));
  }
  int ranks() const { return int(messenger_.size()); }
  net::LoopbackNet& net() { return net_; }
  net::Messenger& messenger(int rank) { return *messenger_[size_t(rank)]; }
  /// A port for every rank, all connected.
  std::vector<std::unique_ptr<net::GroupPort>> ports(uint64_t group) {
    std::vector<std::unique_ptr<net::GroupPort>> ports;
    for (int r = 0; r < ranks(); ++r) {
      ports.push_back(std::make_unique<net::GroupPort>(messenger_[size_t(r)], group, r, ranks()));
    }
    for (int r = 0; r < ranks(); ++r) {
      for (int other = 0; other < ranks(); ++other) {
        if (other == r) continue;
        const std::vector<std::byte> address = messenger(other).address();
        net::GroupPort& port = *ports[size_t(r)];
        MutexLock lock(port.mutex());
        port.connect(other, address);
      }
    }
    return ports;
  }

 private:
  net::LoopbackNet net_;
  std::vector<std::shared_ptr<net::Messenger>> messenger_;
};

/// One rank's part of a run: 4-byte integers, of which every rank can compute all others'.
class Part {
 public:
  Part(const Shape& shape, int rank, Memory memory, uint64_t round)
      : shape_(shape), rank_(rank), round_(round), apart_(memory == Memory::kApart) {
    const size_t in = shape.input_bytes(rank), out = shape.output_bytes(rank);
    const Overlay o = apart_ ? Overlay{.input = 0, .output = in} : overlay(shape, rank);
    in_ = o.input;
    out_ = o.output;
    memory_ = Bytes(std::max(in_ + in, out_ + out) + kGuard, std::byte(0xEE));
    const Bytes input = input_of(rank);
    if (in != 0) std::memcpy(memory_.data() + in_, input.data(), in);
    before_ = memory_;
    for (int r = 0; r < shape.size; ++r) members_.push_back(r);
    layout_ = shape_.layout(rank);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  net::ScheduleArgs args(const schedule::Row& row, uint32_t op, int depth, uint16_t run = 0) {
    scratch_.resize(row.scratch(layout_, rank_));
    net::ScheduleArgs e;
    e.row = &row;
    e.layout = layout_;
    e.place = rank_;
    e.members = members_;
    e.input = memory_.data() + in_;
    e.output = memory_.data() + out_;
    e.scratch = scratch_.data();
    e.reduce = kernel::level().reduce(DType::kI32, ReduceOp::kSum);
    e.fingerprint = fingerprint(1);
    e.op = op;
    e.run = run;
    e.depth = depth;
    return e;
  }

  std::span<const std::byte> memory() const { return memory_; }

  /// Empty if this rank has the expected result, and nothing else has changed.
  std::string verdict() const {
    Bytes want = before_;
    for (const Due& due : contract(shape_, rank_)) {
      const Bytes value = value_of(due);
      if (!value.empty()) std::memcpy(want.data() + out_ + due.output.offset, value.data(), value.size());
    }
    if (memory_ == want) return "";
    const auto at = size_t(std::mismatch(memory_.begin(), memory_.end(), want.begin()).first - memory_.begin());
    return "rank " + std::to_string(rank_) + " has another byte at " + std::to_string(at) + " (input at " +
           std::to_string(in_) + ", output at " + std::to_string(out_) + ") of " + shape_.text();
  }

 private:
  static constexpr size_t kGuard = 16;

  Bytes input_of(int rank) const {
    Bytes bytes(shape_.input_bytes(rank));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(mix(uint64_t(rank) * 1000 + round_, i) >> 20);
    return bytes;
  }
  Bytes value_of(const Due& due) const {
    const auto of = [&](int rank) {
      const Bytes all = input_of(rank);
      const auto begin = all.begin() + long(due.input_offset);
      return Bytes(begin, begin + long(due.output.bytes));
    };
    if (due.source != kEverybody) return of(due.source);
    std::vector<Bytes> inputs;
    for (int r = 0; r < shape_.size; ++r) inputs.push_back(of(r));
    return reduced(DType::kI32, ReduceOp::kSum, inputs, 0, due.output.bytes / 4, {});
  }

  const Shape shape_;
  const int rank_;
  const uint64_t round_;
  const bool apart_;
  size_t in_ = 0, out_ = 0;
  Bytes memory_, before_, scratch_;
  std::vector<int> members_;
  schedule::Layout layout_;
};

/// A run that is created and destroyed with its messenger's lock held.
class OpenRun {
 public:
  OpenRun(net::GroupPort& port, net::ScheduleArgs args) : port_(port) {
    MutexLock lock(port_.mutex());
    run_ = std::make_unique<net::ScheduleRun>(port_, std::move(args));
    run_->advance();
  }
  OpenRun(OpenRun&&) = default;
  ~OpenRun() {
    if (run_) end();
  }
  net::ScheduleRun& operator*() { return *run_; }
  net::ScheduleRun* operator->() { return run_.get(); }

  /// Drives it on this thread until it ends; kPending on a timeout.
  net::Progress drive(std::chrono::milliseconds span = std::chrono::seconds(20)) {
    net::Progress progress = net::Progress::kPending;
    WaitRules rules;
    rules.deadline = Deadline::after(span);
    port_.messenger().wait([&] { return (progress = run_->advance()) != net::Progress::kPending; },
                           [&] { run_->check_peers(); }, -1, rules);
    return progress;
  }
  /// Nothing accesses its memory afterwards.
  void end() {
    MutexLock lock(port_.mutex());
    run_.reset();
  }
  /// The same, and also ends the operation on this rank.
  void end_operation(uint32_t op) {
    end();
    MutexLock lock(port_.mutex());
    port_.end_operation(op + 1);
  }

 private:
  net::GroupPort& port_;
  std::unique_ptr<net::ScheduleRun> run_;
};

}  // namespace nvx::test
