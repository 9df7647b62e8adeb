"""Collectives that only move data: broadcast, gathers, scatter, all_to_all; even and uneven, all dtypes."""

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, SEVERAL_HOSTS, TORCH, on_ranks, only_nvx
from reference import DTYPES, assert_guards, assert_same, placed, small_numbers, wild_bits

PLACES = [(0, 0), (1, 1), (7, 3), (1000, 0), (1000, 5)]  # (count, element offset in the allocation)
GLOO_MOVES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
MOVED = DTYPES if OVER_NVX else GLOO_MOVES
LARGE = (torch.uint8, torch.bfloat16, torch.float32, torch.complex128) if OVER_NVX else (torch.uint8, torch.float32)


def cells():
    for dtype in MOVED:
        for count, offset in PLACES:
            if count or OVER_NVX:
                yield dtype, count, offset, f"{dtype} count {count} offset {offset}"


def check_broadcast(dtype, count, offset, rank, world, what):
    for root in range(world):
        want = wild_bits(dtype, count, root)
        tensor = placed(wild_bits(dtype, count, rank), offset)
        dist.broadcast(tensor, root)
        assert_same(tensor, want, f"broadcast from {root} {what}")
        assert_guards(tensor, f"broadcast from {root} {what}")


def check_all_gather(dtype, count, offset, rank, world, what):
    want = [wild_bits(dtype, count, r) for r in range(world)]
    source = placed(want[rank], offset)
    outputs = [placed(torch.zeros_like(source), (offset + r) % 16) for r in range(world)]
    dist.all_gather(outputs, source)
    for r, output in enumerate(outputs):
        assert_same(output, want[r], f"all_gather {what}: part {r}")
        assert_guards(output, f"all_gather {what}: part {r}")
    whole = placed(torch.zeros(count * world, dtype=dtype), offset * 2)
    dist.all_gather_into_tensor(whole, source)
    assert_same(whole, torch.cat(want), f"all_gather_into_tensor {what}")
    assert_guards(whole, f"all_gather_into_tensor {what}")
    if OVER_NVX:
        stacked = torch.zeros(world, count, dtype=dtype)
        dist.all_gather_into_tensor(stacked, source)
        assert_same(stacked, torch.stack(want), f"all_gather_into_tensor, stacked {what}")
        flat = torch.zeros(1, world * count, dtype=dtype)  # the shape that SyncBatchNorm uses
        dist.all_gather_into_tensor(flat, source)
        assert_same(flat[0], torch.cat(want), f"all_gather_into_tensor, flat {what}")


def check_gather_and_scatter(dtype, count, offset, rank, world, what):
    for root in range(world):
        want = [wild_bits(dtype, count, r, root) for r in range(world)]
        outputs = [placed(torch.zeros(count, dtype=dtype), offset) for _ in range(world)] if rank == root else None
        dist.gather(placed(want[rank], offset), outputs, dst=root)
        for r, output in enumerate(outputs or ()):
            assert_same(output, want[r], f"gather to {root} {what}: part {r}")
            assert_guards(output, f"gather to {root} {what}: part {r}")
        output = placed(torch.zeros(count, dtype=dtype), offset)
        dist.scatter(output, [placed(t, r) for r, t in enumerate(want)] if rank == root else None, src=root)
        assert_same(output, want[rank], f"scatter from {root} {what}")
        assert_guards(output, f"scatter from {root} {what}")


def check_all_to_all(dtype, count, offset, rank, world, what):
    def sent(source):
        return wild_bits(dtype, count * world, source).view(world, count)

    want = torch.stack([sent(source)[rank] for source in range(world)])
    output = placed(torch.zeros_like(want), offset)
    dist.all_to_all_single(output, placed(sent(rank), (offset * 2) % 16))
    assert_same(output, want, f"all_to_all_single {what}")
    assert_guards(output, f"all_to_all_single {what}")
    if OVER_NVX or TORCH >= (2, 12):
        outputs = [placed(torch.zeros(count, dtype=dtype), offset) for _ in range(world)]
        dist.all_to_all(outputs, [placed(part, 1) for part in sent(rank)])
        assert_same(torch.stack(outputs), want, f"all_to_all {what}")


@on_ranks(2, 3, 4, limit=120)
def test_every_dtype(rank, world):
    for dtype, count, offset, what in cells():
        check_broadcast(dtype, count, offset, rank, world, what)
        check_all_gather(dtype, count, offset, rank, world, what)
        check_gather_and_scatter(dtype, count, offset, rank, world, what)
        check_all_to_all(dtype, count, offset, rank, world, what)


@on_ranks(2, 4, limit=120)
def test_large(rank, world):
    few = world == 4 and not SEVERAL_HOSTS  # on one host, more ranks are no other way
    for dtype in (torch.uint8, torch.float32) if few else LARGE:
        for count, offset in ((70_001, 1), (500_009, 0)):
            what = f"{dtype} count {count}"
            check_all_gather(dtype, count, offset, rank, world, what)
            check_all_to_all(dtype, count, offset, rank, world, what)
        check_gather_and_scatter(dtype, 70_001, 1, rank, world, f"{dtype} count 70001")
        check_broadcast(dtype, 2_000_003, 1, rank, world, f"{dtype} count 2000003")


SIZES = {  # elements of each rank's part, for up to four ranks
    "some empty": [0, 5, 0, 3],
    "rising": [1, 2, 3, 4],
    "one large": [7, 200_003, 1, 0],
    "only the last": [0, 0, 0, 9],
    "none": [0, 0, 0, 0],
}


