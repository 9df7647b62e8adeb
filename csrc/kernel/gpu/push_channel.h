#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.h"
#include "kernel/gpu/job.h"
#include "kernel/gpu/packs.h"

namespace nvx::kernel {

/// The assumptions of the protocol. Tests replace one at a time and expect a failure.
struct PushRules {
  static constexpr uint32_t kSlots = kBuffers;  ///< the buffers that exist
  static constexpr uint32_t kStampMask = ~uint32_t(0);
  static constexpr uint32_t kRestampEvery = kRestamp;
  static constexpr bool kCredits = true;  ///< chunks and packets wait until there is space for them
  static constexpr bool kMeets = true;    ///< a rank waits for greetings
  // For pieces that bypass staging:
  static constexpr bool kHearsFirst =
      true;  ///< nothing is written before its owner has announced, in this epoch, where
  static constexpr bool kReachIsTold = true;   ///< both ranks decide by the reach that was announced
  static constexpr bool kReachEnds = true;     ///< nothing beyond the announced reach is accessed
  static constexpr bool kReadersFirst = true;  ///< an input stays unchanged until its readers have read it
  static constexpr bool kTellsFailure = true;  ///< a failed rank reports it before its kernel ends
};

/// One block of a rank's end of a channel, used by all lanes of a tile together. Each lane has its own object.
///
/// Protocol:
///
///  1. Every operation is one epoch on every rank and block. In it each rank greets every other one, and may send
///  packets to it, in buffer epoch % kBuffers.
///
///  2. A rank writes to a peer's buffer only when that peer is done with epoch - kBuffers: either it has met the peer
///  in the epoch after that one, or the peer has signalled it in PeerCounters::done. A rank signals it after operations
///  in which not all ranks meet each other. `heard` and the counters change in some operations only. They are compared
///  modularly and must never fall half the range behind, so they are updated whenever packets are stamped anew.
///
///  3. Chunks from one rank to another use kChunks slots in the reader's memory, with an ever-growing number. The
///  reader returns each slot by a credit.
///
///  4. Ranks that meet compare their greetings. Ranks that do not meet compare digests of their earlier calls when they
///  read the counters of rule 2.
///
///  5. Acquire: after an await, all lanes of the tile see the awaited data. Release: a post or a release covers
///  everything that all lanes of the tile have done before it.
///
///  6. If a rank has mapped the part of a peer's pool that the operation uses, it writes directly to the peer's result,
///  or reads the peer's input directly, instead of using slots. Both ranks decide this alike, from their greetings of
///  this epoch alone. So a rank that writes has met the peer in this epoch, and the peer's memory is ready. The
///  counters advance as if slots were used. A rank whose input is read leaves only after its readers are done.
///
///  7. A rank that fails in such an operation tells the others before its kernel ends, because its tensors may be freed
///  then. Ranks that access those tensors check for this at every await; if the peer has failed, they go no further and
///  wait for their own end. So an input that was read is either valid or not used, and a result is written no longer
///  than until the next await.
template <class Exec, class Rules = PushRules>
class PushChannel {
 public:
  NVX_HD PushChannel(Exec& ex, const DeviceChannel& at)
      : ex_(ex), at_(at), pad_{at.shape}, state_{at.shape}, ranks_(at.shape.ranks), block_(uint32_t(ex.tile())) {}

  NVX_HD uint32_t rank() const { return at_.rank; }
  NVX_HD uint32_t ranks() const { return ranks_; }
  NVX_HD uint32_t others() const { return ranks_ - 1; }
  /// The i-th of the other ranks. Each rank begins after itself, so that not all ranks access the same pad at once.
  NVX_HD uint32_t other(uint32_t i) const { return (at_.rank + 1 + i) % ranks_; }
  NVX_HD uint32_t epoch() const { return epoch_; }
  NVX_HD uint32_t stamp32() const { return epoch_ & Rules::kStampMask; }
  NVX_HD const DeviceShape& shape() const { return at_.shape; }

