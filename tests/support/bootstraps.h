#pragma once

#include <string>

#include "memory/gpu/peer_mappings.h"

namespace nvx::test {

/// A table in memory that forked processes share, for ranks as processes or as threads. Create it before the fork, and
/// give each rank a SharedBootstrap on it.
class SharedTable {
 public:
  explicit SharedTable(int ranks);
  ~SharedTable();
  SharedTable(const SharedTable&) = delete;
  SharedTable& operator=(const SharedTable&) = delete;

  int ranks() const { return ranks_; }

 private:
  friend class SharedBootstrap;
  struct Cell;
  Cell& cell(int round, int rank) const;

  int ranks_;
  void* memory_;
};

class SharedBootstrap : public Bootstrap {
 public:
  SharedBootstrap(const SharedTable& table, int rank) : table_(table), rank_(rank) {}
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override;

 private:
  const SharedTable& table_;
  int rank_;
  int round_ = 0;
};

}  // namespace nvx::test
