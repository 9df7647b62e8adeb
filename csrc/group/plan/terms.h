#pragma once

#include <cstddef>

#include "kernel/reduce/dtype.h"

namespace nvx {

/// How the elements of all ranks of several hosts are combined. The ranks of each host are combined first, and what
/// goes from host to host after that is rounded to the tensor's type. An average is a sum that is divided once, at the
/// end, when all hosts are in it.
///
/// The sum of many elements may be larger than their type can hold, although their average is not. On one host such a
/// sum never leaves the wider type that it is accumulated in. So that it need not fit its type between hosts either,
/// types that are accumulated in a wider one have each rank's element multiplied by a power of two first, which makes
/// the sum one to two times as large as the average. Multiplying by a power of two changes no digit, so the bits are
/// those of the plain sum; only what is smaller than the type's least normal number may lose up to the type's least
/// number, once for each host.
struct Terms {
  ReduceOp inside = ReduceOp::kSum;   ///< of the ranks of a host
  double factor = 1;                  ///< of this rank's element, where `inside` is kPremulSum
  ReduceOp between = ReduceOp::kSum;  ///< of what the hosts have
  double divisor = 1;                 ///< of what comes out of that; 1: nothing is divided

  bool scales() const { return inside == ReduceOp::kPremulSum; }
};

/// Pure, and the same on every rank, but for the factor that the ranks of a premul_sum choose for themselves.
Terms terms_of(DType dtype, ReduceOp op, double factor, size_t ranks);

}  // namespace nvx
