"""all_reduce, reduce and reduce_scatter: every dtype x operation x count x offset, bit for bit."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, SEVERAL_HOSTS, on_ranks, one_host, only_nvx
from reference import (
    BITWISE,
    COMPLEX,
    DTYPES,
    E8M0,
    FLOATS,
    INTEGERS,
    OPS,
    SMALL_FLOATS,
    assert_guards,
    assert_same,
    gloo_can,
    meaningful,
    placed,
    premul_sum,
    reduce_op,
    reduced,
    small_numbers,
    wild_bits,
)

ALL_OPS = [*OPS, *BITWISE, "premul_sum"]
PLACES = [(0, 0), (1, 1), (7, 3), (1000, 0), (1000, 5)]  # (count, element offset in the allocation)
FEW = (torch.float32, torch.bfloat16)
# Three ranks have every dtype and operator in tests/kernel/cpu and in test_device_contract.py, too.
THREE = pytest.param(3, marks=pytest.mark.slow)


def ops_of(dtype):
    """The valid operators over nvx; over gloo those that it serves."""
    return [op for op in ALL_OPS if meaningful(dtype, op) and (OVER_NVX or gloo_can(dtype, op))]


def check_all_reduce(inputs, op, offset, rank, what):
    """Returns the expected result."""
    tensor, want = placed(inputs[rank], offset), reduced(inputs, op)
    dist.all_reduce(tensor, reduce_op(op))
    assert_same(tensor, want, f"all_reduce {what}")
    assert_guards(tensor, f"all_reduce {what}")
    return want


def check_reduce(inputs, op, offset, rank, what, want):
    root = (inputs[0].numel() + offset) % len(inputs)
    tensor = placed(inputs[rank], offset)
    dist.reduce(tensor, root, reduce_op(op))
    if rank == root:
        assert_same(tensor, want, f"reduce to {root} {what}")
    assert_guards(tensor, f"reduce to {root} {what}")


def check_reduce_scatter(inputs, op, offset, rank, what):
    """`inputs` hold `world` equal parts each. Calls both forms, into an output at another offset."""
    world = len(inputs)
    want = reduced(inputs, op).chunk(world)[rank] if inputs[0].numel() else inputs[0]
    output = placed(torch.zeros_like(want), (offset * 3) % 16)
    source = placed(inputs[rank], offset)
    dist.reduce_scatter_tensor(output, source, reduce_op(op))
    assert_same(output, want, f"reduce_scatter_tensor {what}")
    assert_guards(output, f"reduce_scatter_tensor {what}")
    assert_same(source, inputs[rank], f"reduce_scatter_tensor {what}: its input")
    output = placed(torch.zeros_like(want), offset)
    parts = list(source.chunk(world)) if source.numel() else [source.clone() for _ in range(world)]
    dist.reduce_scatter(output, parts, reduce_op(op))
    assert_same(output, want, f"reduce_scatter {what}")
    assert_same(source, inputs[rank], f"reduce_scatter {what}: its input")


@one_host
@on_ranks(2, THREE, 4, limit=120)
def test_every_dtype_and_op(rank, world):
    for dtype in DTYPES:
        for count, offset in PLACES:
            inputs = [small_numbers(dtype, count, r) for r in range(world)]
            parts = [small_numbers(dtype, count * world, r, salt=1) for r in range(world)]
            for op in ops_of(dtype):
                what = f"{dtype} {op} count {count} offset {offset}"
                want = check_all_reduce(inputs, op, offset, rank, what)
                check_reduce(inputs, op, offset, rank, what, want)
                check_reduce_scatter(parts, op, offset, rank, what)


@one_host
@only_nvx
@on_ranks(2, THREE, 4, limit=120)
def test_any_bits(rank, world):
    """Inexact numbers too: rank order, one rounding, infinities, NaN, denormals, wrapping integers."""
    for dtype, count in itertools.product(DTYPES, (7, 1000, 5003)):
        wild = [wild_bits(dtype, count * world, r) for r in range(world)]
        for op in () if dtype in COMPLEX else ops_of(dtype):
            if dtype in INTEGERS and op == "avg":
                continue
            inputs = wild
            if dtype in FLOATS and op in ("min", "max"):  # the smaller of the two zeros is unspecified
                inputs = [torch.where(t.float() == 0, torch.zeros(()).to(dtype), t) for t in wild]
            what = f"{dtype} {op} count {count}, any bits"
            check_all_reduce(inputs, op, count % 3, rank, what)
            check_reduce_scatter(inputs, op, count % 3, rank, what)


@on_ranks(2, 4, limit=120)
def test_large(rank, world):
    few = world == 4 and not SEVERAL_HOSTS  # on one host, more ranks are no other way
    for dtype in FEW if few else DTYPES:
        if not OVER_NVX and not gloo_can(dtype, "sum"):
            continue
        inputs = [small_numbers(dtype, 70_001, r) for r in range(world)]
        op = "product" if dtype is E8M0 else "sum"  # exact, so that several hosts may round it
        check_all_reduce(inputs, op, 1, rank, f"{dtype} {op} count 70001")
    for dtype, op in (
        (torch.float32, "sum"),
        (torch.float32, "avg"),
        (torch.bfloat16, "sum"),
        (torch.uint8, "max"),
    ):
        if (few and dtype not in FEW) or (not OVER_NVX and not gloo_can(dtype, op)):
            continue
        inputs = [small_numbers(dtype, 2_000_003, r) for r in range(world)]
        want = check_all_reduce(inputs, op, 3, rank, f"{dtype} {op} count 2000003")
        check_reduce(inputs, op, 3, rank, f"{dtype} {op} count 2000003", want)
        inputs = [small_numbers(dtype, 500_009 * world, r) for r in range(world)]
        check_reduce_scatter(inputs, op, 1, rank, f"{dtype} {op} count 500009 each")


@one_host
@only_nvx
@on_ranks(2, 3, 4)
def test_same_bits_at_every_size(rank, world):
    """Equal elements give equal bits, alone or in a large tensor, with every algorithm."""
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        inputs = [wild_bits(dtype, 300_007, r) for r in range(world)]
        whole = inputs[rank].clone()
        dist.all_reduce(whole)
        assert_same(whole, reduced(inputs, "sum"), f"{dtype} whole")
        for start, count in ((0, 1), (5, 64), (777, 4_099), (1, 131_071)):
            part = placed(inputs[rank][start : start + count], 1)
            dist.all_reduce(part)
            assert_same(part, whole[start : start + count], f"{dtype} [{start}, +{count})")


@only_nvx
@on_ranks(2)
def test_subnormals_stay_whatever_the_thread_flushes(rank, world):
    """The caller or a thread of nvx computes, and only the caller's mode is the program's."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)):
            for count in (3, 300_000):
                for asynchronous in (False, True):
                    x = torch.full((count,), 70, dtype=bits).view(dtype)
                    work = dist.all_reduce(x, async_op=asynchronous)
                    if work:
                        time.sleep(0.1 * rank)
                        work.wait()
                    assert torch.equal(x.view(bits), torch.full((count,), 140, dtype=bits)), (dtype, count)
                    x = torch.full((count,), 70, dtype=bits).view(dtype)
                    dist.all_reduce(x, op=dist.ReduceOp.AVG)
                    assert torch.equal(x.view(bits), torch.full((count,), 70, dtype=bits)), (dtype, count)
        small = torch.full((1,), 70, dtype=torch.int32).view(torch.float32)
        assert (small * 1).item() == 0, "the program's mode is as it was"
    finally:
        torch.set_flush_denormal(False)


