#include "gpu/rank.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>

#include "base/error.h"
#include "gpu/parts.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/device_arena.h"

namespace nvx::gpu {
namespace {

constexpr uint64_t kThisHost = 1;  // all ranks are on one host

double ms_since(Clock::time_point* then) {
  const auto now = Clock::now();
  return std::chrono::duration<double, std::milli>(now - std::exchange(*then, now)).count();
}

/// A member's description of its device, reduced to one kind of memory to share.
class OneKind : public Bootstrap {
 public:
  OneKind(Bootstrap& bootstrap, std::optional<ShareKind> kind) : bootstrap_(bootstrap), kind_(kind) {}
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override {
    DeviceInfo info;
    if (!kind_ || mine.size() != sizeof info) return bootstrap_.all_gather(mine);
    std::memcpy(&info, mine.data(), sizeof info);
    if (info.magic != DeviceInfo::kMagic) return bootstrap_.all_gather(mine);
    for (const KindWord& one : kKindWords) {
      if (one.kind == *kind_ || !(info.kinds >> int(one.kind) & 1)) continue;
      info.kinds &= ~(1u << int(one.kind));
      std::snprintf(info.why_not[int(one.kind)], sizeof info.why_not[0], "left out by --kind");
    }
    return bootstrap_.all_gather(std::as_bytes(std::span(&info, 1)));
  }
  void give_up(const Failure& why) override { bootstrap_.give_up(why); }

 private:
  Bootstrap& bootstrap_;
  const std::optional<ShareKind> kind_;
};

std::byte* as_pointer(DevicePtr at) { return reinterpret_cast<std::byte*>(at); }

}  // namespace

std::optional<ShareKind> kind_of(const std::string& word) {
  if (word.empty()) return std::nullopt;
  for (const KindWord& one : kKindWords) {
    if (word == one.word) return one.kind;
  }
  throw Error(Code::kInvalid, "nvx: there is no kind of memory called " + word);
}

Rank::Rank(Member& member, const ChannelShape& shape, const Place& place, StartTimes* times)
    : shape_(shape.device), rank_(member.number()) {
  (void)resident_blocks();  // loads the kernels
  member.barrier();         // otherwise the slowest rank's context creation would be timed
  auto then = Clock::now();
  OneKind bootstrap(member, place.kind);
  mappings_ = std::make_unique<PeerMappings>(
      DeviceRegistry::instance(), bootstrap,
      MappingOptions{int(rank_), int(shape_.ranks), place.device, kThisHost, std::chrono::milliseconds(5000)});
  times->share = ms_since(&then);
  format(shape, member);
  times->channel = ms_since(&then);
  stream_ = std::make_unique<Stream>();
  heap_ = std::make_unique<Heap>(size_t(64) << 20);
  member.barrier();
}

/// Each place where a peer writes for this rank holds a pad.
void Rank::format(const ChannelShape& shape, Member& member) {
  const kernel::DevicePad pad{shape_};
  const kernel::DeviceState state{shape_};
  span_ = mappings_->arena().allocate(pad.bytes());
  state_ = std::make_unique<Memory>(state.bytes());
  control_ = std::make_unique<Memory>(sizeof(kernel::Control), Memory::Where::kPinned);
  const uint64_t offset = span_.offset;
  const auto places = member.all_gather(std::as_bytes(std::span(&offset, 1)));
  std::vector<kernel::PeerPads> peers;
  std::set<DevicePtr> homes;
  for (uint32_t r = 0; r < shape_.ranks; ++r) {
    uint64_t theirs = 0;
    NVX_CHECK(places[r].size() == sizeof theirs, "a rank sent something else than the place of its pad");
    std::memcpy(&theirs, places[r].data(), sizeof theirs);
    const DevicePeer& peer = mappings_->peer(int(r));
    NVX_CHECK(theirs + pad.bytes() <= peer.bytes, "a rank's pad is outside its arena");
    peers.push_back({as_pointer(peer.theirs + theirs), as_pointer(peer.mine + offset)});
    homes.insert(peer.mine);
  }
  std::vector<std::byte> image(std::max(pad.offset(kernel::Part::kStaging), state.bytes()));
  kernel::format_pad(shape_, shape.first_epoch, shape.first_chunk, image.data());
  for (const DevicePtr home : homes) {
    must(cudaMemcpy(as_pointer(home + offset), image.data(), pad.offset(kernel::Part::kStaging), cudaMemcpyDefault),
         "cudaMemcpy of a pad");
  }
  kernel::format_state(shape_, shape.first_epoch, shape.first_chunk, peers.data(), image.data());
  must(cudaMemcpy(state_->data(), image.data(), state.bytes(), cudaMemcpyDefault), "cudaMemcpy of a state");
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Rank::~Rank() {
  if (!hangs_) return;
  for (auto* kept : {&state_, &control_}) (void)kept->release();
  (void)stream_.release();
  (void)heap_.release();
  (void)mappings_.release();  // a kernel that hangs writes to the peers' mapped memory
}

RankProgram Rank::write(const std::vector<Case>& cases, uint64_t timeout_ns) {
  heap_->reset();
  RankProgram program(rank_, shape_.ranks, *heap_);
  for (const Case& test_case : cases) program.add(test_case, timeout_ns);
  program.upload();
  return program;
}

void Rank::launch(const RankProgram& program, size_t at_once) {
  const kernel::DeviceChannel channel{shape_, rank_, state_->data(), &control()};
  const Status status = program.launch(channel, at_once, stream_->get());
  if (!status.ok()) throw Error(status.code(), status.what());
}

void Rank::launch(std::span<const kernel::Job> jobs) {
  const kernel::DeviceChannel channel{shape_, rank_, state_->data(), &control()};
  const Status status = kernel::launch_cuda(channel, jobs, {}, stream_->get());
  if (!status.ok()) throw Error(status.code(), status.what());
}

std::string Rank::wait(std::chrono::milliseconds most) {
  const std::string wrong = stream_->wait(most);
  hangs_ = hangs_ || !wrong.empty();
  return wrong;
}

}  // namespace nvx::gpu