  /// This block's share of a piece.
  NVX_HD Piece share(const Piece& piece) const { return Pieces::slice(piece, block_, at_.shape.blocks); }
  /// Chunk k of such a share; empty beyond its end.
  NVX_HD Piece chunk_of(const Piece& piece, size_t k) const {
    const size_t most = at_.shape.chunk_bytes, at = k * most;
    if (at >= piece.bytes) return Piece{};
    return Piece{piece.data + at, piece.bytes - at < most ? piece.bytes - at : most};
  }

  /// Begins the next epoch and greets every peer. On true, the buffers that this block writes are free on every rank.
  /// Writes nothing if the rank has failed or was aborted.
  NVX_NOINLINE bool enter(const Job& job, bool pairwise, PieceTable table) {
    const uint32_t abort = ex_.ask_host();  // both host reads are in flight while this rank's own memory is read
    const PoolView view = has_chunks(job.algorithm) ? view_of(uint32_t(ex_.lane())) : PoolView{};
    epoch_ = own().epoch + 1;
    history_ = own().history;
    bool ok = ex_.begin(epoch_, abort);
    for (uint32_t p = uint32_t(ex_.lane()); ok && p < ranks_; p += uint32_t(ex_.lanes()))
      ok = p == rank() || is_free(p);
    if (!ex_.all(ok)) return false;
    if (is_restamp_due()) {
      update_heard();
      restamp();
    }
    for (uint32_t i = uint32_t(ex_.lane()); i < ranks_ * kGreetingWords; i += uint32_t(ex_.lanes())) {
      const uint32_t p = i / kGreetingWords, word = i % kGreetingWords;
      if (p == rank()) continue;
      const uint64_t bytes = pairwise ? job.send.of(p, ranks_, table).bytes : 0;
      ex_.put_packet(greetings_to(p) + word, packet_of(my_word(job, word, bytes), stamp32()));
    }
    shares_ = has_chunks(job.algorithm);
    touches_ = false;
    if (shares_) send_places(job, table, view);
    return true;
  }

