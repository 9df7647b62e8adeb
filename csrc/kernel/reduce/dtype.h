#pragma once

#include <cstddef>
#include <cstdint>

namespace nvx {

/// The element types that nvx can reduce. Data that is only moved may use kBytes.
enum class DType : uint8_t {
  kBytes,
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kC128,
  kF8E4M3FN,
  kF8E5M2,
  kF8E4M3FNUZ,
  kF8E5M2FNUZ,
  kF8E8M0FNU,
};

enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kPremulSum };

namespace kernel {

struct DTypeRow {
  const char* name;
  size_t bytes;
};

/// One row per DType, in the order of the enum.
inline constexpr DTypeRow kDTypes[] = {
    {"bytes", 1}, {"bool", 1},  {"u8", 1},       {"i8", 1},     {"u16", 2},        {"i16", 2},        {"u32", 4},
    {"i32", 4},   {"u64", 8},   {"i64", 8},      {"f16", 2},    {"bf16", 2},       {"f32", 4},        {"f64", 8},
    {"c64", 8},   {"c128", 16}, {"f8e4m3fn", 1}, {"f8e5m2", 1}, {"f8e4m3fnuz", 1}, {"f8e5m2fnuz", 1}, {"f8e8m0fnu", 1},
};
inline constexpr size_t kDTypeCount = sizeof(kDTypes) / sizeof(kDTypes[0]);
static_assert(kDTypeCount == size_t(DType::kF8E8M0FNU) + 1);

inline constexpr const char* kReduceOps[] = {"sum",  "avg", "product", "min",       "max",
                                             "band", "bor", "bxor",    "premul_sum"};
inline constexpr size_t kReduceOpCount = sizeof(kReduceOps) / sizeof(kReduceOps[0]);
static_assert(kReduceOpCount == size_t(ReduceOp::kPremulSum) + 1);

}  // namespace kernel

constexpr size_t size_of(DType t) { return kernel::kDTypes[size_t(t)].bytes; }
constexpr const char* name(DType t) { return kernel::kDTypes[size_t(t)].name; }
constexpr const char* name(ReduceOp op) { return kernel::kReduceOps[size_t(op)]; }

}  // namespace nvx
