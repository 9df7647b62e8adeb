#include "support/bootstraps.h"

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace nvx::test {
namespace {

constexpr int kRounds = 64;
constexpr size_t kMost = 8192;

}  // namespace

struct SharedTable::Cell {
  std::atomic<uint32_t> bytes;  // of the value, plus one
  std::byte data[kMost];
};

SharedTable::SharedTable(int ranks) : ranks_(ranks) {
  memory_ = mmap(nullptr, sizeof(Cell) * size_t(kRounds * ranks), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) throw system_error("mmap failed");
}

SharedTable::~SharedTable() { munmap(memory_, sizeof(Cell) * size_t(kRounds * ranks_)); }

SharedTable::Cell& SharedTable::cell(int round, int rank) const {
  return static_cast<Cell*>(memory_)[round * ranks_ + rank];
}

std::vector<std::vector<std::byte>> SharedBootstrap::all_gather(std::span<const std::byte> mine) {
  if (round_ >= kRounds || mine.size() > kMost) throw Error(Code::kInvalid, "nvx: too much for this table");
  SharedTable::Cell& own = table_.cell(round_, rank_);
  if (!mine.empty()) std::memcpy(own.data, mine.data(), mine.size());
  own.bytes.store(uint32_t(mine.size()) + 1, std::memory_order_release);
  std::vector<std::vector<std::byte>> all;
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(20'000));
  for (int r = 0; r < table_.ranks(); ++r) {
    SharedTable::Cell& cell = table_.cell(round_, r);
    uint32_t bytes = 0;
    while (!(bytes = cell.bytes.load(std::memory_order_acquire))) {
      if (deadline.passed(Clock::now())) throw Error(Code::kTimeout, "nvx: rank " + std::to_string(r) + " is silent");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    all.emplace_back(cell.data, cell.data + bytes - 1);
  }
  ++round_;
  return all;
}

}  // namespace nvx::test
