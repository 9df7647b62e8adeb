// Spans of the arena, leases of staging, and how one process comes to see another one's memory.

#include "memory/shm/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <random>

#include "base/error.h"
#include "memory/shm/leases.h"
#include "memory/shm/shm_registry.h"
#include "support/ranks.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

TEST(Arena, SpansAreZeroedAndDisjointAndReused) {
  Arena arena;
  std::mt19937 random(1);
  std::vector<Span> spans;
  for (int round = 0; round < 300; ++round) {
    if (random() % 3 != 0 || spans.empty()) {
      const Span span = arena.allocate(1 + random() % (300 * K));
      for (size_t i = 0; i < span.bytes; i += 4096) ASSERT_EQ(*arena.at(span.offset + i), std::byte(0));
      std::memset(arena.at(span.offset), 0xff, span.bytes);
      for (const Span& other : spans) {
        ASSERT_TRUE(span.offset + span.bytes <= other.offset || other.offset + other.bytes <= span.offset);
      }
      spans.push_back(span);
    } else {
      std::swap(spans[random() % spans.size()], spans.back());
      arena.free(spans.back());
      spans.pop_back();
    }
  }
  for (const Span& span : spans) arena.free(span);
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_EQ(arena.allocate(Arena::kBytes).offset, 0u) << "the holes have grown together again";
}

TEST(Arena, ReportsWhenItIsFullAndGoesOn) {
  Arena arena;
  const Span most = arena.allocate(Arena::kBytes - M);
  try {
    (void)arena.allocate(2 * M);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("is full (1023 MiB in use)"), std::string::npos) << error.what();
  }
  EXPECT_THROW((void)arena.allocate(M, /*left=*/1), Error);
  EXPECT_EQ(arena.allocate(M).bytes, M);
  arena.free(most);
  EXPECT_EQ(arena.allocate(M, Arena::kBytes - 2 * M).bytes, M);
}

TEST(TensorMemory, FreedPagesBehindTheKeptOnesReturnToTheKernel) {
  Arena arena;
  const auto held = [&] {
    struct stat facts {};
    EXPECT_EQ(fstat(arena.fd(), &facts), 0);
    return size_t(facts.st_blocks) * 512;
  };
  TensorMemory tensors(arena);
  EXPECT_FALSE(tensors.find(arena.at(0), 1));
  const Span kept = tensors.allocate(TensorMemory::kKept), behind = tensors.allocate(8 * M);
  const size_t before = held();
  std::memset(tensors.at(behind), 1, 8 * M);
  tensors.at(kept)[0] = std::byte(1);
  EXPECT_EQ(tensors.find(tensors.at(behind) + 5, 8 * M - 5), behind.offset + 5);
  EXPECT_FALSE(tensors.find(tensors.all().data() + tensors.all().size() - 5, 6));
  EXPECT_FALSE(tensors.find(arena.at(0), 1));
  EXPECT_GE(held(), before + 8 * M);
  tensors.free(behind);
  tensors.free(kept);
  EXPECT_LE(held(), before + 2 * M);
  EXPECT_EQ(tensors.allocate(M).offset, kept.offset) << "freed memory serves again";
  EXPECT_FALSE(tensors.allocate(TensorMemory::kMost)) << "more than there is";
}

TEST(Arena, DeferredSpansAreFreedWhenNoPeerAccessesThem) {
  Arena arena;
  bool released = false;
  arena.free_when(arena.allocate(M), [&] { return released; });
  EXPECT_EQ(arena.used(), M);
  arena.free(arena.allocate(1));
  EXPECT_EQ(arena.used(), M);
  released = true;
  arena.free(arena.allocate(1));
  EXPECT_EQ(arena.used(), 0u);
}

TEST(Arena, CannotBeShrunkByAHolder) {
  Arena arena;
  EXPECT_NE(ftruncate(arena.fd(), 4096), 0);
}

/// Keeps a span, and yields it when permitted.
class Holder : public LeaseHolder {
 public:
  Span release_idle() override {
    ++requests;
    return gives ? std::exchange(span, Span{}) : Span{};
  }
  Span span;
  bool gives = true;
  int requests = 0;
};