@only_nvx
@on_ranks(2, 3, 4)
def test_all_gather_of_uneven_lists(rank, world):
    """all_gather_v: the tensors of the list differ in size."""
    for name, sizes in SIZES.items():
        for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.complex64):
            want = [wild_bits(dtype, sizes[r], r) for r in range(world)]
            outputs = [torch.zeros_like(t) for t in want]
            work = dist.all_gather(outputs, want[rank].clone(), async_op=True)
            work.wait()
            for r in range(world):
                assert_same(outputs[r], want[r], f"all_gather_v {name} {dtype} part {r}")


@only_nvx
@on_ranks(2, 3, 4)
def test_gather_and_scatter_of_uneven_lists(rank, world):
    for name, sizes in SIZES.items():
        want = [wild_bits(torch.int32, sizes[r], r) for r in range(world)]
        outputs = [torch.zeros_like(t) for t in want] if rank == 1 else None
        dist.gather(want[rank].clone(), outputs, dst=1)
        for r, output in enumerate(outputs or ()):
            assert_same(output, want[r], f"gather {name} part {r}")
        output = torch.zeros_like(want[rank])
        dist.scatter(output, want if rank == 0 else None, src=0)
        assert_same(output, want[rank], f"scatter {name}")


def matrix(world, kind):
    """rows[i][j]: how many rows rank i sends to rank j."""
    if kind == "empty":
        return [[0] * world for _ in range(world)]
    if kind == "diagonal":
        return [[5 * (i == j) for j in range(world)] for i in range(world)]
    if kind == "one sender":
        return [[(j + 1) * (i == 1) for j in range(world)] for i in range(world)]
    scale = 30_000 if kind == "large" else 1
    return [[(i * 2 + j * 3) % 4 * scale for j in range(world)] for i in range(world)]


@on_ranks(2, 3, 4)
def test_all_to_all_single_with_splits(rank, world):
    for kind in ("mixed", "empty", "diagonal", "one sender", "large"):
        rows = matrix(world, kind)
        for dtype, width in ((torch.float32, (3,)), (torch.int64, ()), (torch.uint8, (1, 5))):
            if not OVER_NVX and kind in ("empty", "diagonal", "one sender"):
                continue
            sent = [[small_numbers(dtype, rows[i][j] * torch.Size(width).numel(), i, j).view(-1, *width)
                     if rows[i][j] else torch.empty(0, *width, dtype=dtype)
                     for j in range(world)] for i in range(world)]  # fmt: skip
            received = [rows[i][rank] for i in range(world)]
            output = torch.zeros(sum(received), *width, dtype=dtype)
            dist.all_to_all_single(output, torch.cat(sent[rank]), received, rows[rank])
            assert_same(output, torch.cat([sent[i][rank] for i in range(world)]), f"splits {kind} {dtype}")


@pytest.mark.skipif(not OVER_NVX and TORCH < (2, 12), reason="gloo has no list all_to_all here")
@on_ranks(2, 3, 4)
def test_all_to_all_of_any_lists(rank, world):
    kinds = ("mixed", "empty", "diagonal", "one sender", "large") if OVER_NVX else ()
    for kind in kinds:
        rows = matrix(world, kind)
        sent = [[wild_bits(torch.float32, rows[i][j], i, j) for j in range(world)] for i in range(world)]
        outputs = [torch.zeros(rows[i][rank]) for i in range(world)]
        dist.all_to_all(outputs, [t.clone() for t in sent[rank]])
        for i in range(world):
            assert_same(outputs[i], sent[i][rank], f"lists {kind}: part from {i}")


@only_nvx
@on_ranks(2, 3)
def test_lists_of_any_shapes(rank, world):
    """Tensors of one list may differ in shape and strides if each pair has equal counts."""
    shapes = [(2, 3), (4,), (1, 2, 5)]
    want = [wild_bits(torch.float32, torch.Size(shapes[r]).numel(), r).view(shapes[r]) for r in range(world)]
    outputs = [torch.zeros_like(t) for t in want]
    dist.all_gather(outputs, want[rank].clone())
    for r in range(world):
        assert_same(outputs[r], want[r], f"all_gather part {r}")


@only_nvx
@on_ranks(2)
def test_elements_of_unlike_sizes_are_a_mismatch(rank, world):
    """nvx does not know these types, so it compares bytes."""
    group = dist.new_group()
    of_one_byte = torch.ones(2000, dtype=torch.uint8).view(torch.bits8)
    of_two = torch.ones(2000, dtype=torch.int16).view(torch.bits16)
    with pytest.raises(dist.DistBackendError, match="mismatch.* (2000 .* 4000|4000 .* 2000) elements"):
        dist.broadcast(of_two if rank else of_one_byte, 0, group=group)
        dist.barrier(group)


@on_ranks(2, 3)
def test_all_gather_coalesced(rank, world):
    shapes = [(3,), (2, 5), (70_001,)]
    outputs = [[torch.zeros(s) for s in shapes] for _ in range(world)]
    inputs = [
        [wild_bits(torch.float32, torch.Size(s).numel(), r, i).view(s) for i, s in enumerate(shapes)]
        for r in range(world)
    ]
    dist.all_gather_coalesced(outputs, inputs[rank])
    for r in range(world):
        for i in range(len(shapes)):
            assert_same(outputs[r][i], inputs[r][i], f"all_gather_coalesced rank {r} tensor {i}")


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="this torch has no all_gather_single")
@on_ranks(2)
def test_single_names(rank, world):
    whole = torch.zeros(world * 3)
    dist.all_gather_single(whole, torch.full((3,), float(rank)))
    assert whole.tolist() == [0, 0, 0, 1, 1, 1]
    part = torch.zeros(3)
    dist.reduce_scatter_single(part, whole)
    assert part.tolist() == [2.0 * rank] * 3
