"""Tensors as users have them: empty, aliased, strided, channels-last; and refused arguments."""

import math
import time

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, on_ranks, on_threads, only_nvx
from reference import assert_same, numbers, reduced, small_numbers, wild_bits
from torch._subclasses.fake_tensor import FakeTensorMode

F32 = torch.float32


def total(world, *shape, dtype=F32):
    return sum(numbers(r, *shape, dtype=dtype) for r in range(world))


# --- empty --------------------------------------------------------------------------------------------------


@only_nvx
@on_ranks(2, 3)
def test_empty_tensors_in_every_collective(rank, world):
    for shape in ((0,), (0, 4), (3, 0, 2)):
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.reduce(empty, world - 1)
        dist.all_gather([torch.empty(shape) for _ in range(world)], empty)
        dist.gather(empty, [torch.empty(shape) for _ in range(world)] if rank == 0 else None, dst=0)
        dist.scatter(empty, [torch.empty(shape) for _ in range(world)] if rank == 0 else None, src=0)
        dist.reduce_scatter(empty, [torch.empty(shape) for _ in range(world)])
        dist.all_to_all([torch.empty(shape) for _ in range(world)], [torch.empty(shape) for _ in range(world)])
    flat = torch.empty(0)
    dist.all_gather_into_tensor(torch.empty(0), flat)
    dist.reduce_scatter_tensor(torch.empty(0), flat)
    dist.all_to_all_single(torch.empty(0), flat)
    dist.all_reduce_coalesced([torch.empty(0), torch.empty(0)])
    works = [dist.isend(flat, (rank + 1) % world), dist.irecv(torch.empty(0), (rank - 1) % world)]
    for work in works:
        work.wait()
    check = torch.tensor([1])
    dist.all_reduce(check)
    assert check.item() == world


# --- aliased ------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_gathers_in_place(rank, world):
    """The input is the rank's own slot of the output."""
    for count in (1, 1000, 70_001):
        want = [wild_bits(torch.int64, count, r) for r in range(world)]
        whole = torch.zeros(world * count, dtype=torch.int64)
        slots = list(whole.chunk(world))
        slots[rank].copy_(want[rank])
        dist.all_gather_into_tensor(whole, slots[rank])
        assert_same(whole, torch.cat(want), "all_gather_into_tensor in place")
        whole.zero_()
        slots[rank].copy_(want[rank])
        dist.all_gather(slots, slots[rank])
        assert_same(whole, torch.cat(want), "all_gather in place")
        whole.zero_()
        slots[rank].copy_(want[rank])
        dist.gather(slots[rank], slots if rank == 0 else None, dst=0)
        if rank == 0:
            assert_same(whole, torch.cat(want), "gather in place")


@on_ranks(2, 3)
def test_scatters_in_place(rank, world):
    for count in (1, 1000, 70_001):
        inputs = [numbers(r, world, count) for r in range(world)]
        want = sum(inputs)[rank]
        whole = inputs[rank].clone()
        if OVER_NVX:
            dist.reduce_scatter_tensor(whole[rank], whole)
            assert_same(whole[rank], want, "reduce_scatter_tensor in place")
            whole = inputs[rank].clone()
        dist.reduce_scatter(whole[rank], list(whole.unbind()))
        assert_same(whole[rank], want, "reduce_scatter in place")
        whole = inputs[0].clone()
        output = whole[0] if rank == 0 else torch.zeros(count)
        dist.scatter(output, list(whole.unbind()) if rank == 0 else None, src=0)
        assert_same(output, inputs[0][rank], "scatter in place")


@only_nvx
@on_ranks(2, 3)
def test_all_to_all_in_place(rank, world):
    for count in (1, 1000, 70_001):
        sent = [wild_bits(F32, world * count, r).view(world, count) for r in range(world)]
        tensor = sent[rank].clone()
        dist.all_to_all_single(tensor, tensor)
        assert_same(tensor, torch.stack([s[rank] for s in sent]), "all_to_all_single in place")


@only_nvx
@on_ranks(3)
def test_all_to_all_in_place_of_pieces_whose_ranks_stage_different_chunks(rank, world):
    """A peer that sends more than this rank has larger chunks, which arrive where this rank has not staged yet."""
    for lengths in ([(0, 80, 170), (80, 0, 0), (170, 0, 0)], [(0, 1, 100), (1, 0, 0), (100, 0, 0)]):
        splits = [1024 * count for count in lengths[rank]]
        sent = [[torch.full((1024 * lengths[s][r],), 16.0 * s + r) for r in range(world)] for s in range(world)]
        whole = torch.cat(sent[rank])
        dist.all_to_all_single(whole, whole, splits, splits)
        assert_same(whole, torch.cat([s[rank] for s in sent]), f"all_to_all_single in place {lengths}")
        pieces = [piece.clone() for piece in sent[rank]]
        dist.all_to_all(pieces, pieces)
        for source, piece in enumerate(pieces):
            assert_same(piece, sent[source][rank], f"all_to_all in place {lengths}")


