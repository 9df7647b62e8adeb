#include "group/core/status.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <new>
#include <utility>

#include "base/config.h"
#include "base/handle.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/text.h"

namespace nvx {
namespace {

using kernel::Collective;

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr size_t kSends = size_t(Collective::kBarrier) + 1;
constexpr const char* kOthers[] = {"send",   "recv",        "monitored_barrier", "put",
                                   "signal", "wait_signal", "symm_mem",          "a call"};
constexpr size_t kMonitored = kSends + 2, kUnknown = kSends + std::size(kOthers) - 1;
static_assert(kSends + 2 == StatusSlot::kKinds);

constexpr int kSealFutureWrite = 0x0010;  // F_SEAL_FUTURE_WRITE, which older headers lack

/// For a counter with one writer at a time.
void add(std::atomic<uint64_t>& counter, uint64_t n) { counter.store(counter.load(kRelaxed) + n, kRelaxed); }

/// The size as nccl-tests count it, of all ranks together where they do. Of a chunk, and of pieces that only their two
/// ranks know: the bytes that this rank sends or receives.
uint64_t bytes_of(const Operation& o) {
  if (o.count != 0 && (!o.whole || reduces(o.collective))) return o.count * size_of(o.dtype);
  if (o.collective == Collective::kBroadcast) return o.recv.longest();
  return std::max(o.send.total(), o.recv.total());
}

/// Release: none of these stores overtakes the one that recorded the end of the call before.
void put(StatusSlot::Call& call, const Operation& o, Clock::time_point began) {
  constexpr auto kRelease = std::memory_order_release;
  const kernel::Fingerprint f = o.fingerprint();
  call.number.store(o.number, kRelease);
  call.began.store(ns_of(began), kRelease);
  call.count.store(f.count, kRelease);
  call.bytes.store(bytes_of(o), kRelease);
  call.what.store(uint32_t(f.collective) | uint32_t(f.dtype) << 8 | uint32_t(f.op) << 16 | uint32_t(f.form) << 24,
                  kRelease);
  call.root.store(f.root, kRelease);
}

/// A reader may see half of it, and trusts a wait only if the other waits of a cycle match it.
void put(StatusSlot::Wait& wait, int rank, pid_t pid, size_t call, uint64_t began, uint64_t ended = 0) {
  wait.pid.store(uint32_t(pid), kRelaxed);
  wait.call.store(uint32_t(call), kRelaxed);
  wait.began.store(began, kRelaxed);
  wait.ended.store(ended, kRelaxed);
  wait.rank.store(uint32_t(rank + 1), kRelaxed);
}

TraceRecord record_of(const StatusSlot::Call& call, uint64_t ended) {
  return {.began = call.began.load(kRelaxed),
          .ended = ended,
          .number = call.number.load(kRelaxed),
          .count = call.count.load(kRelaxed),
          .bytes = call.bytes.load(kRelaxed),
          .what = call.what.load(kRelaxed),
          .peer = call.root.load(kRelaxed)};
}

}  // namespace

const char* name_of_call(uint32_t call) {
  return call < kSends ? nvx::name(Collective(call)) : kOthers[std::min(call - kSends, std::size(kOthers) - 1)];
}

uint64_t ns_of(Clock::time_point at) { return uint64_t(std::chrono::nanoseconds(at.time_since_epoch()).count()); }

GroupStatus::GroupStatus(const std::string& name, int rank, int size)
    : slot_([&] {
        if (StatusSlot* const slot = StatusPage::instance().claim()) return slot;
        unseen_ = std::make_unique<StatusSlot>();
        return unseen_.get();
      }()),
      trace_(unseen_ ? nullptr : StatusPage::instance().trace()) {
  slot_->rank = rank, slot_->size = size;
  put(slot_->name, name);
  state(StatusSlot::kSetUp);
}

GroupStatus::~GroupStatus() {
  if (!unseen_) StatusPage::instance().release(slot_);
}

/// Release: a reader that sees the state sees the call that it is about.
void GroupStatus::state(StatusSlot::State state) {
  slot_->since.store(ns_of(Clock::now()), kRelaxed);
  slot_->state.store(state, std::memory_order_release);
}

void GroupStatus::open(uint64_t id, int global_rank) {
  slot_->global_rank = global_rank;
  slot_->id.store(id, kRelaxed);
  state(StatusSlot::kOpen);
}

void GroupStatus::fail(const std::string& cause) {
  put(slot_->failure, cause);
  if (slot_->state.load(kRelaxed) != StatusSlot::kLeft) state(StatusSlot::kFailed);
}

// --- calls

/// A reader loads `begun` and `ended` before and after it reads the two records: if they have not changed, neither has
/// the record of the current call, nor, during a call, that of the last finished one.
void GroupStatus::begin(const Operation& o, Clock::time_point now) {
  const StatusSlot::Call& before = slot_->calls[turn_ % 2];
  const bool goes_on = o.whole && turn_ != 0 && before.number.load(kRelaxed) == o.number;
  StatusSlot::Call& call = slot_->calls[++turn_ % 2];
  put(call, o, now);
  if (!goes_on) add(slot_->totals[call.what.load(kRelaxed) & 0xff].calls, 1);
  slot_->begun.store(turn_, std::memory_order_release);
}

/// Reading the clock would cost a short call 1 %. So about one short call in 16 is timed, and counts as 16. A hash of
/// its number chooses it, so that a program's period does not bias the sample. A trace has the time of each call.
void GroupStatus::end() {
  constexpr uint64_t kAllOf = 64, kFewBytes = 64 << 10;
  StatusSlot::Call& call = slot_->calls[turn_ % 2];
  const uint64_t bytes = call.bytes.load(kRelaxed), began = call.began.load(kRelaxed);
  StatusSlot::Total& total = slot_->totals[call.what.load(kRelaxed) & 0xff];
  const bool slept = slept_.load(kRelaxed);
  uint64_t weight = 1, ended = began;
  if (!trace_ && !slept && bytes < kFewBytes && turn_ > kAllOf)
    weight = turn_ * 0x9e3779b97f4a7c15u >> 60 == 0 ? 16 : 0;
  if (weight != 0) {
    ended = ns_of(Clock::now());
    add(total.ns, weight * (ended - began));
  }
  call.ended.store(ended, kRelaxed);
  add(total.bytes, bytes);
  slot_->ended.store(turn_, std::memory_order_release);
  if (slept) after_sleep();
  if (trace_) trace(TraceRecord::kCall, record_of(call, ended));
}

void GroupStatus::launched(const Operation& o, uint64_t count) {
  MutexLock lock(launch_mutex_);
  put(slot_->launch, o, Clock::now());
  StatusSlot::Total& total = slot_->totals[slot_->launch.what.load(kRelaxed) & 0xff];
  total.calls.fetch_add(1, kRelaxed);
  total.bytes.fetch_add(slot_->launch.bytes.load(kRelaxed), kRelaxed);
  slot_->launched.store(std::max(count, slot_->launched.load(kRelaxed)), std::memory_order_release);
  if (trace_) trace(TraceRecord::kLaunch, record_of(slot_->launch, slot_->launch.began.load(kRelaxed)));
}

void GroupStatus::message_ended(bool receives, int peer, int64_t tag, DType dtype, size_t bytes,
                                Clock::time_point began) {
  StatusSlot::Total& total = slot_->totals[kSends + size_t(receives)];
  add(total.calls, 1);
  add(total.bytes, bytes);
  const uint64_t now = ns_of(Clock::now());
  add(total.ns, now - ns_of(began));
  if (!trace_) return;
  TraceRecord record{.began = ns_of(began), .ended = now, .number = uint64_t(tag), .count = bytes / size_of(dtype)};
  record.bytes = bytes, record.what = uint32_t(dtype) << 8, record.peer = peer;
  trace(receives ? TraceRecord::kRecv : TraceRecord::kSend, record);
}

void GroupStatus::messages(size_t open, const std::string& oldest, Clock::time_point since) {
  put(slot_->message, oldest);
  slot_->oldest.store(ns_of(since), kRelaxed);
  slot_->messages.store(open, kRelaxed);
}

void GroupStatus::sleeps_for_message(int rank, pid_t pid, bool receives, Clock::time_point began) {
  put(slot_->of_message, rank, pid, kSends + size_t(receives), ns_of(began));
}

void GroupStatus::gave_up(int rank, pid_t pid, const std::string& call, Clock::time_point began) {
  if (gave_up_.exchange(true)) return;
  const std::string name = call.substr(0, call.find_first_of("( "));
  uint32_t kind = 0;
  while (kind < kUnknown && name != name_of_call(kind)) ++kind;
  put(slot_->given_up, rank, pid, kind, ns_of(began), ns_of(Clock::now()));
}

void GroupStatus::trace(TraceRecord::Kind kind, TraceRecord record) {
  record.kind = kind;
  record.slot = StatusPage::instance().place_of(slot_);
  if (kind == TraceRecord::kCall)
    record.algorithm = std::exchange(algorithm_, 0), record.schedule = std::exchange(schedule_, 0);
  trace_->add(record);
}

void GroupStatus::waited(int rank, Clock::time_point began) {
  const uint64_t number = slot_->calls[turn_ % 2].number.load(kRelaxed);
  trace(TraceRecord::kWait, {.began = ns_of(began), .ended = ns_of(Clock::now()), .number = number, .peer = rank});
}

// --- ranks that arrived late

void GroupStatus::sleeps(int rank, pid_t pid) {
  const uint64_t begun = slot_->begun.load(kRelaxed);
  const StatusSlot::Call& call = slot_->calls[begun % 2];
  const bool runs = begun != slot_->ended.load(kRelaxed);
  put(slot_->current, rank, pid, runs ? call.what.load(kRelaxed) & 0xff : kMonitored,
      runs ? call.began.load(kRelaxed) : 0);
  slot_->awaited.store(uint32_t(rank + 1), kRelaxed);
}

void GroupStatus::slept(int rank, Clock::duration span) {
  sleeps(-1);
  slept_.store(true, kRelaxed);
  if (rank < 0) return;
  if (span >= kLate) last_.store(rank, kRelaxed);
  const uint32_t stored = uint32_t(rank + 1);
  const auto ns = uint64_t(std::chrono::nanoseconds(span).count());
  StatusSlot::Late* place = &slot_->lates[0];
  for (StatusSlot::Late& late : slot_->lates) {
    if (late.rank.load(kRelaxed) == stored || late.ns.load(kRelaxed) < place->ns.load(kRelaxed)) place = &late;
    if (late.rank.load(kRelaxed) == stored) break;
  }
  if (place->rank.load(kRelaxed) != stored) {
    if (ns <= place->ns.load(kRelaxed)) return;
    place->rank.store(stored, kRelaxed);
    place->times.store(0, kRelaxed);
    place->ns.store(0, kRelaxed);
  }
  add(place->ns, ns);
}

/// At the end of a call that slept: counts the last rank, if it arrived late.
void GroupStatus::after_sleep() {
  sleeps(-1);
  slept_.store(false, kRelaxed);
  const int rank = last_.exchange(-1, kRelaxed);
  for (StatusSlot::Late& late : slot_->lates) {
    if (rank >= 0 && late.rank.load(kRelaxed) == uint32_t(rank + 1)) late.times.fetch_add(1, kRelaxed);
  }
}

std::string GroupStatus::lates() const {
  std::vector<std::array<uint64_t, 3>> longest;
  for (const StatusSlot::Late& late : slot_->lates)
    longest.push_back({late.ns.load(kRelaxed), late.rank.load(kRelaxed), late.times.load(kRelaxed)});
  std::sort(longest.rbegin(), longest.rend());
  std::vector<std::string> ranks;
  for (const auto& [ns, rank, times] : longest) {
    if (ns == 0) break;
    ranks.push_back("rank " + std::to_string(rank - 1) + " " + seconds(double(ns) / 1e9) + " (last in " +
                    std::to_string(times) + (times == 1 ? " call)" : " calls)"));
  }
  return joined(ranks);
}

// --- the page

namespace {

/// Clock's zero in nanoseconds of the system's clock, by the one of several readings that was interrupted least.
int64_t epoch() {
  Clock::duration least = Clock::duration::max();
  std::chrono::nanoseconds found{};
  for (int i = 0; i < 9; ++i) {
    const auto before = Clock::now();
    const auto system = std::chrono::system_clock::now().time_since_epoch();
    const auto took = Clock::now() - before;
    if (took >= least) continue;
    least = took;
    found = system - (before + took / 2).time_since_epoch();
  }
  return found.count();
}

std::string host() {
  char name[65] = {};
  (void)gethostname(name, sizeof name - 1);
  for (char& c : name) c = c == 0 || std::isalnum(static_cast<unsigned char>(c)) || c == '.' ? c : '-';
  return name;
}

template <class NameOf>
std::string list(size_t n, NameOf name_of) {
  std::vector<std::string> names;
  for (size_t i = 0; i < n; ++i) names.push_back(name_of(i));
  return "\"" + joined(names, " ") + "\"";
}

std::string section(const char* name, size_t at, size_t records, const char* format, const char* fields) {
  return "\"" + std::string(name) + "\":[" + std::to_string(at) + "," + std::to_string(records) + ",\"" + format +
         "\",\"" + fields + "\"]";
}

}  // namespace

StatusPage& StatusPage::instance() { return of_this_process<StatusPage>(); }

/// The blocks of a trace are allocated at once: a store to a file on a full disk would kill the process.
Fd StatusPage::file(size_t* bytes) {
  if (const std::string& folder = config().trace; !folder.empty()) {
    std::string path = folder + "/" + kTraceName + ".XXXXXX";
    std::error_code mkdir_error;
    if (std::filesystem::create_directories(folder, mkdir_error)) (void)chmod(folder.c_str(), 0700);
    Fd fd(mkostemp(path.data(), O_CLOEXEC));
    const size_t traced = kBytes + TraceRing::kRecords * sizeof(TraceRing::Entry);
    int error = fd ? EINTR : mkdir_error ? mkdir_error.value() : errno;
    while (error == EINTR) error = posix_fallocate(fd.get(), 0, off_t(traced));
    if (error == 0) {
      *bytes = traced;
      return fd;
    }
    NVX_LOG(kWarn, "NVX_TRACE=%s: this process is not traced: %s", folder.c_str(), std::strerror(error));
    if (fd) unlink(path.c_str());
  }
  *bytes = kBytes;
  Fd fd(memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  return fd && ftruncate(fd.get(), off_t(kBytes)) == 0 ? std::move(fd) : Fd();
}

bool StatusPage::make() {
  if (std::exchange(made_, true)) return base_ != nullptr;
  size_t bytes = 0;
  Fd fd = file(&bytes);
  void* base = MAP_FAILED;
  if (fd) base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (base != MAP_FAILED && bytes > kBytes) trace_.emplace(static_cast<std::byte*>(base) + kBytes);
  const std::string text = layout(getpid()) + layout_of_trace() + "}";
  if (base == MAP_FAILED || text.size() >= kTextBytes) {
    NVX_LOG(kInfo, "this process has no memory for `nvx status`: %s", std::strerror(errno));
    return false;
  }
  madvise(base, bytes, MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(base);
  std::memcpy(base_, text.data(), text.size());
  constexpr int kSize = F_SEAL_SHRINK | F_SEAL_GROW;
  if (fcntl(fd.get(), F_ADD_SEALS, kSize | kSealFutureWrite) != 0) (void)fcntl(fd.get(), F_ADD_SEALS, kSize);
  file_ = std::move(fd);
  return true;
}

StatusSlot* StatusPage::claim() {
  MutexLock lock(mutex_);
  if (!make()) return nullptr;
  const auto free = std::ranges::find(taken_, false);
  if (free == taken_.end()) return nullptr;
  *free = true;
  return new (base_ + kTextBytes + size_t(free - taken_.begin()) * kSlotBytes) StatusSlot();
}

/// Records refer to slots, so in a trace the slot of a group that has ended stays its own.
void StatusPage::release(StatusSlot* slot) {
  slot->state.store(StatusSlot::kFree, kRelaxed);
  MutexLock lock(mutex_);
  taken_[place_of(slot)] = trace_.has_value();
}

uint16_t StatusPage::place_of(const StatusSlot* slot) const {
  return uint16_t(size_t(reinterpret_cast<const std::byte*>(slot) - base_ - kTextBytes) / kSlotBytes);
}

/// As `nvx status` finds it.
std::vector<std::byte> StatusPage::read(pid_t pid) {
  namespace fs = std::filesystem;
  const std::string text = layout(pid);
  std::error_code none;
  fs::directory_iterator file("/proc/" + std::to_string(pid) + "/fd", none);
  for (; !none && file != fs::directory_iterator(); file.increment(none)) {
    std::error_code gone;
    const std::string link = fs::read_symlink(file->path(), gone).native();
    if (!link.starts_with(std::string("/memfd:") + kName) &&
        link.find(std::string("/") + kTraceName + ".") == link.npos)
      continue;
    const Fd page(open(file->path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    std::vector<std::byte> bytes(kBytes);
    if (!page || pread(page.get(), bytes.data(), bytes.size(), 0) != ssize_t(bytes.size())) continue;
    if (std::memcmp(bytes.data(), text.data(), text.size()) != 0) continue;  // of a parent, or of another layout
    bytes.erase(bytes.begin(), bytes.begin() + kTextBytes);
    return bytes;
  }
  return {};
}

/// The sections of a slot: place, number of records, their format in the words of Python's struct, and their fields.
std::string StatusPage::layout(pid_t pid) {
  constexpr const char *kCall = "5Q4Bi", *kCallFields = "number began ended count bytes collective dtype op form root";
  static_assert(sizeof(StatusSlot::Call) == 48 && sizeof(StatusSlot::Total) == 24 && sizeof(StatusSlot::Late) == 16 &&
                sizeof(StatusSlot::Wait) == 32 && offsetof(StatusSlot, calls) == 88 &&
                std::endian::native == std::endian::little);
  const auto text = offsetof(StatusSlot, name);
  return "{\"version\":" + std::to_string(kVersion) + ",\"pid\":" + std::to_string(pid) +
         ",\"at\":" + std::to_string(kTextBytes) + ",\"slots\":" + std::to_string(kSlots) +
         ",\"bytes\":" + std::to_string(kSlotBytes) +
         ",\"collectives\":" + list(kSends, [](size_t i) { return nvx::name(Collective(i)); }) +
         ",\"types\":" + list(kernel::kDTypeCount, [](size_t i) { return nvx::name(DType(i)); }) +
         ",\"operators\":" + list(kernel::kReduceOpCount, [](size_t i) { return nvx::name(ReduceOp(i)); }) +
         ",\"sections\":{" +
         section("group", 0, 1, "2I2i9Q",
                 "state awaited rank size id since issued begun ended launched completed messages oldest") +
         "," + section("calls", offsetof(StatusSlot, calls), 2, kCall, kCallFields) + "," +
         section("launch", offsetof(StatusSlot, launch), 1, kCall, kCallFields) + "," +
         section("totals", offsetof(StatusSlot, totals), StatusSlot::kKinds, "3Q", "calls bytes ns") + "," +
         section("lates", offsetof(StatusSlot, lates), StatusSlot::kLates, "2IQ", "rank times ns") + "," +
         section("texts", text, 1, "96s96s256s", "name message failure") + "," +
         section("waits", offsetof(StatusSlot, current), 3, "3I4x2Q", "rank pid call began ended") + "}";
}

/// Empty if nothing is recorded.
std::string StatusPage::layout_of_trace() const {
  if (!trace_) return "";
  constexpr size_t kAlgorithms = size_t(kernel::Algorithm::kExchange) + 1;
  const auto schedules = schedule::catalog();
  return ",\"host\":\"" + host() + "\",\"epoch\":" + std::to_string(epoch()) + "," +
         section("trace", kBytes, TraceRing::kRecords, "6Q4BiH3B3x",
                 "stamp began ended number count bytes collective dtype op form peer slot kind algorithm schedule") +
         ",\"algorithms\":" + list(kAlgorithms, [](size_t i) { return name(kernel::Algorithm(i)); }) +
         ",\"schedules\":" + list(schedules.size(), [&](size_t i) { return schedules[i].name; });
}

}  // namespace nvx
