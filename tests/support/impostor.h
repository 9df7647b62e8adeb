#pragma once

#include <cstring>

#include "support/groups.h"

namespace nvx::test {

/// A rank 1 of 2 that consists of memory only: it has joined through the store and has a pad, which the test writes.
/// For tests of a peer that sends false data.
class Impostor : public MemoryStore {
 public:
  Impostor() : shm_(ShmRegistry::instance()) {
    span_ = shm_->arena().allocate(kernel::PadLayout(2).bytes());
    Hello hello = describe_self(1);
    hello.ranks = 2;
    hello.arena = shm_->arena().id();
    hello.pad_offset = span_.offset;
    MemoryStore::set("nvx/1/1", encode({&hello, 1}));
  }
  ~Impostor() override { shm_->arena().free(span_); }

  /// Rank 0 publishes the table of all ranks, as a correct rank 1 would expect.
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key == "nvx/1/table") {
      kernel::PadHeader& header = pad().header();
      const Hello peer = decode(value, 2)[0];
      peer_offset_ = peer.pad_offset;
      header.group = peer.nonce;
      header.rank = 1;
      header.presence = kernel::Presence::kHere;
      signal(header.ready.flag, 1);
    }
    MemoryStore::set(key, value);
  }

  kernel::Pad pad() const { return {shm_->arena().at(span_.offset), 2}; }
  std::byte* bytes() const { return shm_->arena().at(span_.offset); }
  size_t size() const { return kernel::PadLayout(2).bytes(); }
  /// Rank 0's pad, which is in the same arena.
  kernel::Pad peer_pad() const { return {shm_->arena().at(peer_offset_), 2}; }
  void leave() { pad().header().presence = kernel::Presence::kLeft; }

 private:
  std::shared_ptr<ShmRegistry> shm_;
  Span span_;
  uint64_t peer_offset_ = 0;
};

}  // namespace nvx::test