TEST(Leases, IdleHoldersYieldToRequests) {
  Arena arena;
  LeasePool pool(arena, 4 * M);
  Holder first, second;
  first.span = pool.acquire(3 * M, 3 * M, &first);
  EXPECT_EQ(first.span.bytes, 3 * M);
  second.span = pool.acquire(4 * M, 4 * M, &second);
  EXPECT_EQ(second.span.bytes, 4 * M);
  EXPECT_EQ(first.requests, 1);
  EXPECT_FALSE(first.span);
  pool.leave(&first);
  pool.leave(&second);
  pool.release(second.span);
  EXPECT_EQ(arena.used(), 0u);
}

TEST(Leases, RequestGetsALeaseThoughNoHolderReleases) {
  Arena arena;
  LeasePool pool(arena, 2 * M);
  std::vector<Holder> holders(12);
  for (Holder& holder : holders) {
    holder.gives = false;
    holder.span = pool.acquire(2 * M, 2 * M, &holder);
    EXPECT_GE(holder.span.bytes, LeasePool::kSmallest);
  }
  EXPECT_LE(arena.used(), 2 * M + holders.size() * LeasePool::kSmallest);
}

/// A limit above the arena's size, or other contents of the arena, make leases smaller.
TEST(Leases, AreNeverRefusedForWantOfRoomInTheArena) {
  Arena arena;
  LeasePool pool(arena, 2 * Arena::kBytes);
  Holder first, second;
  first.span = pool.acquire(Arena::kBytes / 2, M, &first);
  (void)arena.allocate(Arena::kBytes / 2 - first.span.bytes / 2);
  second.span = pool.acquire(Arena::kBytes / 2, Arena::kBytes / 2, &second);
  EXPECT_EQ(first.requests, 1) << "the limit is below the arena's size";
  EXPECT_GE(second.span.bytes, LeasePool::kSmallest);
  Arena full;
  (void)full.allocate(Arena::kBytes - M);
  EXPECT_EQ(LeasePool(full, 4 * M).acquire(4 * M, 4 * M, nullptr).bytes, M);
}

TEST(Leases, GroupsMustLeaveRoomForThoseThatAreNotLeased) {
  Arena arena;
  LeasePool pool(arena, 8 * M);
  Holder holder;
  EXPECT_EQ(pool.unleased(), 8 * M);
  holder.span = pool.acquire(6 * M, M, &holder);
  EXPECT_EQ(pool.unleased(), 2 * M);
  EXPECT_THROW((void)arena.allocate(Arena::kBytes - 7 * M, pool.unleased()), Error);
  (void)arena.allocate(Arena::kBytes - 8 * M, pool.unleased());
  EXPECT_EQ(pool.acquire(2 * M, 2 * M, nullptr).bytes, 2 * M);
}

TEST(Leases, ARequestTakesTheFreePartIfThatIsEnough) {
  Arena arena;
  LeasePool pool(arena, 4 * M);
  Holder first, second;
  first.span = pool.acquire(3 * M, M, &first);
  EXPECT_EQ(first.span.bytes, 3 * M);
  second.span = pool.acquire(3 * M, M, &second);
  EXPECT_EQ(second.span.bytes, M);
  EXPECT_EQ(first.requests, 0);
}

/// Leases of messages have no holder from which the pool could reclaim them.
TEST(Leases, ALeaseWithoutAHolderIsNeverReclaimed) {
  Arena arena;
  LeasePool pool(arena, M);
  const Span nobodys = pool.acquire(512 * K, 512 * K, nullptr);
  Holder holder;
  holder.span = pool.acquire(M, M, &holder);
  EXPECT_GE(holder.span.bytes, LeasePool::kSmallest);
  pool.release(nobodys);
}

TEST(Leases, DeferredSpansCountUntilTheyAreReleased) {
  Arena arena;
  LeasePool pool(arena, M);
  bool released = false;
  pool.free_when(pool.acquire(M, M, nullptr), [&] { return released; });
  EXPECT_EQ(pool.acquire(M, M, nullptr).bytes, LeasePool::kSmallest)
      << "nothing is left but the least that every group gets";
}

