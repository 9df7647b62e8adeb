"""Inputs that every rank can compute for every other, expected results of collectives, exact comparison.

The rule for reductions: ranks are added in rank order; f16, bf16 and fp8 accumulate in f32 and round once; integers
wrap; AVG divides the accumulator once, integers towards zero; MIN and MAX pass NaN on.
"""

from functools import reduce as fold

import numpy as np
import torch
import torch.distributed as dist

E8M0 = torch.float8_e8m0fnu  # powers of two, without sign or zero
F8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, E8M0]
SMALL_FLOATS = [torch.float16, torch.bfloat16, *F8]
FLOATS = [torch.float64, torch.float32, *SMALL_FLOATS]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = SIGNED + UNSIGNED
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]

R = dist.ReduceOp
OPS = {"sum": R.SUM, "avg": R.AVG, "product": R.PRODUCT, "min": R.MIN, "max": R.MAX}
BITWISE = {"band": R.BAND, "bor": R.BOR, "bxor": R.BXOR}
FACTOR = 0.25  # exact in every float type


def premul_sum(factor=FACTOR):
    return dist._make_nccl_premul_sum(factor)


def reduce_op(name):
    return premul_sum() if name == "premul_sum" else {**OPS, **BITWISE}[name]


def meaningful(dtype, op):
    """Whether `torch.distributed` offers this reduction for the type; it shows complex tensors as pairs of reals."""
    if op in BITWISE:
        return dtype in INTEGERS or dtype is torch.bool
    if op == "avg":
        return dtype is not torch.bool
    if op == "premul_sum":
        return dtype in FLOATS or dtype in COMPLEX
    return op == "sum" or dtype not in COMPLEX


def gloo_can(dtype, op):
    """Whether gloo serves this cell of the same table, for runs with `NVX_TEST_BACKEND=gloo`."""
    served = [
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.complex64,
    ]
    floats = dtype.is_floating_point or dtype.is_complex
    return (
        dtype in served
        and op != "premul_sum"
        and not (op in BITWISE and floats)
        and (op != "avg" or dtype.is_floating_point)
    )


# --- inputs -------------------------------------------------------------------------------------------------