@on_ranks(2, 3)
def test_all_to_all_single_cuts_rows_that_the_ranks_do_not_divide(rank, world):
    """Without split sizes gloo cuts the elements, not the rows."""
    for shape in ((1, 6), (7, 6), (0, 5)):
        sent = [100.0 * r + torch.arange(math.prod(shape)).view(shape) for r in range(world)]
        got = torch.empty(shape)
        dist.all_to_all_single(got, sent[rank])
        expected = torch.cat([s.flatten().chunk(world)[rank] for s in sent]).view(shape)
        assert_same(got, expected, f"all_to_all_single {shape}")


@only_nvx
@on_ranks(3)
def test_one_output_given_several_times(rank, world):
    """The result is the data of any one rank, whole; nothing else may break."""
    inputs = [torch.full((1000,), float(r)) for r in range(world)]
    shared = torch.full((1000,), -1.0)
    dist.all_gather([shared] * world, inputs[rank])
    assert shared.unique().numel() == 1
    assert shared[0].item() in range(world)


@on_ranks(2)
def test_the_same_input_sent_to_everybody(rank, world):
    same = numbers(rank, 500)
    output = torch.zeros(500)
    dist.reduce_scatter(output, [same] * world)
    assert_same(output, total(world, 500), "reduce_scatter")


# --- strides ------------------------------------------------------------------------------------------------


STRIDED = {
    "transposed": lambda t: t.view(30, 40).t(),
    "every second": lambda t: t.repeat_interleave(2)[::2],
    "inner columns": lambda t: t.view(30, 40).repeat(1, 2)[:, :40],
}


def strided(rank, world, make):
    tensor = make(numbers(rank, 1200))
    dist.all_reduce(tensor)
    assert_same(tensor.contiguous(), make(total(world, 1200)).contiguous(), "all_reduce")
    tensor = make(numbers(rank, 1200))
    dist.broadcast(tensor, 1)
    assert_same(tensor.contiguous(), make(numbers(1, 1200)).contiguous(), "broadcast")
    sources = [make(numbers(r, 1200)) for r in range(world)]
    outputs = [make(torch.zeros(1200)) for _ in range(world)]
    dist.all_gather(outputs, sources[rank])
    for r in range(world):
        assert_same(outputs[r].contiguous(), sources[r].contiguous(), "all_gather")
    outputs = [make(torch.zeros(1200)) for _ in range(world)] if rank == 0 else None
    dist.gather(sources[rank], outputs, dst=0)
    for r in range(world) if rank == 0 else ():
        assert_same(outputs[r].contiguous(), sources[r].contiguous(), "gather")
    output = make(torch.zeros(1200))
    dist.scatter(output, sources if rank == 0 else None, src=0)
    assert_same(output.contiguous(), sources[rank].contiguous(), "scatter")


@only_nvx
@pytest.mark.parametrize("how", STRIDED)
@on_ranks(2)
def test_strided_tensors(rank, world, how):
    strided(rank, world, STRIDED[how])
    after = torch.tensor([1])
    dist.all_reduce(after)
    assert after.item() == world


