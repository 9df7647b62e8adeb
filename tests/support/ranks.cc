#include "support/ranks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace nvx::test {

namespace {

enum class Sanitizer { kNone, kThread, kAddress };

constexpr Sanitizer sanitizer() {
#if defined(__SANITIZE_THREAD__)
  return Sanitizer::kThread;
#elif defined(__SANITIZE_ADDRESS__)
  return Sanitizer::kAddress;
#elif defined(__has_feature)  // clang has no macros for them
#if __has_feature(thread_sanitizer)
  return Sanitizer::kThread;
#elif __has_feature(address_sanitizer)
  return Sanitizer::kAddress;
#endif
#endif
  return Sanitizer::kNone;
}

}  // namespace

bool is_sanitized() { return sanitizer() != Sanitizer::kNone; }

const char* why_no_processes() {
  if (sanitizer() == Sanitizer::kThread) return "ThreadSanitizer sees one process only; threads are its part";
  if (std::getenv("NVX_TEST_EMULATED")) return "the emulator cannot fork a process that has threads";
  return nullptr;
}

void as_threads(int ranks, const Body& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([rank, &body] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

namespace {

[[noreturn]] void run_child(int rank, const Body& body) {
  try {
    body(rank);
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
  }
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

}  // namespace

std::vector<Ending> as_processes(int ranks, const Body& body) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) run_child(rank, body);
    children.push_back(child);
  }
  std::vector<Ending> endings;
  for (const pid_t child : children) {
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) {
      endings.push_back({-1, 0});
    } else {
      endings.push_back({WIFEXITED(status) ? WEXITSTATUS(status) : 0, WIFSIGNALED(status) ? WTERMSIG(status) : 0});
    }
  }
  return endings;
}

void all_end_well(int ranks, const Body& body) {
  const std::vector<Ending> endings = as_processes(ranks, body);
  for (size_t rank = 0; rank < endings.size(); ++rank) {
    EXPECT_TRUE(endings[rank].well()) << "rank " << rank << ": exit code " << endings[rank].exit_code << ", signal "
                                      << endings[rank].signal;
  }
}

}  // namespace nvx::test
