#pragma once

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "net/header.h"

namespace nvx::net {

/// The operations that the ranks of a group are known to have called, and fingerprints of others that differ from this
/// rank's. Numbers of operations are compared modularly, because they may wrap.
class CallFingerprints {
 public:
  explicit CallFingerprints(int ranks) : latest_(size_t(ranks)) {}

  struct Theirs {
    int rank;
    uint32_t op;
    FingerprintBytes fingerprint;
  };

  static bool before(uint32_t a, uint32_t b) { return int32_t(a - b) < 0; }

  /// Records the operation that begins here and its fingerprint. The last few are kept for peers that request them.
  void begin(uint32_t op, const FingerprintBytes& fingerprint) { own_[op % own_.size()] = {op, fingerprint}; }
  /// This rank's fingerprint of an operation, if it is one of the last ones.
  std::optional<FingerprintBytes> own(uint32_t op) const {
    const auto& [number, fingerprint] = own_[op % own_.size()];
    return number == op ? std::optional(fingerprint) : std::nullopt;
  }
  /// All operations before this one have ended here.
  void end_before(uint32_t op) { ended_ = op; }
  uint32_t ended() const { return ended_; }
  bool has_ended(uint32_t op) const { return before(op, ended_); }

  void note(uint32_t rank, uint32_t op) {
    if (before(latest_[rank], op)) latest_[rank] = op;
  }
  bool has_called(int rank, uint32_t op) const { return !before(latest_[size_t(rank)], op); }

  /// Records a fingerprint that differs from this rank's. Returns false if the operation already has one.
  bool note_clash(const Theirs& theirs) {
    if (clash_ && clash_->op == theirs.op) return false;
    clash_ = theirs;
    if (has_ended(theirs.op)) note_late(theirs);
    return true;
  }
  /// A rank whose fingerprint of this operation differs from this rank's, and its fingerprint.
  std::optional<Theirs> clash(uint32_t op) const { return clash_ && clash_->op == op ? clash_ : std::nullopt; }

  /// Records a fingerprint of an operation that has ended here; it may differ from this rank's. The first stays until
  /// taken.
  void note_late(const Theirs& theirs) {
    if (!late_) late_ = theirs;
  }
  std::optional<Theirs> take_late() { return std::exchange(late_, std::nullopt); }

 private:
  std::vector<uint32_t> latest_;  // by rank: the last operation that it is known to have called
  std::array<std::pair<uint32_t, FingerprintBytes>, 16> own_{};  // by op
  uint32_t ended_ = 0;
  std::optional<Theirs> clash_, late_;
};

}  // namespace nvx::net