@on_ranks(2)
def test_channels_last(rank, world):
    tensor = numbers(rank, 2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    assert_same(tensor, total(world, 2, 8, 5, 5), "all_reduce channels_last")
    assert tensor.is_contiguous(memory_format=torch.channels_last)


@only_nvx
@on_ranks(2)
def test_expanded_tensors(rank, world):
    source = numbers(rank, 5, 1).expand(5, 7)
    outputs = [torch.zeros(5, 7) for _ in range(world)]
    dist.all_gather(outputs, source)
    for r in range(world):
        assert_same(outputs[r], numbers(r, 5, 1).expand(5, 7).contiguous(), "all_gather expanded")
    sent = source if rank == 0 else torch.zeros(5, 7)
    dist.broadcast(sent, 0)
    assert_same(sent.contiguous(), numbers(0, 5, 1).expand(5, 7).contiguous(), "broadcast of an expanded tensor")
    reduced_at_0 = source if rank else source.contiguous()
    dist.reduce(reduced_at_0, 0)
    if rank == 0:
        assert_same(reduced_at_0, total(world, 5, 1).expand(5, 7).contiguous(), "reduce of an expanded tensor")
    with pytest.raises(ValueError, match="contiguous|dense|overlap|share memory"):
        dist.all_reduce(source)


@on_ranks(2)
def test_zero_dimensional_tensors(rank, world):
    tensor = torch.tensor(rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.item() == 3.0
    if OVER_NVX:
        whole = torch.zeros(world)
        dist.all_gather_into_tensor(whole, torch.tensor(float(rank)))
        assert whole.tolist() == [0.0, 1.0]


@on_ranks(2)
def test_tensors_that_require_grad_are_changed_in_place(rank, world):
    tensor = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(tensor)
    assert tensor.detach().tolist() == [2.0] * 4


# --- the bare backend's view --------------------------------------------------------------------------------


@only_nvx
@on_threads(2, 3)
def test_complex_tensors_reach_the_backend_whole(pg, rank, world):
    """`torch.distributed` splits complex tensors into pairs of reals; callers of the group itself do not."""
    inputs = [small_numbers(torch.complex64, 1001, r) for r in range(world)]
    tensor = inputs[rank].clone()
    pg.allreduce([tensor]).wait()
    assert_same(tensor, sum(inputs), "complex sum")
    tensor = inputs[rank].clone()
    pg.allreduce([tensor], dist.ReduceOp.PRODUCT).wait()
    assert_same(tensor, reduced(inputs, "product"), "complex product")
    tensor = inputs[rank].clone()
    pg.broadcast([tensor]).wait()
    assert_same(tensor, inputs[0], "complex broadcast")
    with pytest.raises((ValueError, TypeError)):
        pg.allreduce([tensor], dist.ReduceOp.MAX).wait()


@only_nvx
@on_threads(2)
def test_the_backend_refuses_lists_of_the_wrong_length(pg, rank, world):
    ones = [torch.ones(3), torch.ones(3)]
    for call in (
        lambda: pg.reduce(ones),
        lambda: pg.allreduce([]),
        lambda: pg.allgather([[torch.ones(3)]], [torch.ones(3)]),
        lambda: pg.allgather([ones], ones),
        lambda: pg.reduce_scatter([torch.ones(3)], [[torch.ones(3)]]),
        lambda: pg.send(ones, 0, 0),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()
    for root in (-1, world):
        options = dist.BroadcastOptions()
        options.rootRank = root
        with pytest.raises(ValueError, match=f"(?i)invalid root rank.*{root}"):
            pg.broadcast([torch.ones(3)], options)
    tensor = torch.ones(3)
    pg.allreduce([tensor]).wait()
    assert tensor.tolist() == [2.0] * 3


# --- refused arguments --------------------------------------------------------------------------------------

WRONG = {
    "all_gather_into_tensor size": (
        lambda w: dist.all_gather_into_tensor(torch.zeros(w * 4 - 1), torch.zeros(4)),
        ValueError,
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "all_gather_into_tensor dtype": (
        lambda w: dist.all_gather_into_tensor(torch.zeros(w * 4, dtype=torch.float64), torch.zeros(4)),
        TypeError,
        "output tensor must have the same type as input tensor",
    ),
    "reduce_scatter_tensor size": (
        lambda w: dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(w * 4 + 1)),
        ValueError,
        "input tensor must be the same size as output size times world size",
    ),
    "reduce_scatter_tensor dtype": (
        lambda w: dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(w * 4, dtype=torch.float64)),
        TypeError,
        "must (be|have) the same type as",
    ),
    "all_gather length": (
        lambda w: dist.all_gather([torch.zeros(4)] * (w + 1), torch.zeros(4)),
        ValueError,
        r"length|size of the process group|list",
    ),
    "reduce_scatter length": (
        lambda w: dist.reduce_scatter(torch.zeros(4), [torch.zeros(4)] * (w - 1)),
        ValueError,
        r"length|size of the process group|list",
    ),
    "gather length": (
        lambda w: at_root(dist.gather, torch.zeros(4), [torch.zeros(4)] * (w + 1), 0),
        ValueError,
        "Incorrect output list size|not the root",
    ),
    "scatter length": (
        lambda w: at_root(dist.scatter, torch.zeros(4), [torch.zeros(4)] * (w + 1), 0),
        ValueError,
        "Incorrect input list size|not the root",
    ),
    "all_to_all length": (
        lambda w: dist.all_to_all([torch.zeros(4)] * (w + 1), [torch.zeros(4)] * (w + 1)),
        (ValueError, RuntimeError),
        r"length|size|list",
    ),
    "all_to_all_single splits count": (
        lambda w: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1] * (w + 1), [1] * (w + 1)),
        (ValueError, RuntimeError),
        "Number of tensor splits not equal to group size",
    ),
    "all_to_all_single splits sum": (
        lambda w: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1] * w, [1] * w),
        (ValueError, RuntimeError),
        "Split sizes doesn't match total dim 0 size",
    ),
    "all_to_all_single indivisible": (
        lambda w: dist.all_to_all_single(torch.zeros(w * 2 + 1), torch.zeros(w * 2 + 1)),
        (ValueError, RuntimeError),
        "does not divide equally across group size",
    ),
    "all_to_all_single a split that a negative one makes up for": (
        lambda w: dist.all_to_all_single(torch.zeros(12), torch.zeros(12), None, [13] + [0] * (w - 2) + [-1]),
        ValueError,
        r"input_split_sizes\[0\] is 13",
    ),
    "all_to_all_single negative first": (
        lambda w: dist.all_to_all_single(torch.zeros(12), torch.zeros(12), [-3, 15] + [0] * (w - 2), None),
        ValueError,
        r"output_split_sizes\[0\] is negative: -3",
    ),
    "all_to_all_single splits that overflow": (
        lambda w: dist.all_to_all_single(torch.zeros(12), torch.zeros(12), [2**63 - 1] * 2 + [14] * (w - 2), None),
        ValueError,
        f"output_split_sizes.0. is {2**63 - 1}",
    ),
    "all_to_all_single of a scalar": (
        lambda w: dist.all_to_all_single(torch.zeros(()), torch.zeros(())),
        ValueError,
        "no dimension 0",
    ),
    "negative tag": (lambda w: dist.send(torch.zeros(3), (dist.get_rank() + 1) % w, tag=-2), ValueError, "(?i)tag.*-2"),
    "all_gather_into_tensor that overflows": (
        lambda w: dist.all_gather_into_tensor(torch.zeros(0), torch.zeros(1).expand(2**62)),
        ValueError,
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "all_to_all_single dtype": (
        lambda w: dist.all_to_all_single(torch.zeros(w), torch.zeros(w, dtype=torch.float64)),
        (ValueError, TypeError, RuntimeError),
        "(?i)type",
    ),
}


