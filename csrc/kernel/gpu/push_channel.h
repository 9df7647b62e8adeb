#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.h"
#include "kernel/gpu/channel_memory.h"

namespace nvx::kernel {

/// The operations that a kernel is compiled for. Any: every algorithm, type, operator and root, distinguished at run
/// time.
struct AnyOperation {
  static constexpr bool kHot = false, kGathers = false;
  static constexpr bool kCompletes = true;  ///< a launch may have a completion counter
  NVX_HD static bool has_chunks(const Job& job) { return kernel::has_chunks(job.algorithm); }
  NVX_HD static bool has_pieces(const Job& job) { return job.algorithm == DeviceAlgorithm::kExchangePieces; }
  NVX_HD static bool reduces(const Job& job) { return kernel::reduces(job.algorithm); }
  NVX_HD static int32_t root(const Job& job) { return job.root; }
};

/// One algorithm in a kernel of its own, for collectives without a root. T: reductions of this type, sums or averages.
template <DeviceAlgorithm kAlgorithm, class T = void>
struct HotOperation {
  using Element = T;
  static constexpr bool kHot = true, kCompletes = false;
  static constexpr bool kHasChunks = kernel::has_chunks(kAlgorithm);
  static constexpr bool kGathers = kernel::reduces(kAlgorithm) && !kHasChunks;  ///< packs, in shared memory
  NVX_HD static constexpr bool has_chunks(const Job&) { return kHasChunks; }
  NVX_HD static constexpr bool has_pieces(const Job&) { return kAlgorithm == DeviceAlgorithm::kExchangePieces; }
  NVX_HD static constexpr bool reduces(const Job&) { return kernel::reduces(kAlgorithm); }
  NVX_HD static constexpr int32_t root(const Job&) { return -1; }
};

struct NothingToReceive {
  NVX_HD bool operator()() const { return true; }
};

/// The assumptions of the protocol. Tests replace one at a time and expect a failure.
struct PushRules {
  static constexpr uint32_t kSlots = kBuffers;  ///< the buffers that exist
  static constexpr uint32_t kStampMask = ~uint32_t(0);
  static constexpr uint32_t kRestampEvery = kRestamp;
  static constexpr bool kCredits = true;  ///< chunks and packets wait until there is space for them
  static constexpr bool kMeets = true;    ///< a rank waits for arrivals
  // For pieces that bypass staging:
  /// Nothing is written before its owner has announced, in this epoch, where.
  static constexpr bool kAnnouncedFirst = true;
  static constexpr bool kReachIsAnnounced = true;  ///< both ranks decide by the reach that was announced
  static constexpr bool kReachEnds = true;         ///< nothing beyond the announced reach is accessed
  static constexpr bool kReadersFirst = true;      ///< an input stays unchanged until its readers have read it
  static constexpr bool kReportsFailure = true;    ///< a failed rank reports it before its kernel ends
};

/// One block of a rank's end of a channel, used by all lanes of a tile together. Each lane has its own object.
///
/// Protocol:
///
///  1. Every operation is one epoch on every rank and block. In it each rank sends its arrival to every other one, and
///  may send further packets to it, in buffer epoch % kBuffers.
///
///  2. A rank writes to a peer's buffer only when that peer is done with epoch - kBuffers: either it has met the peer
///  in the epoch after that one, or the peer has signalled it in PeerCounters::done. A rank signals it after operations
///  in which not all ranks meet each other. `last_met` and the counters change in some operations only. They are
///  compared modularly and must never fall half the range behind, so they are updated whenever packets are restamped.
///
///  3. Chunks from one rank to another use kChunks slots in the reader's memory, with an ever-growing number. The
///  reader returns each slot by a credit.
///
///  4. Ranks that meet compare their arrivals. Ranks that do not meet compare digests of their earlier calls when they
///  read the counters of rule 2.
///
///  5. Acquire: after an await, all lanes of the tile see the awaited data. Release: a publish covers everything that
///  all lanes of the tile have done before it. It ends a round: the barrier of the tile orders the lanes' reads and
///  writes before the fence of the lanes that signal, and the fence orders them before the relaxed stores of `posted`
///  and `credit` behind it, for the lanes that acquire these. So one fence serves the data's flags and the credits of
///  all peers. A store may be relaxed where a fence of the same lane precedes it and no data comes between them.
///
///  6. If a rank has mapped the part of a peer's pool that the operation uses, it writes directly to the peer's result,
///  or reads the peer's input directly, instead of using slots. Both ranks decide this alike, from their arrivals of
///  this epoch alone. So a rank that writes has met the peer in this epoch, and the peer's memory is ready. The
///  counters advance as if slots were used. A rank whose input is read leaves only after its readers are done.
///
///  7. A rank that fails in such an operation notifies the others before its kernel ends, because its tensors may be
///  freed then. Ranks that access those tensors check for this at every await and publish, behind a barrier of the
///  tile: no lane accesses a tensor between that barrier and the end of the checks. If the peer has failed, they go no
///  further and wait for their own end. So an input that was read is either valid or not used, and a result is written
///  no longer than until the next check. The former rests on more than the memory model: tests/model/README.md.
template <class Exec, class Rules = PushRules, class Kind = AnyOperation>
class PushChannel : public ChannelMemory {
 public:
  NVX_HD PushChannel(Exec& ex, const DeviceChannel& at, Peer* peers)
      : ChannelMemory(at, peers, uint32_t(ex.tile()), Rules::kSlots, Rules::kStampMask), ex_(ex) {}

