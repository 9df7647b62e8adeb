// Messages by a delegate, and the notes about them that their ranks exchange through the mailbox.

#include <algorithm>

#include "base/log.h"
#include "torch/device/delegate.h"

namespace nvx {
namespace {

std::string describe(const DelegatedMessages& batch) {
  const DelegatedMessage& first = batch.front();
  std::string text = std::string(first.receives ? "recv(" : "send(") + name(dtype_of(first.tensor)) + ", " +
                     std::to_string(first.tensor.numel()) + " elements, " + (first.receives ? "from" : "to") +
                     " rank " + std::to_string(first.peer) + ", tag " + std::to_string(first.tag) + ")";
  return batch.size() == 1 ? text : text + " and " + std::to_string(batch.size() - 1) + " more of its batch";
}

}  // namespace

class Delegate::Notes final : public HostPart {
  /// Carried by the mailbox, under the tag of the message that it stands for.
  struct Note : Message {
    struct Text {
      uint64_t magic;
      uint64_t number;  // of this rank's delegated messages in this direction of the pair
      uint64_t bytes;
      std::byte unused[24];
      bool operator==(const Text& other) const {
        return magic == other.magic && number == other.number && bytes == other.bytes;
      }
    };
    static_assert(sizeof(Text) >= kNoteBytes);
    static constexpr uint64_t kMagic = 0x6e76782d6e6f7465;  // "nvx-note"

    Text mine{}, theirs{};
  };

 public:
  explicit Notes(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  void add(const DelegatedMessage& message, uint64_t number) {
    const auto note = std::make_shared<Note>();
    const size_t bytes = message.tensor.nbytes();
    note->mine = {Note::kMagic, number, bytes, {}};
    note->peer = message.peer;
    note->tag = message.tag;
    note->dtype = dtype_of(message.tensor);
    note->data = reinterpret_cast<std::byte*>(message.receives ? &note->theirs : &note->mine);
    note->bytes = kNoteBytes;
    note->noted_bytes = bytes;
    note->timeout = message.timeout;
    note->may_block = [] { return false; };
    (message.receives ? received_ : sent_).push_back(note);
  }

  /// earlier: sends that still wait for their streams. A note stays behind those of its tag. `Mailbox::push()` moves
  /// the notes, later: it runs the user's hooks, and this runs with locks held. Throws Error.
  void post(PendingSends& earlier) {
    for (const auto& note : sent_) {
      if (!earlier.any_before(*note)) {
        group_->mailbox().post(note);
      } else if (!earlier.add(note, /*staging=*/nullptr)) {
        throw Error(Code::kSystem, "nvx: no thread could be started for a message");
      }
    }
    for (const auto& note : received_) group_->mailbox().expect(note);
  }

  bool is_over() const override {
    const auto done = [](const std::shared_ptr<Note>& note) { return note->done(); };
    return std::all_of(sent_.begin(), sent_.end(), done) && std::all_of(received_.begin(), received_.end(), done);
  }

  Status outcome() const override {
    for (const auto& note : sent_) NVX_TRY(note->status());
    for (const auto& note : received_) {
      NVX_TRY(note->status());
      if (!(note->mine == note->theirs)) return mismatch(*note);
    }
    return {};
  }

 private:
  Status mismatch(const Note& note) const {
    const Topology& topology = group_->topology();
    const auto side = [](const char* verb, const Note::Text& text) {
      return verb + std::to_string(text.bytes) + " bytes as message " + std::to_string(text.number);
    };
    return Status(Failure{
        .code = Code::kMismatch,
        .cause = "send/recv mismatch in group " + group_->name() + ": " + topology.describe(note.peer) +
                 side(" sends ", note.theirs) + " of this pair that NVX_DELEGATE gives to NCCL, " +
                 topology.describe(group_->rank()) + side(" receives ", note.mine) + " (tag " +
                 std::to_string(note.tag) + ")",
        .context = "this is " + topology.describe(group_->rank()),
        .advice = "NCCL matches messages of a pair by their order: call them in one order on both ranks, or in one "
                  "batch_isend_irecv, where nvx sorts them by tag"});
  }

  const std::shared_ptr<Group> group_;
  std::vector<std::shared_ptr<Note>> sent_, received_;
};

Status Delegate::begin(DelegatedMessages batch, PendingSends& earlier, const c10::Stream& stream) {
  NVX_TRY(ready());
  std::stable_sort(batch.begin(), batch.end(),
                   [](const DelegatedMessage& a, const DelegatedMessage& b) { return a.tag < b.tag; });
  const auto notes = std::make_shared<Notes>(group_);
  const auto flight = std::make_shared<Flight>(stream.device_type());
  {
    MutexLock lock(mutex_);
    sent_.resize(size_t(group_->size()));
    received_.resize(size_t(group_->size()));
    for (const DelegatedMessage& p : batch) notes->add(p, ++(p.receives ? received_ : sent_)[size_t(p.peer)]);
  }
  flight->host_part = notes;
  flight->timeout = batch.front().timeout;
  flight->what = describe(batch);
  NVX_LOG(kTrace, "group %s rank %d %s on %s: delegated to %s (NVX_DELEGATE)", group_->name().c_str(), group_->rank(),
          flight->what.c_str(), device_.str().c_str(), backend_->getBackendName().c_str());
  return begin(flight, stream, [&] {
    notes->post(earlier);
    call_delegate(*backend_, batch);
  });
}

}  // namespace nvx