@only_nvx
@on_ranks(3)
def test_premul_sum_takes_any_factor(rank, world):
    inputs = [small_numbers(torch.float64, 100, r) for r in range(world)]
    for factor in (2.0, 0.5, -3.0, torch.tensor([4.0])):
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, premul_sum(factor))
        scaled = [t * float(factor) for t in inputs]
        assert_same(tensor, scaled[0] + scaled[1] + scaled[2], f"factor {factor}")
    for factor, dtype in ((1 / 3, torch.float32), (1 / 3, torch.float64), (1 / 7, torch.bfloat16)):
        parts = [wild_bits(dtype, 100, r) for r in range(world)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor, premul_sum(factor))
        wide = [t.float() if dtype in SMALL_FLOATS else t for t in parts]
        want = (wide[0] * factor + wide[1] * factor + wide[2] * factor).to(dtype)
        assert_same(tensor, want, f"{dtype} factor {factor}")


@only_nvx
@on_ranks(2)
def test_meaningless_operators_are_refused(rank, world):
    """Every rank raises an argument error before any traffic; the group still works."""
    for dtype in DTYPES:
        for op in ALL_OPS:
            if meaningful(dtype, op) or (dtype in INTEGERS and op == "premul_sum"):
                continue
            with pytest.raises((ValueError, TypeError)):
                dist.all_reduce(small_numbers(dtype, 4, rank), reduce_op(op))
            if dtype not in COMPLEX:  # `reduce` passes complex numbers unsplit to nvx, and their product is valid
                with pytest.raises((ValueError, TypeError)):
                    dist.reduce(small_numbers(dtype, 4, rank), 0, reduce_op(op))
    with pytest.raises(TypeError, match="^nvx: all_reduce: Cannot use ReduceOp.AVG with Boolean"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match=r"^nvx: all_reduce: Cannot use ReduceOp.BAND"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@only_nvx
@on_ranks(2, 3)
def test_complex_halves(rank, world):
    """torch supports few operations for them. If it does not split them into pairs, nvx does."""
    inputs = [torch.view_as_complex(small_numbers(torch.float16, world * 2 * 70, r).view(-1, 2)) for r in range(world)]
    for op in ("sum", "avg", "premul_sum"):
        want = torch.view_as_complex(reduced([torch.view_as_real(t) for t in inputs], op))
        tensor = inputs[rank].clone()
        dist.reduce(tensor, 0, reduce_op(op))
        if rank == 0:
            assert_same(torch.view_as_real(tensor), torch.view_as_real(want), f"reduce {op}")
        output = torch.zeros(70, dtype=torch.complex32)
        dist.reduce_scatter(output, list(inputs[rank].chunk(world)), reduce_op(op))
        assert_same(torch.view_as_real(output), torch.view_as_real(want.chunk(world)[rank]), f"reduce_scatter {op}")
    with pytest.raises(TypeError, match="PRODUCT with torch.complex32"):
        dist.reduce(inputs[rank].clone(), 0, reduce_op("product"))


@only_nvx
@on_ranks(2, 3)
def test_reduce_scatter_of_uneven_lists(rank, world):
    """reduce_scatter_v: rank r receives the sum of part r. The parts differ in size; some are empty."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for sizes in ([5, 1, 9], [0, 3, 70_001], [4, 0, 0], [1, 2, 3]):
            for op in ("sum", "avg", "max"):
                parts = [
                    [small_numbers(dtype, sizes[r], source, salt=r) for r in range(world)] for source in range(world)
                ]
                output = torch.zeros(sizes[rank], dtype=dtype)
                dist.reduce_scatter(output, parts[rank], reduce_op(op))
                want = reduced([parts[source][rank] for source in range(world)], op)
                assert_same(output, want, f"reduce_scatter_v {dtype} {op} {sizes}")


@on_ranks(2, 3)
def test_all_reduce_coalesced(rank, world):
    dtype = torch.float32
    for op in ("sum", "max") + (("avg", "premul_sum") if OVER_NVX else ()):
        sizes = [(3,), (0,), (7, 11), (70_001,)] if OVER_NVX else [(3,), (7, 11), (70_001,)]
        tensors = [small_numbers(dtype, torch.Size(s).numel(), rank, i).view(s) for i, s in enumerate(sizes)]
        work = dist.all_reduce_coalesced(tensors, reduce_op(op), async_op=True)
        work.wait()
        for i, (tensor, shape) in enumerate(zip(tensors, sizes, strict=True)):
            inputs = [small_numbers(dtype, torch.Size(shape).numel(), r, i).view(shape) for r in range(world)]
            assert_same(tensor, reduced(inputs, op), f"all_reduce_coalesced {op} tensor {i}")
