#include "group/device/rdma_trial.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "base/random.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/device_pool.h"
#include "memory/gpu/device_work.h"

namespace nvx {
namespace {

/// The size classes below a segment; odd ones put the messages behind them at unaligned addresses.
constexpr size_t kSizes[] = {1, 3, 24, 257, 2048, 16 << 10};
constexpr size_t kSegments = 32;
constexpr uint32_t kRounds = 6;  ///< even ones move device memory, odd ones host memory, for comparison
constexpr uint32_t kDeviceRounds = kRounds / 2;

/// Why not. `waited`: because another rank did not do its part.
struct Reason {
  std::string text;
  bool waited = false;
};

/// Fills the bytes with a sequence that no other seed gives.
void fill(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 next(seed);
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t value = next();
    std::memcpy(&bytes[i], &value, std::min(sizeof value, bytes.size() - i));
  }
}

/// One rank's part. Its methods run on threads that may have to be abandoned, and which then keep it.
class RdmaTrial final : public net::Receiver {
 public:
  explicit RdmaTrial(const RdmaTrialSetting& setting)
      : registry_(*setting.registry), device_(setting.device), slack_(setting.slack) {
    // A flush is a call of the driver, which may wait for a launch that waits for the kernel that waits for the data.
    NVX_CHECK(
        properties_of(*registry_.driver(), device_).orders_rdma,
        "this GPU needs a flush to see what network cards write (GPUs of compute capability 9.0 and newer do not, "
        "unless NVLink-C2C joins them to the CPU)");
    link_ = setting.open_link();
    link_->listen(*this);
    sizes_.assign(std::begin(kSizes), std::end(kSizes));
    sizes_.insert(sizes_.end(), kSegments, link_->segment_bytes());
    for (const size_t size : sizes_) starts_.push_back(std::exchange(total_, total_ + size));
    DevicePool& pool = registry_.pool(device_);
    on_device_ = {reinterpret_cast<std::byte*>(pool.allocate((1 + kDeviceRounds) * total_)),
                  [&pool](std::byte* at) { (void)pool.free(reinterpret_cast<DevicePtr>(at)); }};
    (void)link_->use_device_memory({on_device_.get(), (1 + kDeviceRounds) * total_});
    on_host_ = registry_.pinned()->get(device_, 3 * total_);
  }

  std::vector<std::byte> address() const { return link_->address(); }

  /// After a failure the link is closed, so that the other ranks do not wait.
  Reason run(std::span<const std::byte> next, const Deadline& deadline) {
    try {
      const net::PeerId peer = link_->add(next);
      for (uint32_t round = 0; round < kRounds && why_not_.text.empty(); ++round) move(peer, round, deadline);
    } catch (const Error& error) {
      fail(error.reason());
    }
    const auto us = [](Clock::duration span) { return std::to_string(span / std::chrono::microseconds(1)) + " us"; };
    if (why_not_.text.empty() && best_[0] > 2 * best_[1] + slack_)
      fail("messages of device memory take " + us(best_[0]) + ", those of host memory " + us(best_[1]));
    if (!why_not_.text.empty()) link_->close();
    return why_not_;
  }

