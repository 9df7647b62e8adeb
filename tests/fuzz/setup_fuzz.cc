// Set-up, where the store, the leader of the host and the link to other hosts hold anything: a rank ends with an Error,
// or goes on waiting, and blames only ranks of the group.

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/failure_note.h"
#include "group/setup/host_setup.h"
#include "group/setup/inter_host_setup.h"
#include "support/scripted_link.h"

namespace nvx::test {
namespace {

using Value = std::vector<uint8_t>;
constexpr int kRanks = 3;

void require(bool holds) {
  if (!holds) std::abort();
}

template <class T>
void put(Value& value, const T& field) {
  const auto* begin = reinterpret_cast<const uint8_t*>(&field);
  value.insert(value.end(), begin, begin + sizeof field);
}

Hello hello_of(int rank, uint64_t host) {
  Hello hello;
  hello.bytes = sizeof hello;
  hello.rank = rank;
  hello.host = host;
  hello.ranks = kRanks;
  return hello;
}

/// Other ranks have written anything to it.
class ForeignStore : public Store {
 public:
  ForeignStore(FuzzedDataProvider& from, std::string relay) : from_(from), relay_(std::move(relay)) {}
  void set(const std::string&, const Value&) override {}
  std::optional<Value> get(const std::string&, std::chrono::milliseconds) override {
    if (from_.ConsumeIntegralInRange(0, 7) == 0) return std::nullopt;
    Value value = encode({{hello_of(from_.ConsumeIntegralInRange(-1, kRanks), from_.ConsumeIntegralInRange(1, 2))}});
    for (int i = from_.ConsumeIntegralInRange(0, 20); i > 0; --i) put(value, uint8_t(7));  // the address
    return damaged(value);
  }
  int64_t add(const std::string&, int64_t) override { return from_.ConsumeIntegralInRange<int64_t>(-1, 4); }
  Value claim(const std::string&, const Value& own) override {
    if (from_.ConsumeIntegralInRange(0, 7) == 0) return own;
    Value leader;
    put(leader, PeerInfo::of(from_.ConsumeIntegralInRange(-1, kRanks), from_.ConsumeRandomLengthString(130)));
    char name[48] = {};
    relay_.copy(name, sizeof name);
    put(leader, name);
    return damaged(leader);
  }

 private:
  Value damaged(Value value) {
    for (int i = from_.ConsumeIntegralInRange(0, 3); i > 0; --i)
      value[from_.ConsumeIntegralInRange<size_t>(0, value.size() - 1)] ^= from_.ConsumeIntegral<uint8_t>();
    if (from_.ConsumeIntegralInRange(0, 9) == 0) value.resize(from_.ConsumeIntegralInRange<size_t>(0, value.size()));
    return value;
  }

  FuzzedDataProvider& from_;
  std::string relay_;
};

void within_the_host(Store& store, const GroupOptions& options, HostRelay& relay, FuzzedDataProvider& from) {
  HostSetUp host(store, options);
  host.enter(1, hello_of(0, 1));
  relay.serve();
  if (from.ConsumeBool()) {
    const FailureNote note =
        FailureNote::of({.code = Code::kTimeout, .cause = "late", .lost_rank = from.ConsumeIntegral<int>()});
    const auto* begin = reinterpret_cast<const uint8_t*>(note.used().data());
    Value reason(begin, begin + note.used().size());
    if (from.ConsumeBool()) reason[from.ConsumeIntegralInRange<size_t>(0, reason.size() - 1)] ^= 0x41;
    relay.give_up(reason);
    relay.serve();
    if (host.follows()) (void)host.next(std::chrono::milliseconds(0));
  }
  (void)host.proceed();
  host.check();
  if (const auto why = host.reason()) require(why->lost_rank < options.size);
  for (int rank = -1; rank <= options.size; ++rank) (void)host.has_ended(rank);
}

void between_hosts(Store& store, GroupOptions& options, FuzzedDataProvider& from) {
  auto* const link = new ScriptedLink(64);
  const auto messenger =
      std::make_shared<net::Messenger>(std::unique_ptr<net::Link>(link), std::chrono::milliseconds(200));
  options.messenger = [&] { return messenger; };
  InterHostSetUp hosts(store, options);
  hosts.enter(1, hello_of(0, 1), /*leads=*/true);
  {
    MutexLock lock(messenger->mutex());
    if (from.ConsumeBool()) link->to_lose.push_back(from.ConsumeIntegralInRange<net::PeerId>(0, 3));
  }
  for (int rank = 0; rank < options.size; ++rank) hosts.check(rank, from.ConsumeBool());
  require(!hosts.knows(-1) && !hosts.knows(options.size));
}

void set_up(FuzzedDataProvider& from) {
  HostRelay relay(PeerInfo::of(1, "the leader"));
  ForeignStore store(from, from.ConsumeIntegralInRange(0, 7) == 0 ? "nobody" : relay.name());
  GroupOptions options;
  options.name = "fuzz";
  options.size = kRanks;
  options.rank = 0;
  options.global_ranks = {0, 1, 2};
  try {
    if (from.ConsumeBool()) return within_the_host(store, options, relay, from);
    between_hosts(store, options, from);
  } catch (const Error& error) {
    require(error.failure().lost_rank < options.size);
  }
}

}  // namespace
}  // namespace nvx::test

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider from(data, size);
  nvx::test::set_up(from);
  return 0;
}