TEST(PeerProcesses, SeeEachOthersMemoryAndEnd) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  struct SocketInfo {
    ArenaId id;
    char socket[64];
    pid_t pid;
  };
  all_end_well(2, [&](int rank) {
    if (rank == 1) {
      const auto here = ShmRegistry::instance();
      IpcSocket ipc(*here);
      const Span span = here->arena().allocate(M);
      EXPECT_EQ(span.offset, 0u);
      std::memcpy(here->arena().at(0), "hello", 6);
      SocketInfo info{here->arena().id(), {}, getpid()};
      std::strncpy(info.socket, ipc.name().c_str(), sizeof info.socket - 1);
      ASSERT_EQ(write(pipes[1], &info, sizeof info), ssize_t(sizeof info));
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] {
        ipc.serve(std::chrono::milliseconds(1));
        return *here->arena().at(100) == std::byte(42);
      }));
      return;
    }
    SocketInfo info{};
    ASSERT_EQ(read(pipes[0], &info, sizeof info), ssize_t(sizeof info));
    const auto here = ShmRegistry::instance();
    IpcSocket ipc(*here);
    const auto fetched = ipc.fetch({{info.id, info.socket, info.pid}}, Deadline::after(milliseconds(20'000)));
    ASSERT_EQ(fetched.size(), 1u);
    const std::shared_ptr<PeerProcess> process = fetched.begin()->second;
    EXPECT_STREQ(reinterpret_cast<const char*>(process->at(0)), "hello");
    EXPECT_FALSE(process->dead());
    EXPECT_EQ(here->find(info.id), process);
    *process->at(100) = std::byte(42);
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return process->dead(); }));
  });
}

TEST(PeerProcesses, ReportHowOneEndedEvenWhenItIsReaped) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  for (const auto& [dies, text] : {std::pair{true, "<signal 9>"}, {false, "<exit code 7>"}}) {
    const pid_t child = fork();
    if (child == 0) {
      if (dies) raise(SIGKILL);
      _exit(7);
    }
    Fd memfd(memfd_create("nvx test", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(memfd.get(), 4096), 0);
    const PeerProcess process({}, memfd.get(), 4096, ProcessWatch(Fd(), child), child);
    siginfo_t info{};
    ASSERT_EQ(waitid(P_PID, id_t(child), &info, WEXITED | WNOWAIT), 0);
    EXPECT_EQ(text_of(process.exit_status(), "<", ">"), text);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    utsname kernel{};
    uname(&kernel);
    int major = 0, minor = 0;
    std::sscanf(kernel.release, "%d.%d", &major, &minor);
    const std::string later = text_of(process.exit_status(), "<", ">");
    if (major > 6 || (major == 6 && minor >= 15) || !later.empty()) {
      EXPECT_EQ(later, text) << kernel.release;
    }
  }
}

/// A socket that is not nvx's, or sends false data.
class FalseSocket {
 public:
  FalseSocket() {
    listener_ = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name().data(), name().size());
    const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name().size());
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener_.get(), 4), 0);
  }
  std::string name() const { return "nvx-false-socket-" + std::to_string(getpid()); }

  /// Sends these bytes with this descriptor to the next client. The socket's name has no tokens: they are zeros.
  void answer(const std::vector<char>& bytes, int fd) {
    const LocalSocket client{Fd(accept(listener_.get(), nullptr, nullptr))};
    EXPECT_TRUE(send_packet(client, bytes.data(), bytes.size(), std::span(&fd, fd >= 0 ? 1 : 0)));
  }

 private:
  Fd listener_;
};

TEST(PeerProcesses, MalformedArenaIsRefused) {
  const auto here = ShmRegistry::instance();
  const ArenaId id{1, 2};
  std::vector<char> right(24);
  const uint32_t magic = 0x4e565832;
  std::memcpy(right.data(), &magic, 4);
  std::memcpy(right.data() + 8, &id, 16);
  std::vector<char> wrong = right;
  wrong[0] ^= 1;
  const Fd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), off_t(Arena::kBytes)), 0);
  const Fd small(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(small.get(), 4096), 0);
  ASSERT_EQ(fcntl(small.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const std::tuple<const char*, std::vector<char>, int> kTries[] = {
      {"no descriptor", right, -1},          {"not sealed", right, unsealed.get()}, {"too small", right, small.get()},
      {"another magic", wrong, small.get()}, {"too short", {1, 2, 3}, small.get()}, {"no memory", right, STDIN_FILENO},
  };
  for (const auto& [what, bytes, fd] : kTries) {
    FalseSocket false_socket;
    std::thread answering([&, &bytes = bytes, fd = fd] { false_socket.answer(bytes, fd); });
    IpcSocket mine(*here);
    EXPECT_THROW((void)mine.fetch({{id, false_socket.name(), getpid()}}, Deadline::after(milliseconds(5000))), Error)
        << what;
    answering.join();
  }
}

/// A rank stays known while any group exists that has noted it, whichever of them ends first.
TEST(PeerProcesses, AreFoundAsLongAsAGroupStands) {
  const auto here = ShmRegistry::instance();
  const auto process = std::make_shared<PeerProcess>(ArenaId{5, 6}, here->arena().fd(), 4096, ProcessWatch(), getpid());
  auto first = std::make_shared<bool>(true), second = std::make_shared<bool>(true);
  here->note_rank(3, process, first);
  here->note_rank(3, process, second);
  second.reset();
  EXPECT_EQ(here->process_of_rank(3), process);
  first.reset();
  EXPECT_EQ(here->process_of_rank(3), nullptr);
  EXPECT_EQ(here->process_of_rank(4), nullptr);
}

TEST(PeerProcesses, AClosedIpcSocketIsAnError) {
  IpcSocket mine(*ShmRegistry::instance());
  try {
    (void)mine.fetch({{ArenaId{1, 2}, "nvx-nobody-is-here", 4711}}, Deadline::after(milliseconds(2000)));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("process 4711"), std::string::npos) << error.what();
  }
}

