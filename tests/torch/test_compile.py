"""torch.compile with functional collectives: one graph, the same numbers as eager."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import on_ranks
from reference import assert_same, numbers
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from training import assert_same_weights, net, train, weights


def functional(x, world):
    group = dist.group.WORLD
    total = funcol.all_reduce(x, "sum", group)
    mean = funcol.all_reduce(x, "avg", group)
    whole = funcol.all_gather_tensor(x, 0, group)
    part = funcol.reduce_scatter_tensor(whole * 2, "sum", 0, group)
    swapped = funcol.all_to_all_single(whole, [x.shape[0]] * world, [x.shape[0]] * world, group)
    shared = funcol.broadcast(x + 1, 0, group)
    several = funcol.all_reduce_coalesced([x, x * 2], "sum", group)
    pieces = funcol.all_gather_into_tensor_coalesced([x, x + 1], group)
    scattered = funcol.reduce_scatter_tensor_coalesced([whole, whole + 1], "sum", [0, 0], group)
    return [total, mean, whole, part, swapped, shared, *several, *pieces, *scattered]


def expected(rank, world):
    xs = [numbers(r, 6, 4) for r in range(world)]
    total, whole = sum(xs), torch.cat(xs)
    swapped = torch.cat([xs[rank]] * world)
    part = xs[rank] * 2 * world
    pieces = [whole, whole + 1]
    scattered = [xs[rank] * world, (xs[rank] + 1) * world]
    return [total, total / world, whole, part, swapped, xs[0] + 1, total, total * 2, *pieces, *scattered]


def check(results, rank, world):
    names = "total mean whole part swapped shared several0 several1 piece0 piece1 scattered0 scattered1".split()
    for name, got, want in zip(names, results, expected(rank, world), strict=True):
        assert_same(torch.as_tensor(got) + 0, want + 0, name)


@on_ranks(2, 3)
def test_eager_functional_collectives(rank, world):
    check([funcol.wait_tensor(t) for t in functional(numbers(rank, 6, 4), world)], rank, world)


@on_ranks(2)
def test_compiled_functional_collectives(rank, world):
    torch._dynamo.reset()
    run = torch.compile(functional, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        check(run(numbers(rank, 6, 4), world), rank, world)


@pytest.mark.slow
@on_ranks(2, limit=150)
def test_inductor(rank, world):
    """Inductor lowers collectives itself: in place, into planned buffers, with late waits."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def run(x):
        total = funcol.all_reduce(x, "sum", dist.group.WORLD)
        whole = funcol.all_gather_tensor(total, 0, dist.group.WORLD)
        return total, whole, funcol.reduce_scatter_tensor(whole, "max", 0, dist.group.WORLD)

    want = sum(numbers(r, 6, 4) for r in range(world))
    for _ in range(2):
        for got, expect in zip(run(numbers(rank, 6, 4)), (want, torch.cat([want] * world), want), strict=True):
            assert_same(torch.as_tensor(got) + 0, expect, "inductor")


@on_ranks(2)
def test_functional_results_may_be_dropped(rank, world):
    """Nobody waits for the results; the next collective still runs in order."""
    for _ in range(20):
        funcol.all_reduce(numbers(rank, 500), "sum", dist.group.WORLD)
    got = funcol.wait_tensor(funcol.all_reduce(numbers(rank, 500), "sum", dist.group.WORLD))
    assert_same(got, sum(numbers(r, 500) for r in range(world)), "after the dropped ones")


@on_ranks(2)
def test_plain_collectives_inside_a_compiled_function(rank, world):
    """Dynamo rewrites `dist.all_reduce` and similar calls to functional ones."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x, whole):
        dist.all_reduce(x)
        dist.all_gather_into_tensor(whole, x)
        return x + 1, whole * 2

    x, whole = run(numbers(rank, 5), torch.zeros(5 * world))
    total = sum(numbers(r, 5) for r in range(world))
    assert_same(x, total + 1, "all_reduce")
    assert_same(whole, torch.cat([total] * world) * 2, "all_gather_into_tensor")


@on_ranks(2)
def test_compiled_ddp(rank, world):
    torch._dynamo.reset()
    plain = weights(train(DDP(net()), rank))
    model = torch.compile(DDP(net()), backend="aot_eager")
    assert_same_weights(weights(train(model, rank)), plain, "compiled DDP")


@on_ranks(2)
def test_compiled_dtensor(rank, world):
    torch._dynamo.reset()
    mesh = dist.init_device_mesh("cpu", (world,))
    whole = numbers(0, 8, 6)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x):
        return (x * 2).redistribute(mesh, [Shard(1)])

    assert_same(run(distribute_tensor(whole, mesh, [Shard(0)])).full_tensor(), whole * 2, "compiled redistribute")


@on_ranks(2)
def test_asynchronous_tensors_are_waited_for_by_use(rank, world):
    x = numbers(rank, 2000)
    lazy = funcol.all_reduce(x, "sum", dist.group.WORLD)
    assert isinstance(lazy, funcol.AsyncCollectiveTensor)
    assert_same(lazy + 0, sum(numbers(r, 2000) for r in range(world)) + 0, "used without wait_tensor")