  /// Begins the next epoch and sends this rank's arrival to every peer. On true, the buffers that this block writes are
  /// free on every rank. Writes nothing if the rank has failed: an abort of the host sets that by a copy. Only general
  /// kernels also read the host's abort word here, as a root of theirs may never wait; the read crosses the bus.
  NVX_HD bool enter(const Job& job, PieceTable table) {
    const uint32_t abort = Kind::kHot ? 0 : ex_.load_abort();
    const PoolView view = Kind::has_chunks(job) ? view_of(uint32_t(ex_.lane())) : PoolView{};
    epoch_ = own().epoch + 1;
    history_ = own().history;
    is_exposed_ = has_direct_ = false;
    bool ok = ex_.begin(epoch_) && ex_.not_aborted(abort);
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes())) {
      describe(job, table, p);
      ok = ok && (p == rank() || is_free(p));
    }
    if (!ex_.all(ok)) return false;
    if (is_restamp_due()) restamp(ex_, *this, stamp(epoch_ - 1, 1));
    NVX_NO_UNROLL
    for (uint32_t i = from_last(); i < ranks_ * kArrivalPackets; i += uint32_t(ex_.lanes())) {
      const uint32_t p = i / kArrivalPackets, word = i % kArrivalPackets;
      if (p == rank() || word >= kArrivalWords) continue;
      const uint64_t bytes = is_pairwise(job) ? peers_[p].due_to : 0;
      ex_.put_packet(arrivals_to(p) + word, packet_of(word_of(job, history_, word, bytes), stamp32()));
    }
    is_exposed_ = Kind::has_chunks(job);
    if (Kind::has_chunks(job)) send_places(job, view);
    if (ex_.lane() == ex_.lanes() / 2) remember(job);
    return true;
  }

  /// Whether an operation has data for a peer, or from it. Packets of a reduction go to this rank itself too.
  NVX_HD bool sends_to(const Job& job, uint32_t p) const {
    const int32_t root = Kind::root(job);
    if (Kind::reduces(job)) return root < 0 || uint32_t(root) == p;
    return p != rank() && (root < 0 || uint32_t(root) == (is_gather(job) ? p : rank()));
  }
  NVX_HD bool receives_from(const Job& job, uint32_t p) const {
    const int32_t root = Kind::root(job);
    return Kind::reduces(job) || root < 0 || uint32_t(root) == (is_gather(job) ? rank() : p);
  }

  /// Waits for the arrivals of the peers from which this rank receives, or which it must meet before it sends to them,
  /// and compares them. Only pieces of peers that were met may bypass staging. `receive`: receives data that come with
  /// the arrivals, before the barrier that ends the wait; tensors may be written only behind it. Its result is the
  /// lane's alone.
  template <class Receive = NothingToReceive>
  NVX_HD bool meet(const Job& job, Receive receive = Receive()) {
    return part<Kind::kHot>([&] {
      bool ok = true;
      const auto meets = [&](uint32_t p) { return receives_from(job, p) || (sends_to(job, p) && meets_first(job, p)); };
      const bool has_places = Kind::has_chunks(job);
      const uint32_t words = kArrivalWords + (has_places ? kReachWords : 0);
      NVX_NO_UNROLL
      for (uint32_t i = from_last(); Rules::kMeets && ok && i < ranks_ * kArrivalPackets; i += uint32_t(ex_.lanes())) {
        const uint32_t p = i / kArrivalPackets, word = i % kArrivalPackets;
        if (p == rank() || word >= words || !meets(p) || !Rules::kAnnouncedFirst) continue;
        const uint64_t due = is_pairwise(job) ? peers_[p].due_from : 0;
        uint64_t theirs = 0;
        ok = await_word(ex_, arrivals_from(p) + word, int(p), stamp32(), &theirs);
        if (ok && word != kFactorWord && word < kArrivalWords && theirs != word_of(job, history_, word, due))
          ok = mismatch(ex_, job, history_, arrivals_from(p), int(p), stamp32(), due);
      }
      ok = ok && receive();
      if (!ex_.all(ok)) return false;
      if (!Rules::kMeets) return true;
      NVX_NO_UNROLL
      for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes())) {
        if (p == rank() || !meets(p)) continue;
        pipe(p).last_met = epoch_;
        if (!has_places) continue;
        decide_direct(job, p);
        ok = ok && (!is_direct(p) || await_ready(p));
      }
      if (!has_places) return true;
      has_direct_ = !ex_.all(!has_direct_);
      return ex_.all(ok);
    });
  }

  /// Acquire: waits until the host has raised a counter to `want`. Everything that the host wrote before is then
  /// visible to all lanes.
  NVX_HD bool await_host(const Stamp* counter, Stamp want) {
    bool ok = ex_.may_continue();
    if (ok && counter && ex_.lane() == 0) ok = ex_.wait_for(*counter, want, /*peer=*/-1);
    return ex_.all(ok);
  }

  /// Ends the epoch: this block reads none of its data any more. `all_met`: every rank has met every other one, so no
  /// signal is needed. Unlike give_up(), it does not load the dead ranks from the host: a host that has seen one
  /// also aborts the group, and a kernel that waits notices that within 2 ms. The load would take a read over the bus
  /// in each operation with a root, and cover only that time, not the one until the host notices a death. With legacy
  /// IPC the same holds for a rank that has left and ended.
  NVX_HD void leave(const Job& job, bool all_met) {
    if (!Kind::kHot) ex_.sync();  // hot operations end with a barrier, and read no packets behind it
    if (!all_met || is_restamp_due())
      signal_peers(ex_, *this, &PeerCounters::done, stamp(epoch_, own().digests[epoch_ % kDigests]));
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(ex_.lane()); Kind::has_chunks(job) && p < ranks_; p += uint32_t(ex_.lanes()))
      pipe(p).sent = peers_[p].sent, pipe(p).taken = peers_[p].taken;
    if (!Kind::kHot) ex_.sync();  // another operation may follow in this launch
  }

  /// All lanes call it after a failed operation: rule 7. Does not write to dead ranks: memory that was shared by legacy
  /// IPC ends with its owner, and a store to it would fail this process's context.
  NVX_HD void give_up() {
    if (Rules::kReportsFailure && is_exposed_)
      signal_peers(ex_, *this, &PeerCounters::quit, stamp(epoch_, 1), at_.control->dead);
  }

  /// Ends a launch of `operations` operations.
  NVX_HD void retire(uint32_t operations) {
    if (ex_.lane() != 0) return;
    if (at_.by_replays) own().replayed += operations;
    ex_.end_block({epoch_, own().replayed}, /*counts_direct=*/!Kind::kHot || is_exposed_);
    if (Kind::kCompletes) ex_.complete(at_.completion, at_.completion_value);
  }

  // ---- chunks

  /// Begins a round: one lane describes each rank's part with `plan`, and waits until the peer has space for what this
  /// rank will post and has posted what it will take. Acquire.
  template <class Plan>
  NVX_HD bool await(Plan plan) {
    bool ok = ex_.may_continue();
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(ex_.lane()); ok && p < ranks_; p += uint32_t(ex_.lanes())) {
      Peer& peer = peers_[p];
      peer.posts = peer.takes = 0;
      plan(p, peer);
      if (p == rank()) continue;
      if (Rules::kCredits && peer.posts != 0)
        ok = ex_.wait_for(counters_from(p).credit, peer.sent + peer.posts - kChunks, int(p));
      if (ok && peer.takes != 0) ok = ex_.wait_for(counters_from(p).posted, peer.taken + peer.takes, int(p));
    }
    return ex_.all(ok) && none_has_failed();
  }
  /// Ends a round: publishes the chunks that were written, and returns the slots of those that were read, if the inputs
  /// that were read in place are still valid. `ok`: whether this lane has been successful. Release.
  NVX_HD bool publish(bool ok) {
    // Computed here, so that no read comes between the fence and the flags.
    const auto at = [own = at_.offset(Part::kCounters, block_, rank())](Peer& peer) -> PeerCounters& {
      return *reinterpret_cast<PeerCounters*>(peer.theirs + own);
    };
    if (!ex_.all(ok) || !none_has_failed()) return false;
    if (uint32_t(ex_.lane()) < ranks_) ex_.fence();
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes())) {
      Peer& peer = peers()[p];
      if (peer.posts != 0) ex_.signal_behind(at(peer).posted, peer.sent += peer.posts);
      if (peer.takes != 0) ex_.signal_behind(at(peer).credit, peer.taken += peer.takes);
    }
    return true;
  }
  /// Waits until the peers that read this rank's input directly have read it.
  NVX_HD bool await_readers() {
    bool ok = ex_.may_continue();
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(ex_.lane()); ok && p < ranks_; p += uint32_t(ex_.lanes())) {
      if (p == rank()) continue;
      if (peers_[p].is_read && Rules::kReadersFirst) ok = ex_.wait_for(counters_from(p).credit, peers_[p].sent, int(p));
      ok = ok && has_not_failed(p);
    }
    return ex_.all(ok);
  }

 private:
  using Lane = typename Exec::Lane;

  /// This lane's number, counted from the last. Arrivals belong to the last lanes, as data belong to the first.
  NVX_HD uint32_t from_last() const { return uint32_t(ex_.lanes() - 1 - ex_.lane()); }

  /// Adds this call to the history. One lane does so while the others wait: this operation reads the digest behind a
  /// barrier, and the next one the rest behind the end of this one.
  NVX_HD void remember(const Job& job) {
    Hash hash;
    for (uint32_t word = 0; word < kFingerprintWords; ++word) hash.add(word_of(job, history_, word, 0));
    own().history = hash.value();
    own().digests[epoch_ % kDigests] = uint32_t(hash.value() >> 32);
    own().epoch = epoch_;
  }

  NVX_HD bool is_restamp_due() const { return epoch_ % Rules::kRestampEvery < kBuffers; }
  NVX_HD static bool is_gather(const Job& job) { return job.fingerprint.collective == Collective::kGather; }
  /// Whether lengths are compared pair by pair. For all-gather and broadcast the fingerprint contains them.
  NVX_HD static bool is_pairwise(const Job& job) {
    const Collective collective = job.fingerprint.collective;
    return !Kind::reduces(job) &&
           (collective == Collective::kAllToAll || is_gather(job) || collective == Collective::kScatter);
  }

  /// Whether this rank accesses a peer's tensors directly.
  NVX_HD bool is_direct(uint32_t p) const { return peers_[p].out || peers_[p].in; }

  /// Rule 7: whether no peer whose tensors are accessed has failed. All lanes call it behind a barrier.
  NVX_HD bool none_has_failed() {
    return part<Kind::kHot>([&] {
      if (!has_direct_) return true;
      bool ok = true;
      NVX_NO_UNROLL
      for (uint32_t p = uint32_t(ex_.lane()); ok && p < ranks_; p += uint32_t(ex_.lanes()))
        ok = p == rank() || has_not_failed(p);
      return ex_.all(ok);
    });
  }

  /// True while the peer has not failed. If it has, waits until this rank ends too, and returns false.
  NVX_HD bool has_not_failed(uint32_t p) {
    if (!has_direct_ || !is_direct(p)) return true;
    PendingWait pending{int(p), stamp32(), 0};
    return ex_.wait(pending, [&] { return ex_.acquire(counters_from(p).quit) != stamp(epoch_, 1); });
  }

  /// Sets this block's counter at every peer, but for those in `dead`, in host memory.
  NVX_COLD static void signal_peers(Lane lane, ChannelMemory memory, Stamp PeerCounters::*counter, Stamp value,
                                    const Stamp* dead = nullptr) {
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(lane.lane()); p < memory.ranks(); p += uint32_t(lane.lanes())) {
      const bool skips = p == memory.rank() || (dead && lane.acquire(dead[p / 64]) >> p % 64 & 1);
      if (!skips) lane.signal(memory.counters_at(p).*counter, value);
    }
  }

  /// Fills a rank's state with the facts from the operation's arguments and this rank's memory.
  NVX_HD void describe(const Job& job, PieceTable table, uint32_t p) {
    const auto& pads = reinterpret_cast<const PeerPads*>(at_.state + DeviceState::pads())[p];
    const Piece to = job.send.of(p, at_.by_ranks, table), from = job.recv.of(p, at_.by_ranks, table);
    Peer& peer = peers_[p];
    peer.theirs = pads.theirs, peer.mine = pads.mine;
    peer.send = share(to), peer.recv = share(from);
    peer.due_to = to.bytes, peer.due_from = from.bytes;
    peer.packs_to = packs_of(job, to, peer.send), peer.packs_from = packs_of(job, from, peer.recv);
    if (!Kind::has_chunks(job)) return;
    peer.sent = pipe(p).sent, peer.taken = pipe(p).taken;
    peer.granules = peer.is_written = peer.is_read = 0;
    peer.out = nullptr, peer.in = nullptr;
    peer.place_to = place_of(job.send, job.send_place, to), peer.place_from = place_of(job.recv, job.recv_place, from);
  }
  /// The packs of a share that are sent in packets. If each pair chooses between packets and chunks, the choice is
  /// made for the piece as a whole, so for all blocks alike.
  NVX_HD uint32_t packs_of(const Job& job, const Piece& whole, const Piece& share) const {
    const auto packs = [](const Piece& piece) { return ceil_div(piece.bytes, sizeof(Pack)); };
    if (!Kind::has_chunks(job)) return uint32_t(packs(share));
    if (!Kind::has_pieces(job)) return 0;
    return packs(Pieces::slice(whole, 0, at_.by_blocks)) <= at_.shape.packs() ? uint32_t(packs(share)) : 0;
  }

  /// Rule 2, and rule 4 for peers that were not met.
  NVX_HD bool is_free(uint32_t p) {
    if (!Rules::kCredits || int32_t(pipe(p).last_met - (epoch_ - kBuffers + 1)) >= 0) return true;
    Stamp seen = 0;
    if (!ex_.wait_for(counters_from(p).done, stamp(epoch_ - kBuffers, 0), int(p), &seen)) return false;
    const uint32_t then = uint32_t(seen >> 32);
    const bool is_known = epoch_ - 1 - then < kDigests - 1;  // neither ahead of this rank nor forgotten
    if (!is_known || own().digests[then % kDigests] == uint32_t(seen)) return true;
    return ex_.fail(Verdict::mismatch(int(p), stamp(then, own().digests[then % kDigests]), seen));
  }

  NVX_HD static uint64_t word_of(const Job& job, uint64_t history, uint32_t word, uint64_t bytes) {
    if (word == kHistoryWord) return history;
    if (word == kFactorWord) return __builtin_bit_cast(uint64_t, job.factor);
    if (word == kBytesWord) return bytes;
    uint64_t value;
    __builtin_memcpy(&value, reinterpret_cast<const std::byte*>(&job.fingerprint) + word * sizeof value, sizeof value);
    // The algorithm is compared too, so that ranks that chose different algorithms do not wait for each other's data.
    // It takes the place of `form`: kernels run dense tensors only.
    return word == 0 ? value | uint64_t(uint8_t(job.algorithm) + 1) << (8 * offsetof(Fingerprint, form)) : value;
  }

  NVX_HD static bool await_word(Exec& ex, const Packet* from, int p, uint32_t stamp, uint64_t* value) {
    PendingWait pending{p, stamp, 0};
    return ex.wait(pending, [&] {
      const Packet packet = ex.peek_packet(from);
      *value = data_of(packet);
      pending.seen = stamp_of(packet.halves[1]);
      return is_stamped(packet, stamp);
    });
  }

  /// Fails with the complete arrivals of both ranks. Always returns false.
  NVX_COLD static bool mismatch(Exec ex, const Job& job, uint64_t history, const Packet* from, int p, uint32_t stamp,
                                uint64_t due) {
    ArrivalPair arrivals;
    bool alike = true;
    NVX_NO_UNROLL
    for (uint32_t word = 0; word < kArrivalWords; ++word) {
      arrivals.mine[word] = word_of(job, history, word, due);
      if (!await_word(ex, from + word, p, stamp, &arrivals.theirs[word])) return false;
      if (word < kFingerprintWords) alike = alike && arrivals.mine[word] == arrivals.theirs[word];
    }
    const auto cause = alike ? Verdict::Cause::kCounts : Verdict::Cause::kMismatch;
    const Verdict verdict{cause, Waited::kReached, p, stamp, stamp, due, arrivals.theirs[kBytesWord]};
    return ex.fail(verdict, &arrivals);
  }

  // ---- places

  NVX_HD PoolView view_of(uint32_t p) const { return at_.pools && p < ranks_ ? ex_.read(at_.pools[p]) : PoolView{}; }

  /// The place of a piece in this rank's pool, as sent in an arrival.
  NVX_HD static uint64_t place_of(const Pieces& pieces, uint64_t first, const Piece& piece) {
    const uint64_t place = first != 0 && piece.bytes ? first + uint64_t(piece.data - pieces.base) : 0;
    return place < Reach::kPlaces ? place : 0;
  }
  NVX_HD uint64_t more_of(const Job& job, uint32_t p) const {
    return Kind::reduces(job) ? peers_[p].place_to : peers_[p].due_from;
  }

  /// Whether this rank meets the peer before it sends to it. With a root, pieces that fit the slots are sent without
  /// meeting the receiver, so only longer pieces may go directly. These wait for the receiver in any case: one that has
  /// called another operation would never make space.
  NVX_HD bool meets_first(const Job& job, uint32_t p) const {
    if (Kind::reduces(job) || Kind::root(job) < 0) return true;
    return peers_[p].packs_to == 0 && peers_[p].send.bytes > size_t(kChunks) * at_.shape.chunk_bytes;
  }

  /// Writes the last words of the arrival. `view` is that of this lane's first peer.
  NVX_HD void send_places(const Job& job, PoolView view) {
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes()), view = view_of(p)) {
      if (p == rank()) continue;
      Peer& peer = peers_[p];
      peer.pool = view.base;
      peer.granules = view.base && meets_first(job, p) ? uint32_t(Reach::granules_of(view.mapped)) : 0;
      const Reach reach{peer.place_from, peer.granules};
      const uint64_t more = more_of(job, p);
      ex_.put_packet(arrivals_to(p) + kPlaceWord, packet_of(reach.word(), stamp32()));
      ex_.put_packet(arrivals_to(p) + kMoreWord, packet_of(more, stamp32()));
      if (reach.place != 0 || (Kind::reduces(job) && more != 0)) ex_.signal(counters_at(p).ready, stamp(epoch_, 1));
    }
  }

  /// Acquire: waits until the peer signals that earlier uses of its tensors are complete. Packets order only
  /// themselves, so they do not imply it. Only a peer that has sent a place signals it, and it may be one operation
  /// ahead.
  NVX_HD bool await_ready(uint32_t p) {
    PendingWait pending{int(p), stamp32(), 0};
    return !Rules::kAnnouncedFirst || ex_.wait(pending, [&] {
      const Stamp ready = pending.seen = ex_.acquire(counters_from(p).ready);
      return uint32_t(ready) != 0 && uint32_t(ready >> 32) - epoch_ < kBuffers;
    });
  }

  /// Rule 6: decides which pieces bypass staging between a peer and this rank, from both arrivals.
  NVX_HD void decide_direct(const Job& job, uint32_t p) {
    Peer& peer = peers_[p];
    const bool reduces = Kind::reduces(job);
    const auto word = [&](uint32_t i) { return data_of(ex_.peek_packet(arrivals_from(p) + i)); };
    const Reach theirs = Reach::of(word(kPlaceWord));
    const uint64_t more = word(kMoreWord);
    // Reductions access others' tensors at aligned addresses only, and read inputs only as whole packs.
    const uint64_t width = reduces ? sizeof(Pack) : 1;
    const auto holds = [&](uint64_t granules, uint64_t place, uint64_t bytes) {
      return (place - 1) % width == 0 &&
             Reach::holds(Rules::kReachEnds ? granules : Reach::kMostGranules, place, bytes);
    };
    const auto there = [&](uint64_t place, uint64_t bytes) {
      return share({reinterpret_cast<std::byte*>(peer.pool) + (place - 1), bytes}).data;
    };
    const uint64_t reach = Rules::kReachIsAnnounced ? peer.granules : Reach::granules_of(view_of(p).mapped);
    // In a reduction, this rank's slice is the part it reads of the peer's input and the part it writes of its result.
    const uint64_t bytes = reduces ? me().due_to : peer.packs_to != 0 ? 0 : peer.due_to;
    const uint64_t due = peer.packs_from != 0 ? 0 : peer.due_from;
    if (holds(reach, theirs.place, bytes) && (reduces || more == bytes)) peer.out = there(theirs.place, bytes);
    if (reduces && bytes % sizeof(Pack) == 0 && holds(reach, more, bytes)) peer.in = there(more, bytes);
    peer.is_written = holds(theirs.granules, peer.place_from, due);
    const uint64_t read = reduces ? more_of(job, p) : 0;
    peer.is_read = reduces && peer.due_to % sizeof(Pack) == 0 && holds(theirs.granules, read, peer.due_to);
    has_direct_ = has_direct_ || is_direct(p);
    ex_.count_direct((peer.out != nullptr) + (peer.in != nullptr) + peer.is_written + peer.is_read);
  }

  /// Only some operations raise `ready`; this sets it to the previous epoch, which is over, so that it never wraps.
  NVX_COLD static void restamp(Lane lane, ChannelMemory memory, Stamp ready) {
    signal_peers(lane, memory, &PeerCounters::ready, ready);
    memory.restamp(lane);
    lane.sync();
  }

  Exec& ex_;
  uint64_t history_ = 0;
  bool is_exposed_ = false;  // other ranks may access this rank's tensors in this operation
  bool has_direct_ = false;  // ... and this block has a peer with direct access; all lanes agree after meet()
};

}  // namespace nvx::kernel