def at_root(call, *args):
    """Only the root can detect its bad list; the others must not enter a call that it refuses."""
    if dist.get_rank() != 0:
        raise ValueError("not the root")
    call(*args)


@only_nvx
@on_ranks(2, 3)
def test_refused_arguments(rank, world):
    """Every rank raises torch's exception class with torch's text, and the group still works."""
    import nvx

    with pytest.raises(nvx.ArgumentError):
        dist.all_to_all_single(torch.zeros(1), torch.zeros(1))
    with pytest.raises(nvx.ArgumentTypeError):
        dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(world, dtype=torch.int8))
    for name, (call, kind, words) in WRONG.items():
        with pytest.raises(kind, match=words) as raised:
            call(world)
        assert not isinstance(raised.value, dist.DistBackendError), name
        after = torch.tensor([1])
        dist.all_reduce(after)
        assert after.item() == world, name


# --- autograd and inference mode ----------------------------------------------------------------------------


def channels_last(tensor):
    return tensor.contiguous(memory_format=torch.channels_last)


def leaf(rank):
    return torch.nn.Parameter(channels_last(numbers(rank, 2, 8, 5, 5)))


MOVES = {
    "broadcast": lambda t, a: dist.broadcast(t, 0, async_op=a),
    "all_reduce": lambda t, a: dist.all_reduce(t, async_op=a),
    "reduce": lambda t, a: dist.reduce(t, 0, async_op=a),
    "scatter": lambda t, a: dist.scatter(t, [t.detach().clone()] * 2 if dist.get_rank() == 0 else None, async_op=a),
    "all_gather": lambda t, a: dist.all_gather([t, t.detach().clone()], t.detach().clone(), async_op=a),
    "all_to_all_single": lambda t, a: dist.all_to_all_single(t, t.detach().clone(), async_op=a),
}


def moved(tensor, how, polled):
    """The caller completes the call, or a thread of nvx does while the caller only polls."""
    work = MOVES[how](tensor, polled)
    end = time.monotonic() + 20
    while polled and not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.001)
    if polled:
        work.wait()