TEST(PeerProcesses, ASilentProcessEndsTheFetchInTime) {
  FalseSocket silent;
  IpcSocket mine(*ShmRegistry::instance());
  const auto began = Clock::now();
  EXPECT_THROW((void)mine.fetch({{ArenaId{1, 2}, silent.name(), getpid()}}, Deadline::after(milliseconds(300))), Error);
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
}

/// As the seccomp profiles of older container runtimes do.
void forbid_pidfd_open() {
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{4, filter};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program), 0);
}

/// Memory of two processes that fetch each other's arenas.
struct SharedState {
  ArenaId ids[2];
  char sockets[2][64];
  pid_t pids[2];  ///< as each sees its own
  std::atomic<int> here[2], fetched[2];
  std::atomic<int> verdict;  ///< of the inner process: 1 if it counts the outer one as alive, else 2
};

std::shared_ptr<PeerProcess> fetch_peer(SharedState& shared_state, int me, IpcSocket& ipc) {
  const auto here = ShmRegistry::instance();
  shared_state.ids[me] = here->arena().id();
  std::strncpy(shared_state.sockets[me], ipc.name().c_str(), sizeof shared_state.sockets[me] - 1);
  shared_state.pids[me] = getpid();
  shared_state.here[me] = 1;
  const int other = 1 - me;
  const auto both = [&](std::atomic<int>(&flags)[2]) {
    return eventually(milliseconds(20'000), [&] { return ipc.serve(milliseconds(1)), flags[other] == 1; });
  };
  if (!both(shared_state.here)) return nullptr;
  const ArenaId& id = shared_state.ids[other];
  const auto fetched =
      ipc.fetch({{id, shared_state.sockets[other], shared_state.pids[other]}}, Deadline::after(milliseconds(20'000)));
  shared_state.fetched[me] = 1;
  return both(shared_state.fetched) ? fetched.at(id) : nullptr;
}

/// Two containers of a pod whose seccomp profile has no pidfd_open. One process sees the other, by another pid than the
/// other's own; the other does not see the first.
TEST(PeerProcesses, OfAnotherPidNamespaceAreNotTakenForOtherProcesses) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  void* const shared = mmap(nullptr, sizeof(SharedState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SharedState& shared_state = *new (shared) SharedState{};
  const pid_t probe = fork();
  if (probe == 0) _exit(unshare(CLONE_NEWPID) == 0 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(probe, &status, 0), probe);
  if (status != 0) GTEST_SKIP() << "this user cannot make a pid namespace";
  all_end_well(1, [&](int) {
    forbid_pidfd_open();
    const auto here = ShmRegistry::instance();
    ASSERT_EQ(unshare(CLONE_NEWPID), 0);  // for the next child
    const pid_t inner = fork();
    if (inner == 0) {
      const auto own = ShmRegistry::instance();
      IpcSocket ipc(*own);
      const auto outer = fetch_peer(shared_state, 1, ipc);
      const bool alive = outer && !outer->dead() && outer->process().state().empty() && !outer->exit_status().known();
      shared_state.verdict = alive && getpid() == 1 ? 1 : 2;
      for (;;) pause();
    }
    IpcSocket ipc(*here);
    const auto process = fetch_peer(shared_state, 0, ipc);
    ASSERT_TRUE(process);
    EXPECT_EQ(process->pid(), 1);
    EXPECT_FALSE(process->dead());
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return shared_state.verdict != 0; }));
    EXPECT_EQ(shared_state.verdict, 1);
    kill(inner, SIGKILL);
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return process->dead(); }));
    EXPECT_EQ(process->exit_status(), (nvx::ExitStatus{nvx::ExitStatus::How::kKilled, 9}));
    EXPECT_EQ(waitpid(inner, nullptr, 0), inner);
  });
  munmap(shared, sizeof(SharedState));
}

