#include "torch/core/tensors.h"

namespace nvx {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::kBool;
    case at::kByte: return DType::kU8;
    case at::kChar: return DType::kI8;
    case at::kUInt16: return DType::kU16;
    case at::kShort: return DType::kI16;
    case at::kUInt32: return DType::kU32;
    case at::kInt: return DType::kI32;
    case at::kUInt64: return DType::kU64;
    case at::kLong: return DType::kI64;
    case at::kHalf: return DType::kF16;
    case at::kBFloat16: return DType::kBF16;
    case at::kFloat: return DType::kF32;
    case at::kDouble: return DType::kF64;
    case at::kComplexFloat: return DType::kC64;
    case at::kComplexDouble: return DType::kC128;
    case at::kFloat8_e4m3fn: return DType::kF8E4M3FN;
    case at::kFloat8_e5m2: return DType::kF8E5M2;
    case at::kFloat8_e4m3fnuz: return DType::kF8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz: return DType::kF8E5M2FNUZ;
    case at::kFloat8_e8m0fnu: return DType::kF8E8M0FNU;
    default: return DType::kBytes;
  }
}

std::optional<at::ScalarType> torch_type_of(DType dtype) {
  for (int8_t i = 0; i < int8_t(at::ScalarType::NumOptions); ++i) {
    const auto type = at::ScalarType(i);
    if (dtype != DType::kBytes && dtype_of(type) == dtype) return type;
  }
  return std::nullopt;
}

}  // namespace nvx
