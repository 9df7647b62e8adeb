#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/hash.h"
#include "group/core/core.h"
#include "group/plan/operation.h"

namespace nvx {

/// Runs a collective of the group. See `Group::execute()`.
using Execute = std::function<Status(Operation&)>;

/// Gathers one value of each rank, by rank, as operation `number`. The fingerprint has the purpose, so a rank that
/// calls another collective is a mismatch. Throws Error.
template <class T>
std::vector<T> gather(const Core& core, const Execute& execute, uint64_t number, std::string_view purpose,
                      const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto ranks = size_t(core.members.size());
  std::vector<T> all(ranks);
  Operation operation;
  operation.collective = kernel::Collective::kAllGather;
  operation.number = number;
  operation.count = ranks * sizeof(T);
  operation.shape = Hash().add(purpose).value();
  operation.in = reinterpret_cast<const std::byte*>(&mine);
  operation.recv = Pieces(ranks);
  for (size_t r = 0; r < ranks; ++r) operation.recv[r] = {reinterpret_cast<std::byte*>(&all[r]), sizeof(T)};
  if (const Status status = execute(operation); !status.ok()) throw Error(status);
  return all;
}

}  // namespace nvx