/// A process that calls exec() keeps its pid, and its memory is gone. Its own child has inherited all of its
/// descriptors.
TEST(PeerProcesses, AProcessThatRunsAnotherProgramHasEnded) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  void* const shared = mmap(nullptr, sizeof(SharedState), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SharedState& shared_state = *new (shared) SharedState{};
  all_end_well(1, [&](int) {
    const auto here = ShmRegistry::instance();
    const pid_t child = fork();
    if (child == 0) {
      const auto own = ShmRegistry::instance();
      IpcSocket ipc(*own);
      (void)fetch_peer(shared_state, 1, ipc);
      if (fork() == 0) _exit(int(sleep(1)));
      execlp("sleep", "sleep", "20", nullptr);
      _exit(1);
    }
    IpcSocket ipc(*here);
    const auto process = fetch_peer(shared_state, 0, ipc);
    ASSERT_TRUE(process);
    EXPECT_TRUE(eventually(milliseconds(2'000), [&] { return process->dead(); }));
    EXPECT_EQ(text_of(process->exit_status(), "<", ">"), "<exec of another program>");
    EXPECT_EQ(kill(child, SIGKILL), 0) << "the process itself lives";
    EXPECT_EQ(waitpid(child, nullptr, 0), child);
  });
  munmap(shared, sizeof(SharedState));
}

/// The state change of a process, once there is one.
std::string news_of(const ProcessWatch& process) {
  std::string change;
  (void)eventually(milliseconds(2'000), [&] { return !(change = process.state_change()).empty(); });
  return change;
}

TEST(ProcessWatch, ReportsThatAProcessIsStoppedAndThatItRunsAgain) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const pid_t child = fork();
  if (child == 0) {
    for (;;) pause();
  }
  const ProcessWatch process(Fd(), child);
  EXPECT_EQ(process.state_change(), "");
  kill(child, SIGSTOP);
  EXPECT_EQ(news_of(process), "is stopped by a signal (state T)");
  EXPECT_EQ(process.state_change(), "") << "once";
  kill(child, SIGCONT);
  EXPECT_EQ(news_of(process), "runs again");
  EXPECT_FALSE(process.ended());
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(process.ended());
}

TEST(ProcessWatch, ReportsThatTheMainThreadHasEnded) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const pid_t child = fork();
  if (child == 0) {
    std::thread([] { std::this_thread::sleep_for(std::chrono::seconds(20)), _exit(0); }).detach();
    syscall(SYS_exit, 0);
  }
  const ProcessWatch process(Fd(), child);
  EXPECT_EQ(news_of(process), "is without its main thread, which has ended while others run (state Z)");
  EXPECT_FALSE(process.ended());
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

/// A debugger holds it at the end, as the kernel does while it writes the core: its files are still open.
TEST(ProcessWatch, ReportsThatASignalHasEndedItWhileItsFilesAreOpen) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const auto handler = signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would end the child by an exit
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
  }
  signal(SIGSEGV, handler);
  const ProcessWatch process(Fd(), child);
  if (ptrace(PTRACE_SEIZE, child, nullptr, PTRACE_O_TRACEEXIT) != 0) {
    kill(child, SIGKILL);
    (void)waitpid(child, nullptr, 0);
    GTEST_SKIP() << "no ptrace here";
  }
  EXPECT_EQ(process.state_change(), "");
  EXPECT_FALSE(process.ended());
  kill(child, SIGSEGV);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ptrace(PTRACE_CONT, child, nullptr, SIGSEGV);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status >> 8, SIGTRAP | PTRACE_EVENT_EXIT << 8);
  EXPECT_TRUE(eventually(milliseconds(2'000), [&] { return process.state_change().empty() && process.ended(); }));
  // Linux before 5.17 reports the signal only when all has ended.
  const std::string early = text_of(process.exit_status());
  EXPECT_TRUE(early == "signal 11" || early.empty()) << early;
  EXPECT_FALSE(process.torn_down());
  ptrace(PTRACE_CONT, child, nullptr, 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(process.torn_down());
  EXPECT_EQ(text_of(process.exit_status()), "signal 11");
}

}  // namespace
}  // namespace nvx::test
