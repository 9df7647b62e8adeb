"""Lists of several tensors per rank, as gloo and torch's tests of it use them; and tensors listed twice."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, on_threads, only_nvx
from reference import assert_same, small_numbers

OPERATORS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")
FOLDED = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def all_reduce_options(operator):
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, operator)
    return options


def broadcast_options(root, tensor):
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, tensor
    return options


def value(work):
    future = work.get_future()
    future.wait()
    return future.value()


def given(rank, count, dtype=torch.float64, size=1000):
    return [small_numbers(dtype, size, rank * count + i) for i in range(count)]


@pytest.mark.parametrize("operator", OPERATORS)
@on_threads(2, 3)
def test_all_reduce(pg, rank, world, operator):
    dtype = torch.int64 if operator.startswith("B") else torch.float64
    for count in (2, 3):
        tensors = given(rank, count, dtype)
        tensors[-1] = tensors[-1].repeat_interleave(2)[::2]  # not contiguous
        result = value(pg.allreduce(tensors, all_reduce_options(operator)))
        want, *others = [t for r in range(world) for t in given(r, count, dtype)]
        for other in others:
            want = FOLDED[operator](want, other)
        if operator == "AVG":
            want = want / (world * count)
        for tensor in (*tensors, *result):
            if operator == "AVG":  # of a list it rounds more than once
                torch.testing.assert_close(tensor, want)
            else:
                assert_same(tensor, want, operator)


@on_threads(2, 3)
def test_all_reduce_of_complex_halves(pg, rank, world):
    """nvx takes them as pairs of real numbers where torch does not."""
    for operator in ("SUM", "AVG"):
        tensors = [torch.view_as_complex(t.view(-1, 2)) for t in given(rank, 2, torch.float16, size=140)]
        value(pg.allreduce(tensors, all_reduce_options(operator)))
        want = sum(t for r in range(world) for t in given(r, 2, torch.float16, size=140)).view(-1, 2)
        for tensor in tensors:
            assert_same(torch.view_as_real(tensor), want / (world * 2) if operator == "AVG" else want, operator)


@on_threads(2, 3)
def test_broadcast(pg, rank, world):
    for root in range(world):
        for chosen in range(3):
            tensors = given(rank, 3)
            tensors[1] = tensors[1].repeat_interleave(2)[::2]
            result = value(pg.broadcast(tensors, broadcast_options(root, chosen)))
            want = given(root, 3)[chosen]
            assert len(result) == 3 and all(torch.equal(tensor, want) for tensor in (*tensors, *result))


@on_threads(2, 3)
def test_all_gather(pg, rank, world):
    for shape in ((), (5,), (2, 3)):
        inputs = [torch.full(shape, 10.0 * rank + i) for i in range(2)]
        outputs = [[torch.empty(shape) for _ in range(2 * world)] for _ in range(2)]
        lists = value(pg.allgather(outputs, inputs))
        want = [torch.full(shape, 10.0 * r + i) for r in range(world) for i in range(2)]
        for made in (outputs, lists):
            assert len(made) == 2 and all(len(one) == 2 * world for one in made)
            for one in made:
                assert all(torch.equal(a, b) for a, b in zip(one, want, strict=True))


@on_threads(2, 3)
def test_futures_of_coalesced_gathers_have_a_list_for_each_rank(pg, rank, world):
    inputs = [torch.full((3,), 10.0 * rank + i) for i in range(2)]
    outputs = [[torch.empty(3) for _ in range(2)] for _ in range(world)]
    made = value(pg.allgather_coalesced(outputs, inputs))
    assert [[t[0].item() for t in one] for one in made] == [[10.0 * r, 10.0 * r + 1] for r in range(world)]


@on_threads(1)
def test_the_future_of_a_coalesced_gather_of_one_rank_is_a_flat_list(pg, rank, world):
    outputs = [[torch.empty(3) for _ in range(2)]]
    made = value(pg.allgather_coalesced(outputs, [torch.full((3,), 1.0), torch.full((3,), 2.0)]))
    assert [t[0].item() for t in made] == [1.0, 2.0]


@on_threads(2, 3)
def test_sparse_all_reduce(pg, rank, world):
    def sparse(r, i):
        return torch.sparse_coo_tensor([[r, i]], torch.tensor([1.0, 2.0]), size=(world + 2,))

    tensors = [sparse(rank, i) for i in range(2)]
    result = value(pg.allreduce(tensors, all_reduce_options("SUM")))
    want = sum(sparse(r, i).to_dense() for r in range(world) for i in range(2))
    for tensor in (*tensors, *result):
        assert torch.equal(tensor.to_dense(), want)


@only_nvx
@on_threads(2)
def test_sparse_lists_of_each_type(pg, rank, world):
    """This includes types that torch coalesces but does not add."""
    for dtype in (torch.float16, torch.bfloat16, torch.bool, torch.int32):
        tensors = [torch.sparse_coo_tensor([[rank, i]], torch.ones(2).to(dtype), (world + 2,)) for i in range(2)]
        value(pg.allreduce(tensors, all_reduce_options("SUM")))
        want = torch.tensor([4, 4, 0, 0]).to(dtype)
        for tensor in tensors:
            assert torch.equal(tensor.to_dense(), want), dtype
    unlike = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse(1)]
    refused("same number of sparse dimensions", lambda: pg.allreduce(unlike, all_reduce_options("SUM")))


def refused(text, call):
    with pytest.raises(RuntimeError, match=text) as caught:
        call()
    assert isinstance(caught.value, ValueError | TypeError)


@on_threads(2)
def test_lists_that_do_not_fit(pg, rank, world):
    """The errors have gloo's text; the group still works."""
    t1, t2, t3 = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], size=(1,))
    sum_of = all_reduce_options("SUM")
    for bad, text in (
        ([], "requires non-empty tensor list"),
        ([t1, t2], "invalid tensor type at index 1"),
        ([t1, t3], "invalid tensor size at index 1"),
        ([t1, sparse], "invalid tensor layout at index 1"),
        ([sparse, t1], "invalid tensor layout at index 1"),
    ):
        refused(text, lambda bad=bad: pg.allreduce(bad, sum_of))
    for chosen in (-1, 2):
        refused("invalid root tensor", lambda chosen=chosen: pg.broadcast([t1, t1], broadcast_options(0, chosen)))
    refused("invalid root tensor", lambda: pg.broadcast([], broadcast_options(0, 0)))
    refused("invalid tensor type", lambda: pg.broadcast([t1, t2], broadcast_options(0, 0)))
    refused("requires non-empty input tensor list", lambda: pg.allgather([], []))
    refused("lists to have the same length", lambda: pg.allgather([[t1] * world] * 2, [t1]))
    refused("invalid output tensor list at index 0", lambda: pg.allgather([[t1] * 3, [t1] * 4], [t1, t1]))
    refused("invalid tensor size at index 1", lambda: pg.allgather([[t1] * 4, [t1, t3] * 2], [t1, t1]))
    refused("invalid tensor type: output", lambda: pg.allgather([[t2] * world], [t1]))
    coalesced = dist.distributed_c10d.AllreduceCoalescedOptions()
    refused("tensors must all have the same type", lambda: pg.allreduce_coalesced([t1, t2], coalesced))
    refused("invalid tensor layout at index 1", lambda: pg.allreduce_coalesced([t1, sparse], coalesced))
    refused("unsupported layout", lambda: pg.allreduce_coalesced([sparse, sparse], coalesced))
    refused("invalid size of output tensor at index 0", lambda: pg.allgather_coalesced([[t3]] * world, [t1]))
    refused("invalid tensor type at index 0", lambda: pg.allgather_coalesced([[t2]] * world, [t1]))
    refused("output lists should be equal to world size", lambda: pg.allgather_coalesced([[t1]], [t1]))
    assert value(pg.allreduce([torch.ones(1)], sum_of))[0].item() == world


@on_ranks(2, 3)
def test_a_tensor_that_is_listed_twice_is_reduced_once(rank, world):
    """The call reads the whole list before it writes any of it."""
    total = sum(range(world))
    for asynchronous in (False, True):
        one, whole = torch.tensor([float(rank)]), torch.full((6,), float(rank))
        other = torch.full((9,), float(rank))
        listed = [one, whole[:4], one, whole[2:], torch.tensor([float(rank)]), other[1:4], other[2:5], other[::8]]
        work = dist.all_reduce_coalesced(listed, async_op=asynchronous)
        if asynchronous:
            work.wait()
        for tensor in listed:
            assert torch.equal(tensor, torch.full_like(tensor, float(total)))