  /// Waits for the greetings of the peers in `whom` and compares them. Only pieces of peers that were met may bypass
  /// staging.
  template <class Whom>
  NVX_HD bool meet(const Job& job, bool pairwise, PieceTable table, Whom whom) {
    if (!Rules::kMeets) return true;
    const bool has_places = has_chunks(job.algorithm);
    const uint32_t words = kGreetingWords + (has_places ? kReachWords : 0);
    bool ok = true;
    for (uint32_t i = uint32_t(ex_.lane()); ok && i < ranks_ * words; i += uint32_t(ex_.lanes())) {
      const uint32_t p = i / words, word = i % words;
      if (p == rank() || !whom(p) || !Rules::kHearsFirst) continue;
      const uint64_t due = pairwise ? job.recv.of(p, ranks_, table).bytes : 0;
      uint64_t theirs = 0;
      ok = their_word(p, word, &theirs);
      if (ok && word != kFactorWord && word < kGreetingWords && theirs != my_word(job, word, due))
        ok = mismatch(job, p, due);
    }
    if (!ex_.all(ok)) return false;
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes())) {
      if (p == rank() || !whom(p)) continue;
      pipe(p).heard = epoch_;
      if (!has_places) continue;
      decide_direct(job, table, p);
      ok = ok && (!is_direct(p) || await_ready(p));
    }
    return !has_places || ex_.all(ok);
  }
  template <class Whom>
  NVX_HD bool meet(const Job& job, Whom whom) {
    return meet(job, /*pairwise=*/false, nullptr, whom);
  }
  NVX_HD bool has_met(uint32_t p) const { return pipe(p).heard == epoch_; }

  /// Acquire: waits until the host has raised a counter to `want`. Everything that the host wrote before is then
  /// visible to all lanes.
  NVX_HD bool await_host(const Stamp* counter, Stamp want) {
    bool ok = ex_.may_continue();
    if (ok && counter && ex_.lane() == 0) ok = ex_.wait_for(*counter, want, /*peer=*/-1);
    return ex_.all(ok);
  }

  /// Ends the epoch: this block reads none of its data any more. `all_met`: every rank has met every other one, so no
  /// signal is needed.
  NVX_NOINLINE void leave(const Job& job, bool all_met) {
    Hash hash;
    for (uint32_t word = 0; word < kFingerprintWords; ++word) hash.add(my_word(job, word, 0));
    const uint64_t history = hash.value();
    const uint32_t digest = uint32_t(history >> 32);
    ex_.sync();
    const bool tells = !all_met || is_restamp_due();
    for (uint32_t p = uint32_t(ex_.lane()); tells && p < ranks_; p += uint32_t(ex_.lanes())) {
      if (p != rank()) ex_.signal(counters_at(p).done, stamp(epoch_, digest));
    }
    if (ex_.lane() == 0) {
      own().history = history;
      own().digests[epoch_ % kDigests] = digest;
      own().epoch = epoch_;
    }
    ex_.sync();
  }

  /// All lanes call it after a failed operation: rule 7.
  NVX_NOINLINE void give_up() {
    if (!Rules::kTellsFailure || !shares_) return;
    for_each_peer([](uint32_t) { return true; },
                  [&](uint32_t p) { ex_.signal(counters_at(p).quit, stamp(epoch_, 1)); });
  }

  /// Ends a launch of `operations` operations. The host is told when all blocks have done so.
  NVX_HD void retire(uint32_t operations) {
    if (ex_.lane() == 0) ex_.end_block(epoch_, at_.by_replays ? operations : 0, at_.told, at_.tells);
  }

  // ---- packets

  /// Whether each block's share of a piece fits into the block's packets for one rank.
  NVX_HD bool packets_hold(const Piece& whole) const {
    return ceil_div(Pieces::fullest(whole, at_.shape.blocks), sizeof(Pack)) <= at_.shape.packs();
  }
  /// Whether a piece uses packets, in an operation in which each pair chooses between packets and chunks.
  NVX_HD bool is_in_packets(const Job& job, const Piece& whole) const {
    return job.algorithm == DeviceAlgorithm::kExchangePieces && packets_hold(whole);
  }
  /// The packets of this epoch: to write for `to`, and to read from `from`.
  NVX_HD Packet* packets_to(uint32_t to) const { return theirs<Packet>(to, DevicePad::of(Part::kPackets, slot())); }
  NVX_HD Packet* packets_from(uint32_t from) const { return mine<Packet>(from, DevicePad::of(Part::kPackets, slot())); }
  /// The packets of all ranks, this one's included.
  NVX_HD Sources packet_sources() const {
    return {cells(DevicePad::of(Part::kPackets, slot())), nullptr, stamp32(), nullptr, int(rank())};
  }
  NVX_HD Factors factors(const Job& job) const {
    return {job.factor, int(rank()), cells(DevicePad::of(Part::kGreetings, slot()))};
  }

  // ---- chunks

  /// The next chunk to write for `to`, and the next one to read from `from`.
  NVX_HD std::byte* chunk_to(uint32_t to) const {
    return theirs<std::byte>(to, Part::kStaging) + size_t(pipe(to).sent % kChunks) * at_.shape.chunk_bytes;
  }
  NVX_HD std::byte* chunk_from(uint32_t from) const {
    return mine<std::byte>(from, Part::kStaging) + size_t(pipe(from).taken % kChunks) * at_.shape.chunk_bytes;
  }
  /// The chunks of all ranks at offset `at` of the slice, this one's included, after the others' have been awaited. A
  /// chunk that cannot be read as packs in place is first copied to its slot.
  NVX_HD Sources chunk_sources(const Piece& own, size_t at) {
    Sources s{cells(Part::kStaging), &pipe(0), 0, own.data, int(rank())};
    if (!has_packs(own.data, own.bytes)) copy(ex_, chunk_from(rank()), own.data, own.bytes), s.own = chunk_from(rank());
    for (uint32_t i = 0; i < others(); ++i) {
      const uint32_t p = other(i);
      const std::byte* const in = pipe(p).in;
      if (in && !has_packs(in + at, own.bytes)) copy(ex_, chunk_from(p), in + at, own.bytes);
    }
    return s;
  }

  // ---- direct access, valid once the peer has been met

  /// Before the peer has been met: whether direct access to it may turn out to be possible.
  NVX_HD bool may_reach(uint32_t p) const { return pipe(p).granules != 0; }
  /// Whether this rank writes directly to the peer's result, and whether the peer writes directly to this rank's.
  NVX_HD bool writes_to(uint32_t p) const { return pipe(p).out != nullptr; }
  NVX_HD bool is_written_by(uint32_t p) const { return pipe(p).is_written != 0; }
  /// Whether the peer reads this rank's input directly.
  NVX_HD bool is_read_by(uint32_t p) const { return pipe(p).is_read != 0; }
  /// The destination for the peer's result from byte `at` on: the result itself, or the next chunk.
  NVX_HD std::byte* target(uint32_t p, size_t at) const { return pipe(p).out ? pipe(p).out + at : chunk_to(p); }
  /// Waits until the peers that read this rank's input directly have read it.
  NVX_HD bool await_readers() {
    return for_each([&](uint32_t p) { return is_read_by(p); },
                    [&](uint32_t p) {
                      return !Rules::kReadersFirst || ex_.wait_for(counters_from(p).credit, pipe(p).sent, int(p));
                    });
  }

  /// Waits until each peer in `whom` has space for a chunk.
  template <class Whom>
  NVX_HD bool await_room(Whom whom) {
    return for_each(whom, [&](uint32_t p) {
      return !Rules::kCredits || ex_.wait_for(counters_from(p).credit, pipe(p).sent + 1 - kChunks, int(p));
    });
  }
  /// Release: publishes the chunk that was written for the peers in `whom`.
  template <class Whom>
  NVX_HD void post(Whom whom) {
    ex_.sync();
    for_each_peer(whom, [&](uint32_t p) { ex_.signal(counters_at(p).posted, ++pipe(p).sent); });
  }
  /// Acquire: waits until a chunk has arrived from each peer in `whom`.
  template <class Whom>
  NVX_HD bool await_chunks(Whom whom) {
    return for_each(whom, [&](uint32_t p) { return ex_.wait_for(counters_from(p).posted, pipe(p).taken + 1, int(p)); });
  }
  /// Acquire: await_chunks() for a reduction of `bytes` bytes at offset `at` of this rank's slice. Records the address
  /// of each peer's chunk.
  NVX_HD bool await_sources(size_t at, size_t bytes) {
    const auto all = [](uint32_t) { return true; };
    return for_each(all, [&](uint32_t p) {
      PipeState& pipe = this->pipe(p);
      const bool in_place = pipe.in && has_packs(pipe.in + at, bytes);
      pipe.source = in_place ? pipe.in + at : chunk_from(p);
      return ex_.wait_for(counters_from(p).posted, pipe.taken + 1, int(p));
    });
  }
  /// Release: returns the slots of the chunks that were read, so that the peers in `whom` may write there again.
  template <class Whom>
  NVX_HD void release(Whom whom) {
    ex_.sync();
    for_each_peer(whom, [&](uint32_t p) { ex_.signal(counters_at(p).credit, ++pipe(p).taken); });
  }

 private:
  NVX_HD bool is_restamp_due() const { return epoch_ % Rules::kRestampEvery < kBuffers; }
  NVX_HD uint32_t slot() const { return epoch_ % Rules::kSlots; }

  NVX_HD const PeerPads* pads() const { return reinterpret_cast<const PeerPads*>(at_.state + DeviceState::pads()); }
  /// This rank's cell in a peer's pad, to write; and the peer's cell in this rank's pad, to read.
  template <class T>
  NVX_HD T* theirs(uint32_t peer, Part part) const {
    return reinterpret_cast<T*>(pads()[peer].theirs + pad_.offset(part, block_, rank()));
  }
  template <class T>
  NVX_HD T* mine(uint32_t peer, Part part) const {
    return reinterpret_cast<T*>(pads()[peer].mine + pad_.offset(part, block_, peer));
  }
  /// The cells of all ranks in this rank's pads.
  NVX_HD Cells cells(Part part) const { return {pads(), pad_.offset(part, block_, 0), pad_.cell(part)}; }

  NVX_HD Packet* greetings_to(uint32_t to) const { return theirs<Packet>(to, DevicePad::of(Part::kGreetings, slot())); }
  NVX_HD Packet* greetings_from(uint32_t from) const {
    return mine<Packet>(from, DevicePad::of(Part::kGreetings, slot()));
  }
  NVX_HD PeerCounters& counters_at(uint32_t to) const { return *theirs<PeerCounters>(to, Part::kCounters); }
  NVX_HD PeerCounters& counters_from(uint32_t from) const { return *mine<PeerCounters>(from, Part::kCounters); }
  NVX_HD BlockState& own() const {
    return *reinterpret_cast<BlockState*>(at_.state + state_.blocks() + block_ * sizeof(BlockState));
  }
  NVX_HD PipeState& pipe(uint32_t peer) const {
    return *reinterpret_cast<PipeState*>(at_.state + state_.pipe(block_, peer));
  }

  /// Whether this rank accesses a peer's tensors directly.
  NVX_HD bool is_direct(uint32_t p) const { return pipe(p).out || pipe(p).in; }

  /// Rule 7: true while the peer has not failed. If it has, waits until this rank ends too, and returns false.
  NVX_HD bool has_not_failed(uint32_t p) {
    if (!touches_ || !is_direct(p)) return true;
    PendingWait pending{int(p), stamp32(), 0};
    return ex_.wait(pending, [&] { return ex_.acquire(counters_from(p).quit) != stamp(epoch_, 1); });
  }

  /// One lane waits for each peer, and one checks for aborts. The tile combines their results.
  template <class Whom, class Wait>
  NVX_HD bool for_each(Whom whom, Wait wait) {
    bool ok = ex_.may_continue();
    for (uint32_t p = uint32_t(ex_.lane()); ok && p < ranks_; p += uint32_t(ex_.lanes())) {
      if (p != rank()) ok = (!whom(p) || wait(p)) && has_not_failed(p);
    }
    return ex_.all(ok);
  }
  template <class Whom, class Tell>
  NVX_HD void for_each_peer(Whom whom, Tell tell) {
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes())) {
      if (p != rank() && whom(p)) tell(p);
    }
  }

  /// Rule 2, and rule 4 for peers that were not met.
  NVX_NOINLINE bool is_free(uint32_t p) {
    if (!Rules::kCredits || int32_t(pipe(p).heard - (epoch_ - kBuffers + 1)) >= 0) return true;
    Stamp seen = 0;
    if (!ex_.wait_for(counters_from(p).done, stamp(epoch_ - kBuffers, 0), int(p), &seen)) return false;
    const uint32_t then = uint32_t(seen >> 32);
    const bool is_known = epoch_ - 1 - then < kDigests - 1;  // neither ahead of this rank nor forgotten
    if (!is_known || own().digests[then % kDigests] == uint32_t(seen)) return true;
    return ex_.fail(Verdict::mismatch(int(p), stamp(then, own().digests[then % kDigests]), seen));
  }

  NVX_HD uint64_t my_word(const Job& job, uint32_t word, uint64_t bytes) const {
    if (word == kHistoryWord) return history_;
    if (word == kFactorWord) return __builtin_bit_cast(uint64_t, job.factor);
    if (word == kBytesWord) return bytes;
    uint64_t value;
    __builtin_memcpy(&value, reinterpret_cast<const std::byte*>(&job.fingerprint) + word * sizeof value, sizeof value);
    // The algorithm is compared too, so that ranks that chose different algorithms do not wait for each other's data.
    // It takes the place of `form`: kernels run dense tensors only.
    return word == 0 ? value | uint64_t(uint8_t(job.algorithm) + 1) << (8 * offsetof(Fingerprint, form)) : value;
  }

  NVX_HD bool their_word(uint32_t p, uint32_t word, uint64_t* value) {
    const Packet* from = greetings_from(p) + word;
    PendingWait pending{int(p), stamp32(), 0};
    return ex_.wait(pending, [&] {
      const Packet packet = ex_.peek_packet(from);
      *value = data_of(packet);
      pending.seen = stamp_of(packet.halves[1]);
      return is_stamped(packet, stamp32());
    });
  }

  /// Fails with the complete greetings of both ranks. Always returns false.
  NVX_NOINLINE bool mismatch(const Job& job, uint32_t p, uint64_t due) {
    GreetingPair greetings;
    bool alike = true;
    for (uint32_t word = 0; word < kGreetingWords; ++word) {
      greetings.mine[word] = my_word(job, word, due);
      if (!their_word(p, word, &greetings.theirs[word])) return false;
      if (word < kFingerprintWords) alike = alike && greetings.mine[word] == greetings.theirs[word];
    }
    const auto cause = alike ? Verdict::Cause::kCounts : Verdict::Cause::kMismatch;
    const Verdict verdict{cause, Waited::kReached, int(p), stamp32(), stamp32(), due, greetings.theirs[kBytesWord]};
    return ex_.fail(verdict, &greetings);
  }

  // ---- places

  NVX_HD PoolView view_of(uint32_t p) const {
    return at_.pools && p < ranks_ ? ex_.ask_host(at_.pools[p]) : PoolView{};
  }

  /// The place of a peer's piece in this rank's pool, as sent in a greeting.
  NVX_HD uint64_t place_of(const Pieces& pieces, uint64_t first, uint32_t p, PieceTable table) const {
    if (first == 0) return 0;
    const Piece piece = pieces.of(p, ranks_, table);
    const uint64_t place = piece.bytes ? first + uint64_t(piece.data - pieces.base) : 0;
    return place < Reach::kPlaces ? place : 0;
  }
  NVX_HD uint64_t more_of(const Job& job, uint32_t p, PieceTable table) const {
    return is_reduction(job) ? place_of(job.send, job.send_place, p, table) : job.recv.of(p, ranks_, table).bytes;
  }
  NVX_HD static bool is_reduction(const Job& job) { return job.algorithm == DeviceAlgorithm::kReduceChunks; }

  /// Whether this rank meets the peer before it sends to it. With a root, pieces that fit the slots are sent without
  /// meeting the receiver, so only longer pieces may go directly.
  NVX_HD bool meets_first(const Job& job, PieceTable table, uint32_t p) const {
    if (is_reduction(job) || job.root < 0) return true;
    const Piece whole = job.send.of(p, ranks_, table);
    return !is_in_packets(job, whole) && share(whole).bytes > size_t(kChunks) * at_.shape.chunk_bytes;
  }

  /// Writes the last words of the greeting. `view` is that of this lane's first peer.
  NVX_NOINLINE void send_places(const Job& job, PieceTable table, PoolView view) {
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes()), view = view_of(p)) {
      if (p == rank()) continue;
      PipeState& pipe = this->pipe(p);
      pipe.pool = view.base;
      pipe.granules = view.base && meets_first(job, table, p) ? uint32_t(Reach::granules_of(view.mapped)) : 0;
      pipe.out = nullptr, pipe.in = nullptr, pipe.is_written = pipe.is_read = 0;
      const Reach reach{place_of(job.recv, job.recv_place, p, table), pipe.granules};
      const uint64_t more = more_of(job, p, table);
      ex_.put_packet(greetings_to(p) + kPlaceWord, packet_of(reach.word(), stamp32()));
      ex_.put_packet(greetings_to(p) + kMoreWord, packet_of(more, stamp32()));
      if (reach.place != 0 || (is_reduction(job) && more != 0)) ex_.signal(counters_at(p).ready, stamp(epoch_, 1));
    }
  }

  /// Acquire: waits until the peer signals that earlier uses of its tensors are complete. Packets order only
  /// themselves, so they do not imply it. Only a peer that has sent a place signals it, and it may be one operation
  /// ahead.
  NVX_HD bool await_ready(uint32_t p) {
    PendingWait pending{int(p), stamp32(), 0};
    return !Rules::kHearsFirst || ex_.wait(pending, [&] {
      const Stamp ready = pending.seen = ex_.acquire(counters_from(p).ready);
      return uint32_t(ready) != 0 && uint32_t(ready >> 32) - epoch_ < kBuffers;
    });
  }

  /// Rule 6: decides which pieces bypass staging between a peer and this rank, from both greetings.
  NVX_NOINLINE void decide_direct(const Job& job, PieceTable table, uint32_t p) {
    PipeState& pipe = this->pipe(p);
    const auto word = [&](uint32_t i) { return data_of(ex_.peek_packet(greetings_from(p) + i)); };
    const Reach theirs = Reach::of(word(kPlaceWord));
    const uint64_t more = word(kMoreWord);
    const auto length = [&](const Pieces& pieces, uint32_t of) {
      const Piece whole = pieces.of(of, ranks_, table);
      return is_in_packets(job, whole) ? 0 : whole.bytes;
    };
    const auto holds = [](uint64_t granules, uint64_t place, uint64_t bytes) {
      return Reach::holds(Rules::kReachEnds ? granules : Reach::kMostGranules, place, bytes);
    };
    const auto there = [&](uint64_t place, uint64_t bytes) {
      return share({reinterpret_cast<std::byte*>(pipe.pool) + (place - 1), bytes}).data;
    };
    const bool reduces = is_reduction(job);
    const uint64_t reach = Rules::kReachIsTold ? pipe.granules : Reach::granules_of(view_of(p).mapped);
    // In a reduction, this rank's slice is the part it reads of the peer's input and the part it writes of its result.
    const uint64_t bytes = length(job.send, reduces ? rank() : p);
    if (holds(reach, theirs.place, bytes) && (reduces || more == bytes)) pipe.out = there(theirs.place, bytes);
    if (reduces && holds(reach, more, bytes)) pipe.in = there(more, bytes);
    const uint64_t to = place_of(job.recv, job.recv_place, p, table);
    pipe.is_written = holds(theirs.granules, to, length(job.recv, p));
    pipe.is_read = reduces && holds(theirs.granules, more_of(job, p, table), length(job.send, p));
    touches_ = touches_ || is_direct(p);
    ex_.count_direct((pipe.out != nullptr) + (pipe.in != nullptr) + pipe.is_written + pipe.is_read);
  }

  /// This epoch was entered, so every peer is done with epoch - kBuffers. Record this, so that `heard` never falls half
  /// its range behind.
  NVX_HD void update_heard() {
    for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes())) {
      if (int32_t(pipe(p).heard - (epoch_ - kBuffers)) < 0) pipe(p).heard = epoch_ - kBuffers;
    }
  }

  /// Gives every packet that this block can write in this epoch a stamp for which its buffer never waits. Only some
  /// operations raise `ready`; this sets it to the previous epoch, which is over, so that it never wraps.
  NVX_NOINLINE void restamp() {
    const Packet stale = packet_of(0, (epoch_ - 1) & Rules::kStampMask);
    for_each_peer([](uint32_t) { return true; },
                  [&](uint32_t p) { ex_.signal(counters_at(p).ready, stamp(epoch_ - 1, 1)); });
    for (uint32_t p = 0; p < ranks_; ++p) {
      for (uint32_t j = uint32_t(ex_.lane()); j < kGreetingPackets; j += uint32_t(ex_.lanes())) {
        ex_.put_packet(greetings_to(p) + j, stale);
      }
      for (uint32_t j = uint32_t(ex_.lane()); j < at_.shape.packets; j += uint32_t(ex_.lanes())) {
        ex_.put_packet(packets_to(p) + j, stale);
      }
    }
    ex_.sync();
  }

  Exec& ex_;
  const DeviceChannel& at_;
  DevicePad pad_;
  DeviceState state_;
  uint32_t ranks_;
  uint32_t block_;
  uint32_t epoch_ = 0;
  uint64_t history_ = 0;
  bool shares_ = false;   // other ranks may access this rank's tensors in this operation
  bool touches_ = false;  // ... and this lane has a peer with direct access
};

}  // namespace nvx::kernel