def hashed(count, rank, salt=0):
    """A fixed sequence of non-negative 63-bit numbers, different for each rank and salt."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(rank * 1_000_003 + salt * 7_919 + 1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return x >> np.uint64(1)


def small_numbers(dtype, count, rank, salt=0):
    """Small whole numbers: sums and products over four ranks are exact in f32 and wider types."""
    numbers = (hashed(count, rank, salt) % np.uint64(7)).astype(np.int64)
    if dtype is torch.bool:
        return torch.from_numpy(numbers % 2 == 0)
    if dtype in UNSIGNED:
        return from_numpy(numbers, dtype)
    if dtype in COMPLEX:
        return torch.complex(torch.from_numpy(numbers - 3.0), torch.from_numpy((numbers * 5) % 7 - 3.0)).to(dtype)
    if dtype is E8M0:
        return torch.from_numpy(2.0 ** (numbers - 3)).to(dtype)
    return torch.from_numpy(numbers - 3).to(torch.float32 if dtype in FLOATS else dtype).to(dtype)


def numbers(rank, *shape, dtype=torch.float32):
    return small_numbers(dtype, torch.Size(shape).numel(), rank).view(shape)


def ones(count=10, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)


def wild_bits(dtype, count, rank, salt=0):
    """Arbitrary bits: floats include infinities, NaN and denormals."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        return small_numbers(dtype, count, rank, salt)
    if count == 0:
        return torch.empty(0, dtype=dtype)
    words = hashed(-(-count * size // 8), rank, salt) * np.uint64(3)
    return torch.from_numpy(words.view(np.uint8)[: count * size].copy()).view(dtype)


def from_numpy(array, dtype):
    return torch.from_numpy(np.ascontiguousarray(array).astype(numpy_type(dtype)))


def numpy_type(dtype):
    return np.dtype(str(dtype).removeprefix("torch."))


def placed(tensor, offset):
    """A copy of tensor inside a larger allocation, `offset` elements off its start, with guards around it."""
    guarded = torch.zeros(tensor.numel() + 2 * 16, dtype=tensor.dtype)
    bytes_of(guarded).fill_(0x5A)
    view = guarded[offset : offset + tensor.numel()]
    view.copy_(tensor.flatten())
    return view.view(tensor.shape)


def assert_guards(view, what=""):
    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    start = view.storage_offset()
    for part in (whole[:start], whole[start + view.numel() :]):
        assert bool((bytes_of(part) == 0x5A).all()), f"{what}: wrote outside the tensor"


# --- expected results ---------------------------------------------------------------------------------------


def reduced(inputs, op):
    """The reduction of one tensor per rank, by the rule above."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        table = dict.fromkeys(("sum", "max", "bor"), torch.logical_or) | {"bxor": torch.logical_xor}
        return fold(table.get(op, torch.logical_and), inputs)
    if dtype in INTEGERS:
        return from_numpy(_reduced_integers([t.numpy() for t in inputs], op), dtype)
    wide = [t.float() if dtype in SMALL_FLOATS else t for t in inputs]
    if op == "premul_sum":
        wide = [each_real(t, lambda x: x * FACTOR) for t in wide]
    if op in ("sum", "avg", "premul_sum"):
        total = fold(torch.add, wide)
        return rounded(each_real(total, lambda x: x / len(inputs)) if op == "avg" else total, dtype)
    return rounded(fold({"product": torch.mul, "min": torch.minimum, "max": torch.maximum}[op], wide), dtype)


def rounded(wide, dtype):
    """The final rounding as in torch 2.13: earlier versions overflow e4m3fn to NaN instead of 448."""
    return (wide.clamp(-448, 448) if dtype is torch.float8_e4m3fn else wide).to(dtype)


def each_real(tensor, change):
    """Applies `change` to the tensor, for complex numbers to each part separately: complex arithmetic may round
    otherwise."""
    return torch.view_as_complex(change(torch.view_as_real(tensor))) if tensor.is_complex() else change(tensor)


def _reduced_integers(arrays, op):
    with np.errstate(over="ignore"):
        if op == "avg":
            total = fold(np.add, arrays)
            part = np.array(len(arrays), dtype=total.dtype)
            quotient = total // part
            return quotient + ((quotient < 0) & (quotient * part != total)).astype(total.dtype)
        table = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}
        table |= {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
        return fold(table[op], arrays)


# --- comparison ---------------------------------------------------------------------------------------------


def bytes_of(tensor):
    """The bytes of a tensor; a view if the tensor is contiguous."""
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def is_nan(tensor):
    return torch.isnan(tensor.float() if tensor.dtype in SMALL_FLOATS else tensor)


def assert_same(got, want, what=""):
    """Asserts equality bit for bit; any NaN equals any NaN."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    size = max(1, got.element_size())
    differs = (bytes_of(got).view(-1, size) != bytes_of(want).view(-1, size)).any(1)
    if bool(differs.any()) and (want.dtype.is_floating_point or want.dtype.is_complex):
        parts = [torch.view_as_real(t.contiguous()) if t.is_complex() else t for t in (got, want)]
        nan = [is_nan(p).reshape(got.numel(), -1) for p in parts]
        same = bytes_of(parts[0]).view(got.numel(), nan[0].shape[1], -1) == bytes_of(parts[1]).view(
            got.numel(), nan[0].shape[1], -1
        )
        differs = ~(same.all(2) | (nan[0] & nan[1])).all(1)
    if bool(differs.any()):
        at = int(differs.nonzero()[0])
        elements = [t.contiguous().flatten()[at : at + 1] for t in (got, want)]
        shown = [
            f"{e.tolist() if e.dtype not in F8 else e.float().tolist()} ({bytes_of(e).tolist()})" for e in elements
        ]
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {got.numel()} wrong, first at {at}: {shown[0]}, want {shown[1]}"
        )
