"""Sparse tensors, accepted and refused."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, only_nvx
from reference import assert_same, small_numbers

F32 = torch.float32


def sparse(rank, dtype, rows=50, width=3, duplicates=False):
    """Rank r has 2r + 1 rows that overlap those of the others (rank 0 has none of the last rows)."""
    index = torch.arange(2 * rank + 1) * (rank + 1) % rows
    if duplicates:
        index = torch.cat([index, index])
    values = small_numbers(dtype, index.numel() * width, rank).view(-1, width)
    return torch.sparse_coo_tensor(index.unsqueeze(0), values, (rows, width), check_invariants=True)


@on_ranks(2, 3, 4)
def test_sparse_all_reduce(rank, world):
    for dtype in (torch.float32, torch.float64, torch.int64):
        for duplicates in (False, True):
            tensor = sparse(rank, dtype, duplicates=duplicates)
            dist.all_reduce(tensor)
            want = sum(sparse(r, dtype, duplicates=duplicates).to_dense() for r in range(world))
            assert tensor.is_sparse
            assert_same(tensor.to_dense(), want, f"sparse {dtype} duplicates {duplicates}")


@on_ranks(3)
def test_sparse_all_reduce_of_nothing_and_async(rank, world):
    shape = (6, 4)
    only_one = torch.zeros(shape).to_sparse() if rank != 1 else torch.eye(6, 4).to_sparse()
    work = dist.all_reduce(only_one, async_op=True)
    work.wait()
    assert_same(work.result()[0].to_dense(), torch.eye(6, 4), "two sparse dims, one rank has entries")


@only_nvx
@on_ranks(2)
def test_sparse_async_does_not_wait_for_the_others(rank, world):
    if rank == 1:
        time.sleep(2.0)
    tensors = [sparse(rank, F32), torch.ones(3, requires_grad=True).detach(), sparse(rank, F32)]
    started = time.monotonic()
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    assert time.monotonic() - started < 1.0
    for work in reversed(works):
        work.wait()  # an earlier work may still run its callbacks on its own thread
    assert all(work.is_completed() for work in works)
    want = sum(sparse(r, F32).to_dense() for r in range(world))
    assert_same(tensors[0].to_dense(), want, "first")
    assert_same(tensors[2].to_dense(), want, "last")
    assert tensors[1].tolist() == [2.0] * 3


@only_nvx
@on_ranks(2)
def test_sparse_of_unlike_shapes(rank, world):
    """Every rank raises an error, and the group still works."""
    with pytest.raises(ValueError, match=r"same shape: rank 0 \(pid.*sizes \[50, .*, rank 1 \(pid.*sizes \[51, "):
        dist.all_reduce(sparse(rank, F32, rows=50 + rank))
    leaf = sparse(rank, F32).requires_grad_()
    dist.all_reduce(leaf)
    assert_same(leaf.detach().to_dense(), sum(sparse(r, F32).to_dense() for r in range(world)), "leaf")


@only_nvx
@on_ranks(2)
def test_sparse_takes_sum_alone(rank, world):
    with pytest.raises((ValueError, RuntimeError), match="(?i)sum|sparse"):
        dist.all_reduce(sparse(rank, torch.float32), dist.ReduceOp.MAX)
    tensor = sparse(rank, torch.float32)
    dist.all_reduce(tensor)


def sparse_of(dtype, indices=(1, 1, 2)):
    values = torch.ones(len(indices)).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([indices], dtype=torch.int64), values, (4,), check_invariants=True)


def coalesces(dtype):
    try:
        sparse_of(dtype).coalesce()
    except NotImplementedError:
        return False
    return True


NARROW = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
NARROW += [torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
WIDE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool, torch.float16, torch.bfloat16]


def serves_on(rank, world):
    total = torch.full((1000,), float(rank))
    dist.all_reduce(total)
    assert total.unique().tolist() == [sum(range(world))]


@only_nvx
@on_ranks(2)
def test_sparse_of_a_type_that_torch_cannot_coalesce(rank, world):
    """For any set of calling ranks the error comes before any traffic, and the group still works."""
    refused = [dtype for dtype in NARROW if not coalesces(dtype)]
    assert refused, "torch coalesces all types: then nothing is refused, and this test is done"
    for dtype in refused:
        for callers in ((0, 1), (1,), (0,)):
            for how in ({}, {"async_op": True}):
                # torch does not sum a single entry, but would sum the entries of several ranks.
                for indices in ((1, 1, 2), (1,), ()):
                    if rank in callers:
                        with pytest.raises(TypeError, match="sparse .*cannot coalesce") as caught:
                            dist.all_reduce(sparse_of(dtype, indices), **how)
                        assert isinstance(caught.value, RuntimeError)
            serves_on(rank, world)


@only_nvx
@on_ranks(2, 3)
def test_sparse_of_each_type_that_torch_can_coalesce(rank, world):
    for dtype in [*WIDE, *filter(coalesces, NARROW)]:
        tensor = sparse_of(dtype)
        dist.all_reduce(tensor)
        want = [0, 2 * world, world, 0] if dtype != torch.bool else [0, 1, 1, 0]
        assert tensor.to_dense().to(torch.float64).tolist() == want, dtype
    serves_on(rank, world)
