#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/gpu/peer_mappings.h"
#include "support/bootstraps.h"
#include "support/fake_driver.h"
#include "support/ranks.h"

/// Simulated processes with GPUs.
namespace nvx::test {

/// A process with its own driver; a thread can be one too.
struct Process {
  explicit Process(int devices, size_t arena = size_t(8) << 20,
                   std::chrono::milliseconds timeout = DeviceArena::kTimeout)
      : driver(std::make_shared<FakeDriver>(devices)),
        registry(std::make_unique<DeviceRegistry>(driver, arena, timeout)) {}
  std::shared_ptr<FakeDriver> driver;
  std::unique_ptr<DeviceRegistry> registry;
};

inline MappingOptions options_of(int rank, int ranks, int device) {
  return {.rank = rank,
          .ranks = ranks,
          .device = device,
          .host = 7,
          .timeout = std::chrono::milliseconds(as_fast(500, 2000))};
}

inline std::byte* memory(DevicePtr at) { return reinterpret_cast<std::byte*>(at); }

/// The resources that a driver has given and not got back, once other threads have had time to return theirs: the
/// thread that made an arena holds it until it ends, and a call that was given up holds what it uses.
std::string unreleased_at_rest(const FakeDriver& driver);

/// Descriptors of this process.
int open_fds();

/// Each rank writes to the other ranks' memory and checks its own, through the addresses of its mappings, like kernels.
void write_and_look(const PeerMappings& mappings, Bootstrap& bootstrap, int rank, int ranks);

/// A bootstrap that sends something else.
class FalseBootstrap : public Bootstrap {
 public:
  FalseBootstrap(Bootstrap& real, std::function<void(int, std::vector<std::byte>&)> spoil)
      : real_(real), spoil_(std::move(spoil)) {}
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override {
    std::vector<std::byte> sent(mine.begin(), mine.end());
    spoil_(round_++, sent);
    return real_.all_gather(sent);
  }
  void give_up(const Failure& why) override { real_.give_up(why); }

 private:
  Bootstrap& real_;
  std::function<void(int, std::vector<std::byte>&)> spoil_;
  int round_ = 0;
};

}  // namespace nvx::test
