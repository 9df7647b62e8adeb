"""Inputs whose result is known exactly in any order of addition, and the count of elements that differ from it.

The values are small whole numbers, few enough that any sum of them is exact in the dtype, so no tolerance is needed.
They repeat with a prime period, so data in the wrong place or a missing chunk is detected."""

from __future__ import annotations

import functools

import torch

from .collectives import Collective

PERIOD = 8191

DTYPES: dict[str, torch.dtype] = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
    "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2, "bool": torch.bool, "complex64": torch.complex64,
}  # fmt: skip
DTYPE_ALIASES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
DTYPE_ALIASES |= {"fp32": "float", "fp64": "double", "fp16": "half", "bf16": "bfloat16"}
_STEPS = {
    "sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum, "avg": torch.add,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
OPS = tuple(_STEPS)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)

# The largest whole number below which every whole number is exact, and the largest finite power of two.
_EXACT = {
    torch.float32: 1 << 24, torch.float64: 1 << 53, torch.float16: 2048, torch.bfloat16: 256,
    torch.float8_e4m3fn: 16, torch.float8_e5m2: 8, torch.int8: 127, torch.uint8: 255, torch.int16: 32767,
    torch.bool: 1,
}  # fmt: skip
_POWERS = {torch.float8_e4m3fn: 8, torch.int8: 6, torch.uint8: 7, torch.bool: 0}


def dtype_of(name: str) -> tuple[str, torch.dtype]:
    """nccl-tests' name and torch's dtype for a name of either."""
    key = DTYPE_ALIASES.get(name, name)
    if key not in DTYPES:
        raise ValueError(f"no dtype '{name}': there are {', '.join(DTYPES)}")
    return key, DTYPES[key]


def meaningful(op: str, dtype: torch.dtype) -> bool:
    """Whether torch defines this reduction for this dtype (a backend may still refuse it)."""
    if op in ("band", "bor", "bxor"):
        return dtype in INTEGERS
    if dtype.is_complex:
        return op in ("sum", "avg")
    return not (dtype == torch.bool and op == "avg")


def _noise(rank: int, salt: int) -> torch.Tensor:
    """PERIOD pseudo-random whole numbers, the same on every rank that requests those of `rank`."""
    word = 0xFFFFFFFF
    mixed = torch.arange(PERIOD, dtype=torch.int64) * 0x1E3779B1
    mixed = (mixed + (rank + 1) * 0x05EBCA6B + salt * 0x42B2AE35) & word
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & word
    return ((mixed ^ (mixed >> 12)) * 0x297A2D39 & word) >> 12


def pattern(op: str, dtype: torch.dtype, ranks: int, rank: int, salt: int = 0) -> torch.Tensor:
    """One period of the input of `rank`, as int64: few enough values that `op` over all ranks stays exact."""
    noise = _noise(rank, salt)
    exact = _EXACT.get(dtype, 1 << 31)
    if op == "prod":
        doubles = _POWERS.get(dtype, 15)
        return 1 + noise % 2 if rank < doubles else torch.ones_like(noise)
    if op in ("sum", "avg"):
        scale = ranks if op == "avg" else 1
        values = scale * (noise % max(2, min(97, exact // (scale * ranks))))
        return values if rank < exact // scale or dtype == torch.bool else torch.zeros_like(noise)
    return noise % max(2, min(97, exact + 1))


def reduced(op: str, dtype: torch.dtype, ranks: int, salt: int = 0) -> torch.Tensor:
    """One period of the exact reduction of every rank's pattern, in `dtype`."""
    rows = [pattern(op, dtype, ranks, rank, salt) for rank in range(ranks)]
    out = functools.reduce(_STEPS[op], rows)
    if op == "avg":
        out = out // ranks if dtype in INTEGERS else out.float() / ranks
    return as_dtype(out, dtype)


def as_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds once to `dtype` (fp8 by way of float32, which holds these values exactly)."""
    return values.float().to(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else values.to(dtype)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be compared: torch has no comparison for fp8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _spread(tensor: torch.Tensor, period: torch.Tensor, offset: int):
    """Pairs of (part of the tensor, its expected values): the body as rows of one period, then the tail."""
    turned = torch.roll(period, -(offset % PERIOD))
    rows = tensor.numel() // PERIOD
    body = tensor[: rows * PERIOD]
    if rows:
        yield body.view(rows, PERIOD), turned
    if rows * PERIOD < tensor.numel():
        yield tensor[rows * PERIOD :], turned[: tensor.numel() - rows * PERIOD]


def fill(tensor: torch.Tensor, period: torch.Tensor, offset: int = 0) -> None:
    """Sets element i to period[(i + offset) mod PERIOD]."""
    for part, values in _spread(_raw(tensor), _raw(period), offset):
        part.copy_(values.expand_as(part))


def wrong(tensor: torch.Tensor, period: torch.Tensor, offset: int = 0) -> int:
    """The number of elements that differ from the values of `fill`."""
    pairs = _spread(_raw(tensor), _raw(period), offset)
    return sum(int((part != values.to(part.device)).sum()) for part, values in pairs)


def poison(tensor: torch.Tensor) -> None:
    """Overwrites the tensor with a value that no pattern holds, so an unwritten output counts as wrong."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.view(torch.uint8).fill_(0x6B)


def expected(
    row: Collective, op: str, dtype: torch.dtype, ranks: int, rank: int, root: int, block: int, salt: int
) -> list[tuple[int, int, torch.Tensor, int]] | None:
    """The expected output of `rank`: (first element, elements, period, offset), or None if its contents are undefined.

    `block` is one rank's part of the message, in elements; a count of -1 means to the end."""

    def sent(source: int) -> torch.Tensor:
        return as_dtype(pattern(op, dtype, ranks, source, salt), dtype)

    if row.name == "all_reduce" or (row.name == "reduce" and rank == root):
        return [(0, -1, reduced(op, dtype, ranks, salt), 0)]
    if row.name == "broadcast":
        return [(0, -1, sent(root), 0)]
    if row.name == "all_gather" or (row.name == "gather" and rank == root):
        return [(k * block, block, sent(k), 0) for k in range(ranks)]
    if row.name == "reduce_scatter":
        return [(0, -1, reduced(op, dtype, ranks, salt), rank * block)]
    if row.name == "all_to_all":
        return [(k * block, block, sent(k), rank * block) for k in range(ranks)]
    if row.name == "scatter":
        return [(0, -1, sent(root), rank * block)]
    if row.name == "sendrecv" and (rank ^ 1) < ranks:
        return [(0, -1, sent(rank ^ 1), 0)]
    return None