  bool deliver(const std::atomic<bool>& over) {
    while (!over) {
      if (!link_->progress()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    return true;
  }

  std::byte* place(std::span<const std::byte> header, size_t bytes) override {
    const auto message = read(header);
    return message && bytes == sizes_[message->index] ? at(*message, /*arriving=*/true) : nullptr;
  }
  void arrived(std::span<const std::byte> header, std::span<const std::byte> body) override {
    const auto message = read(header);
    if (!message || body.size() != sizes_[message->index]) return fail("a message of the trial is damaged");
    if (message->round % 2 == 0 && body.data() != at(*message, /*arriving=*/true))
      return fail("the link has copied device memory to host memory");
    theirs_ = message->seed;
    ++received_[message->round];
  }
  void done(net::Post&, const Status& status) override {
    if (!status.ok()) fail(status.reason(), /*waited=*/true);  // the peer is lost
    ++sent_;
  }
  void lost(net::PeerId, const std::string& why) override { fail("the link to the next host is lost: " + why, true); }

 private:
  struct Message {
    uint32_t round, index;
    uint64_t seed;  // of the sender's bytes
  };
  std::optional<Message> read(std::span<const std::byte> header) const {
    Message message;
    if (header.size() != sizeof message) return {};
    std::memcpy(&message, header.data(), sizeof message);
    return message.round < kRounds && message.index < sizes_.size() ? std::optional(message) : std::nullopt;
  }
  /// Each round of device memory arrives at a place of its own: the sender may be a round ahead.
  std::byte* at(const Message& message, bool arriving) const {
    const bool is_device = message.round % 2 == 0;
    std::byte* const base = is_device ? on_device_.get() : on_host_->host();
    const size_t part = !arriving ? 0 : is_device ? 1 + message.round / 2 : 1;
    return base + part * total_ + starts_[message.index];
  }
  void fail(const std::string& why, bool waited = false) {
    if (why_not_.text.empty()) why_not_ = {why, waited};
  }

  void move(net::PeerId to, uint32_t round, const Deadline& deadline) {
    const bool is_device = round % 2 == 0;
    if (is_device) {
      fill({on_host_->host(), total_}, seed_ + round);
      copy(on_device_.get(), on_host_->host(), total_, deadline);
    }
    const auto began = Clock::now();
    std::deque<net::Post> posts(sizes_.size());
    sent_ = 0;
    for (uint32_t i = 0; i < posts.size(); ++i) {
      const Message message{round, i, seed_};
      posts[i].to = to, posts[i].header_bytes = sizeof message;
      std::memcpy(posts[i].header, &message, sizeof message);
      posts[i].body = at(message, /*arriving=*/false), posts[i].bytes = sizes_[i];
      link_->post(posts[i]);
    }
    while (why_not_.text.empty() && (sent_ < posts.size() || received_[round] < posts.size())) {
      if (deadline.passed(Clock::now())) {
        fail(std::string("messages of ") + (is_device ? "device" : "host") + " memory " +
                 (received_[round] < posts.size() ? "did not arrive" : "were not sent") + " within " +
                 how_long(deadline),
             /*waited=*/true);
      }
      if (!link_->progress()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    if (!why_not_.text.empty()) return link_->close();  // before the posts go
    Clock::duration& best = best_[round % 2];
    best = std::min(best, Clock::now() - began);
    if (!is_device) return;
    std::byte* const seen = on_host_->host() + 2 * total_;
    copy(seen, at({round, 0, 0}, /*arriving=*/true), total_, deadline);
    std::vector<std::byte> sent(total_);
    fill(sent, theirs_ + round);
    if (std::memcmp(seen, sent.data(), total_) != 0) fail("a network card has written wrong bytes to device memory");
  }
  void copy(std::byte* to, const std::byte* from, size_t bytes, const Deadline& deadline) {
    const auto address = [&](const std::byte* p) {
      const bool on_host = p >= on_host_->host() && p < on_host_->host() + on_host_->bytes();
      return on_host ? on_host_->base() + DevicePtr(p - on_host_->host()) : reinterpret_cast<DevicePtr>(p);
    };
    DeviceWork work(registry_.driver(), device_, {on_host_});
    work.copy(address(to), address(from), bytes);
    NVX_CHECK(work.drain(deadline), "a copy of the trial did not end within " + how_long(deadline));
  }

  DeviceRegistry& registry_;
  const int device_;
  const Clock::duration slack_;
  const uint64_t seed_ = random_value<uint64_t>();
  uint64_t theirs_ = 0;
  std::vector<size_t> sizes_, starts_;  // by message
  size_t total_ = 0;
  std::shared_ptr<std::byte> on_device_;   // the outgoing and incoming data of each round
  std::shared_ptr<DeviceRegion> on_host_;  // the same, and a copy of the data that the device received
  size_t sent_ = 0;
  std::array<size_t, kRounds> received_{};
  std::array<Clock::duration, 2> best_{Clock::duration::max(), Clock::duration::max()};  // of device and host memory
  Reason why_not_;
  std::unique_ptr<net::Link> link_;  // destroyed before the memory that it uses
};

/// The first byte of a rank's message to the others. Behind it is the reason, or the address of the link.
enum class Outcome : uint8_t { kCan, kWaited, kCannot };

std::vector<std::byte> outcome_of(const Reason& why_not, std::vector<std::byte> address = {}) {
  const auto text = std::as_bytes(std::span(why_not.text));
  const Outcome outcome = text.empty() ? Outcome::kCan : why_not.waited ? Outcome::kWaited : Outcome::kCannot;
  if (!text.empty()) address.assign(text.begin(), text.end());
  address.insert(address.begin(), std::byte(outcome));
  return address;
}

/// The reason of the first rank with the worst outcome; empty if all can.
std::string worst_of(const std::vector<std::vector<std::byte>>& all, const RankNames& name) {
  constexpr size_t kMost = 400;
  const auto outcome = [](const auto& a) { return a.empty() ? std::byte(Outcome::kCannot) : a[0]; };
  const auto worst = std::ranges::max_element(all, {}, outcome);  // the first of equal ones
  if (outcome(*worst) == std::byte(Outcome::kCan)) return "";
  const std::string text(reinterpret_cast<const char*>(worst->data()), std::min(worst->size(), kMost));
  return name(int(worst - all.begin())) + ": " + printable(text.substr(std::min<size_t>(1, text.size())));
}

/// Runs the link of a trial that has passed here: messages to the next rank may still be in it.
class Delivery {
 public:
  Delivery(const std::shared_ptr<RdmaTrial>& trial, std::chrono::milliseconds timeout) : timeout_(timeout) {
    contain("the delivery of the last messages of a trial of GPUDirect",
            [&] { call_.emplace([trial, over = over_] { return trial->deliver(*over); }); });
  }
  ~Delivery() {
    *over_ = true;
    contain("the end of a trial of GPUDirect", [&] {
      if (call_) (void)call_->get(Clock::now() + timeout_);
    });
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

 private:
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<std::atomic<bool>> over_ = std::make_shared<std::atomic<bool>>(false);
  std::optional<ThreadCall<bool>> call_;
};

}  // namespace

std::string why_no_rdma(Bootstrap& bootstrap, const RdmaTrialSetting& setting) {
  using Trial = std::shared_ptr<RdmaTrial>;
  Trial trial;
  Reason why{setting.obstacle};
  try {
    if (why.text.empty())
      trial = call_or_throw<Trial>("opening a link for a trial of GPUDirect", Deadline::after(setting.timeout),
                                   [setting] { return std::make_shared<RdmaTrial>(setting); });
  } catch (const Error& error) {
    why.text = error.reason();
  }
  auto all = bootstrap.all_gather(outcome_of(why, trial ? trial->address() : std::vector<std::byte>()));
  std::string worst = worst_of(all, setting.name);
  if (worst.empty()) {
    const Deadline deadline = Deadline::after(setting.timeout);
    try {
      why =
          call_or_throw<Reason>("a trial of GPUDirect", deadline, [trial, deadline, next = all[size_t(setting.next)]] {
            return trial->run(std::span(next).subspan(1), deadline);
          });
    } catch (const Error& error) {
      why.text = error.reason();
    }
    std::optional<Delivery> delivery;
    if (why.text.empty()) delivery.emplace(trial, setting.timeout);
    worst = worst_of(bootstrap.all_gather(outcome_of(why)), setting.name);
  }
  if (trial) destroy_on_thread("the end of a trial of GPUDirect", std::move(trial), setting.timeout);
  return worst;
}

}  // namespace nvx
