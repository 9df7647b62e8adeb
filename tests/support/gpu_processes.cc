#include "support/gpu_processes.h"

#include <dirent.h>
#include <gtest/gtest.h>

namespace nvx::test {

std::string unreleased_at_rest(const FakeDriver& driver) {
  (void)eventually(std::chrono::seconds(10), [&] { return driver.unreleased().empty(); });
  return driver.unreleased();
}

int open_fds() {
  int count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir)) ++count;
  closedir(dir);
  return count;
}

void write_and_look(const PeerMappings& mappings, Bootstrap& bootstrap, int rank, int ranks) {
  const Span span = mappings.arena().allocate(65536);
  const auto offsets = bootstrap.all_gather(std::as_bytes(std::span(&span.offset, 1)));
  for (int r = 0; r < ranks; ++r) {
    size_t offset = 0;
    std::memcpy(&offset, offsets[size_t(r)].data(), sizeof offset);
    *memory(mappings.peer(r).theirs + offset + size_t(rank) * 8) = std::byte(10 * rank + r);
  }
  (void)bootstrap.all_gather({});
  for (int r = 0; r < ranks; ++r) {
    EXPECT_EQ(*memory(mappings.peer(r).mine + span.offset + size_t(r) * 8), std::byte(10 * r + rank)) << r;
  }
  (void)bootstrap.all_gather({});
  mappings.arena().free(span);
}

}  // namespace nvx::test
