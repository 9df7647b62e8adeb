#pragma once

#include <cstddef>

#include "kernel/reduce/dtype.h"

namespace nvx {

/// How the elements of all ranks of several hosts are combined. The ranks of each host are combined first, and that
/// result is rounded to the tensor's type before it goes to other hosts. An average is a sum that is divided once, at
/// the end, over all hosts.
///
/// The sum of many elements may overflow their type although their average does not. On one host the sum stays in the
/// wider accumulator. Between hosts it does not, so for types with a wider accumulator each rank's element is first
/// multiplied by a power of two, which makes the sum one to two times the average. Multiplication by a power of two is
/// exact, so the bits are those of the plain sum. Only values below the type's least normal number may lose up to its
/// least number, once per host.
struct ReductionSplit {
  ReduceOp inside = ReduceOp::kSum;   ///< over the ranks of a host
  double factor = 1;                  ///< for this rank's element, if `inside` is kPremulSum
  ReduceOp between = ReduceOp::kSum;  ///< over the hosts' results
  double divisor = 1;                 ///< for the result; 1: no division

  bool scales() const { return inside == ReduceOp::kPremulSum; }
};

/// Pure, and the same on every rank, except for the factor of a premul_sum, which each rank chooses.
ReductionSplit split_of(DType dtype, ReduceOp op, double factor, size_t ranks);

}  // namespace nvx
