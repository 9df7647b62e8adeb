#include "gpu/rank_program.h"

#include <algorithm>
#include <thread>

#include "group/plan/device_plan.h"
#include "kernel/gpu/residency.h"

namespace nvx::gpu {

using kernel::Collective;
using kernel::Job;
using kernel::Piece;

namespace {

void move_bytes(void* to, const void* from, size_t bytes) {
  if (bytes != 0) must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

void demand(const Status& status) {
  if (!status.ok()) throw Error(status.code(), status.what());
}

}  // namespace

void RankProgram::Image::bring() const { move_bytes(device, host, bytes); }
void RankProgram::Image::fetch() const { move_bytes(host, device, bytes); }

/// The device copy has the alignment modulo 16 of the host tensor. Later inputs reuse the address of the first one.
RankProgram::Image RankProgram::image_of(std::byte* tensor, size_t bytes) {
  const size_t all = bytes + 2 * kAround;
  std::byte* const at = heap_.take(all, reinterpret_cast<uintptr_t>(tensor) % 16);
  return {tensor - kAround, at, all};
}

void RankProgram::add(const Case& test_case, uint64_t timeout_ns) {
  PlacedCase placed{
      std::make_unique<test::Side>(test_case.spec, int(rank_), int(ranks_)), describe(test_case), {}, nullptr, false};
  test::Side& side = *placed.side;
  kernel::CollectiveArgs args = side.args();
  std::byte* const in = const_cast<std::byte*>(args.in);
  std::byte* const out = args.out;
  const size_t in_bytes = in ? args.count * side.width() : 0;
  const bool in_place = in && out && in >= out && in + in_bytes <= out + side.out_bytes();
  std::byte* device_in = nullptr;
  if (out) {
    placed.images.push_back(image_of(out, side.out_bytes()));
    placed.out = placed.images.back().tensor();
  }
  if (in && !in_place) {
    placed.images.push_back(image_of(in, in_bytes));
    device_in = placed.images.back().tensor();
  } else if (in_place) {
    device_in = placed.out + (in - out);
  }
  std::vector<Piece> send(side.send()), recv(side.recv());
  for (Piece& p : send) p.data = p.data ? device_in + (p.data - in) : nullptr;
  for (Piece& p : recv) p.data = p.data ? placed.out + (p.data - out) : nullptr;
  args.in = device_in, args.out = placed.out;
  args.send = send.data(), args.recv = recv.data();
  const size_t index = table_.size();
  table_.resize(index + 2 * size_t(ranks_));
  Job job =
      kernel::job_of(test_case.algorithm, args, rank_, ranks_, side.width(), uint32_t(index), table_.data() + index);
  job.timeout_ns = timeout_ns;
  jobs_.push_back(job);
  placed.keeps_own = test_case.algorithm == kernel::DeviceAlgorithm::kExchangePackets;
  placed_.push_back(std::move(placed));
}

void RankProgram::upload() const {
  for (const PlacedCase& placed : placed_) {
    for (const Image& image : placed.images) image.bring();
  }
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // small copies return before they are done
}

Status RankProgram::launch(const kernel::DeviceChannel& channel, size_t at_once, cudaStream_t stream) const {
  for (size_t i = 0; i < jobs_.size(); i += at_once) {
    NVX_TRY(launch_some(channel, i, std::min(at_once, jobs_.size() - i), stream));
  }
  return {};
}

/// A launch carries only the part of the list that its jobs name.
Status RankProgram::launch_some(const kernel::DeviceChannel& channel, size_t first, size_t count,
                                cudaStream_t stream) const {
  const size_t pieces = 2 * size_t(ranks_);
  std::vector<Job> jobs(jobs_.begin() + long(first), jobs_.begin() + long(first + count));
  for (Job& job : jobs) {
    for (kernel::Pieces* p : {&job.send, &job.recv}) {
      if (p->kind == kernel::Pieces::Kind::kTable) p->index -= uint32_t(first * pieces);
    }
  }
  return kernel::launch_cuda(channel, jobs, {table_.data() + first * pieces, count * pieces}, stream);
}

std::string RankProgram::verdict() {
  for (PlacedCase& placed : placed_) {
    for (const Image& image : placed.images) image.fetch();
    if (const std::string wrong = placed.side->verdict(); !wrong.empty()) return placed.text + ": " + wrong;
  }
  return "";
}

std::string RankProgram::untouched() const {
  for (size_t s = 0; s < placed_.size(); ++s) {
    const PlacedCase& placed = placed_[s];
    if (!placed.out || placed.images.empty()) continue;
    const Image& image = placed.images.front();
    std::vector<std::byte> now(image.bytes);
    move_bytes(now.data(), image.device, image.bytes);
    const Piece own = jobs_[s].recv.of(rank_, ranks_, table_.data());
    for (size_t i = 0; i < now.size(); ++i) {
      const std::byte* const at = image.device + i;
      if (placed.keeps_own && own.data && at >= own.data && at < own.data + own.bytes) continue;
      if (now[i] != image.host[i])
        return "rank " + std::to_string(rank_) + ", " + placed.text + ": wrote a part of an output that failed";
    }
  }
  return "";
}

std::string verdict_of(const kernel::Control& control) {
  const kernel::DeviceVerdict& v = control.verdict;
  if (v.state == 0) return "";
  const char* const causes[] = {"none", "a wait", "a mismatch", "a bad lease", "counts"};
  const char* const hows[] = {"reached", "timed out", "alarmed"};
  return std::string("verdict: ") + causes[size_t(v.cause) % 5] + ", " + hows[size_t(v.how) % 3] + ", peer " +
         std::to_string(v.peer) + ", block " + std::to_string(v.block) + ", epoch " + std::to_string(v.epoch) +
         ", wanted " + std::to_string(v.wanted) + ", seen " + std::to_string(v.seen);
}

World::World(const ChannelShape& shape, How how, size_t heap_bytes)
    : shape_(shape.device), how_(how), heap_(std::make_unique<Heap>(heap_bytes)) {
  const kernel::DevicePad pad{shape_};
  const kernel::DeviceState state{shape_};
  const size_t formatted = pad.offset(kernel::Part::kStaging);
  for (uint32_t r = 0; r < shape_.ranks; ++r) {
    pads_.push_back(std::make_unique<Memory>(pad.bytes()));
    states_.push_back(std::make_unique<Memory>(state.bytes()));
    controls_.push_back(std::make_unique<Memory>(sizeof(kernel::Control), Memory::Where::kPinned));
    streams_.push_back(std::make_unique<Stream>());
  }
  std::vector<std::byte> image(std::max(formatted, state.bytes()));
  for (uint32_t r = 0; r < shape_.ranks; ++r) {
    kernel::format_pad(shape_, shape.first_epoch, shape.first_chunk, image.data());
    move_bytes(pads_[r]->data(), image.data(), formatted);
    std::vector<kernel::PeerPads> peers;
    for (uint32_t p = 0; p < shape_.ranks; ++p) peers.push_back({pads_[p]->data(), pads_[r]->data()});
    kernel::format_state(shape_, shape.first_epoch, shape.first_chunk, peers.data(), image.data());
    move_bytes(states_[r]->data(), image.data(), state.bytes());
  }
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

World::~World() {
  if (!hangs_) return;
  // A kernel that does not end may still use this memory, and freeing it would wait for that kernel.
  for (auto* kept : {&pads_, &states_, &controls_}) {
    for (auto& memory : *kept) (void)memory.release();
  }
  for (auto& stream : streams_) (void)stream.release();
  (void)heap_.release();
}

kernel::DeviceChannel World::channel(uint32_t rank) const {
  return {shape_, rank, states_[rank]->data(), reinterpret_cast<kernel::Control*>(controls_[rank]->data())};
}

std::vector<RankProgram> World::write(const std::vector<Case>& cases, uint64_t timeout_ns) {
  heap_->reset();
  std::vector<RankProgram> programs;
  for (uint32_t r = 0; r < shape_.ranks; ++r) {
    programs.emplace_back(r, shape_.ranks, *heap_);
    for (const Case& test_case : cases) programs.back().add(test_case, timeout_ns);
    programs.back().upload();
  }
  return programs;
}

const FusedRank* World::fuse(const std::vector<RankProgram>& programs, uint32_t present) {
  std::vector<FusedRank> ranks;
  for (uint32_t r = 0; r < present; ++r) {
    const auto bring = [&](const auto& list) {
      const size_t bytes = list.size() * sizeof list[0];
      std::byte* const at = heap_->take(bytes);
      move_bytes(at, list.data(), bytes);
      return at;
    };
    const auto* jobs = reinterpret_cast<const Job*>(bring(programs[r].jobs()));
    const auto* table = reinterpret_cast<const Piece*>(bring(programs[r].table()));
    ranks.push_back({channel(r).prepared(), jobs, uint32_t(programs[r].jobs().size()), table});
  }
  std::byte* const at = heap_->take(ranks.size() * sizeof(FusedRank));
  move_bytes(at, ranks.data(), ranks.size() * sizeof(FusedRank));
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return reinterpret_cast<const FusedRank*>(at);
}

void World::launch(const std::vector<RankProgram>& programs, uint32_t present) {
  if (how_ == How::kFused) {
    demand(launch_fused(fuse(programs, present), present, shape_.blocks, streams_[0]->get()));
    return;
  }
  const auto launch_rank = [&](uint32_t r) {
    return programs[r].launch(channel(r), how_ == How::kStreams ? 1 : kernel::kLaunchJobs, streams_[r]->get());
  };
  std::vector<Status> statuses(present);
  std::vector<std::thread> threads;
  int device = 0;
  must(cudaGetDevice(&device), "cudaGetDevice");
  for (uint32_t r = 0; r < present; ++r) {
    if (how_ != How::kThreads) {
      statuses[r] = launch_rank(r);
    } else {
      threads.emplace_back([&, r] {
        (void)cudaSetDevice(device);
        statuses[r] = launch_rank(r);
      });
    }
  }
  for (std::thread& t : threads) t.join();
  for (const Status& status : statuses) demand(status);
}

std::string World::wait(std::chrono::milliseconds most) {
  const Deadline deadline = Deadline::after(most);
  for (const auto& stream : streams_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now());
    const std::string wrong = stream->wait(std::max(left, std::chrono::milliseconds(1)));
    hangs_ = hangs_ || !wrong.empty();
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string World::verdict(std::vector<RankProgram>& programs) {
  for (uint32_t r = 0; r < shape_.ranks; ++r) {
    if (const std::string wrong = verdict_of(control(r)); !wrong.empty())
      return "rank " + std::to_string(r) + ": " + wrong;
  }
  for (RankProgram& program : programs) {
    if (const std::string wrong = program.verdict(); !wrong.empty()) return wrong;
  }
  return "";
}

std::string World::perform(const std::vector<Case>& cases) {
  std::vector<RankProgram> programs = write(cases);
  launch(programs, shape_.ranks);
  // Each operation ends after its timeout at the latest.
  if (const std::string wrong = wait(std::chrono::seconds(60)); !wrong.empty())
    throw Error(Code::kSystem, "nvx: " + wrong);
  return verdict(programs);
}

uint32_t resident_blocks() {
  std::vector<kernel::KernelAttributes> attributes;
  demand(kernel::load_cuda(&attributes));
  return uint32_t(kernel::resident_at_once(attributes));
}

kernel::DeviceShape product_shape(uint32_t ranks, uint32_t blocks) {
  constexpr size_t kArena = size_t(64) << 20;
  if (blocks == 0) blocks = std::min(uint32_t(Tuning().of(Tune::kBlocks, ranks)), resident_blocks() / ranks);
  return device_shape(ranks, blocks, pad_budget(kArena));
}

}  // namespace nvx::gpu