@only_nvx
@pytest.mark.parametrize("how", MOVES)
@on_ranks(2)
def test_leaves_that_require_grad(rank, world, how):
    """A write into a leaf is allowed; strided leaves are no different."""
    for polled in (False, True):
        want = numbers(rank, 2, 8, 5, 5)
        moved(want, how, polled)
        for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            parameter = leaf(rank)
            with guard():
                moved(parameter, how, polled)
            assert parameter.is_leaf and parameter.requires_grad
            assert_same(parameter.detach(), want, f"{how} in {guard.__name__}, polled {polled}")
            (parameter * 2).sum().backward()
            assert parameter.grad.unique().tolist() == [2.0]


@only_nvx
@pytest.mark.parametrize("how", MOVES)
@on_ranks(2)
def test_inference_tensors(rank, world, how):
    for polled in (False, True):
        want = numbers(rank, 2, 8, 5, 5)
        moved(want, how, polled)
        for inside in (False, True):
            with torch.inference_mode():
                tensor = channels_last(numbers(rank, 2, 8, 5, 5))
                if inside:
                    moved(tensor, how, polled)
            if not inside:
                moved(tensor, how, polled)
            assert tensor.is_inference()
            assert_same(tensor.clone(), want, f"{how} inside {inside}, polled {polled}")


@only_nvx
@on_ranks(2)
def test_strided_sources_leave_no_graph(rank, world):
    """A tensor that is only read may require grad too: gathered values have no graph."""
    source = leaf(rank)
    outputs = [torch.zeros(2, 8, 5, 5) for _ in range(world)]
    dist.all_gather(outputs, source)
    for r in range(world):
        assert not outputs[r].requires_grad
        assert_same(outputs[r], numbers(r, 2, 8, 5, 5), "all_gather")


@only_nvx
@on_threads(2)
def test_negative_and_conjugate_views(pg, rank, world):
    """Tensors whose memory differs from their elements."""
    tensor = torch._neg_view(numbers(rank, 1000))
    pg.allreduce([tensor]).wait()
    assert torch.equal(tensor.resolve_neg(), -total(world, 1000))
    tensor = numbers(rank, 1000, dtype=torch.complex64).conj()
    pg.allreduce([tensor]).wait()
    assert torch.equal(tensor.resolve_conj(), total(world, 1000, dtype=torch.complex64).conj().resolve_conj())
    with pytest.raises(ValueError, match="contiguous"):
        pg.send([torch._neg_view(numbers(rank, 10))], 1 - rank, 0)


@only_nvx
@on_ranks(2)
def test_a_tensor_whose_storage_was_made_smaller_is_refused(rank, world):
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage of 0 bytes"):
        dist.all_reduce(tensor)
    tensor.untyped_storage().resize_(400)
    tensor.fill_(rank)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((100,), 1.0))


class Wrapped(torch.Tensor):
    """Wraps another tensor and has no memory itself."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@on_ranks(2)
def test_tensors_without_memory_are_refused_in_lists(rank, world):
    """torch does not check lists of lists for them and passes them on."""
    inner = torch.ones(3)
    for wrap in (Wrapped, FakeTensorMode().from_tensor):
        wrapped = [wrap(torch.empty(3)) for _ in range(world)]
        with pytest.raises(ValueError, match="has no storage"):
            dist.all_gather(wrapped, inner)
        with pytest.raises(ValueError, match="has no storage"):
            dist.reduce_scatter(inner, wrapped)
        if rank == 0:
            with pytest.raises(ValueError, match="has no storage"):
                dist.gather(inner, wrapped)
    dist.all_reduce(inner)
    assert inner.eq(2).all()


@only_nvx
@on_threads(2)
def test_tensors_of_function_transforms_are_refused(pg, rank, world):
    """They wrap another tensor and have no storage object at all."""

    def gathered(tensor):
        pg.allgather([[torch.empty(3) for _ in range(world)]], [tensor]).wait()
        return tensor.sum()

    with pytest.raises(ValueError, match="has no storage"):
        torch.vmap(lambda t: pg.allreduce([t]) and t)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="has no storage"):
        torch.vmap(lambda t: pg.allreduce([t]) and t)(torch.ones(2, 0))
    with pytest.raises(ValueError, match="has no storage"):
        lists = [[torch.empty(3) for _ in "12"] for _ in range(world)]
        torch.vmap(lambda t: pg.allgather_coalesced(lists, [t, t]) and t)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="has no storage"):
        torch.func.grad(gathered)(torch.ones(3))
    tensor = torch.ones(3)
    pg.allreduce([tensor]).wait()
    assert tensor.eq(world).all()
