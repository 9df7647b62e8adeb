"""DTensor against one process: every redistribution, uneven shards, tensor parallel layers."""

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, OVER_NVX, on_ranks
from reference import assert_same, numbers
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

OPS = ("sum", "avg", "max", "min") if OVER_NVX else ("sum", "max", "min")
SHAPES = [(8, 6), (7, 5), (2, 9), (1, 3)]  # some have fewer rows than ranks


def mean_free(total, op, world):
    return {
        "sum": sum(total),
        "avg": sum(total) / world,
        "max": torch.stack(total).amax(0),
        "min": torch.stack(total).amin(0),
    }[op]


@on_ranks(2, 3, 4)
def test_redistribute_matrix(rank, world):
    mesh = dist.init_device_mesh("cpu", (world,))
    assert dist.get_backend(mesh.get_group()) == BACKEND
    for shape in SHAPES:
        whole = numbers(0, *shape)
        for source, target in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
            moved = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
            assert_same(moved.full_tensor(), whole, f"{shape} {source} -> {target}")
            if isinstance(target, Replicate):
                assert_same(moved.to_local(), whole, f"{shape} {source} -> {target}, local")
        for op in OPS:
            want = mean_free([numbers(r, *shape) for r in range(world)], op, world)
            for target in (Shard(0), Shard(1), Replicate()):
                moved = DTensor.from_local(numbers(rank, *shape), mesh, [Partial(op)]).redistribute(mesh, [target])
                assert_same(moved.full_tensor(), want, f"{shape} Partial({op}) -> {target}")


@on_ranks(4)
def test_two_dimensional_mesh(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = numbers(0, 7, 6)
    kinds = (Shard(0), Shard(1), Replicate())
    for source in itertools.product(kinds, repeat=2):
        for target in itertools.product(kinds, repeat=2):
            moved = distribute_tensor(whole, mesh, source).redistribute(mesh, target)
            assert_same(moved.full_tensor(), whole, f"{source} -> {target}")


@on_ranks(2, 3)
def test_gradients_of_redistribution(rank, world):
    mesh = dist.init_device_mesh("cpu", (world,))
    for target in (Shard(0), Replicate()):
        x = distribute_tensor(numbers(0, 7, 5), mesh, [Shard(1)]).requires_grad_()
        (x.redistribute(mesh, [target]) * 3).sum().backward()
        assert_same(x.grad.full_tensor(), torch.full((7, 5), 3.0), f"gradient through {target}")


@on_ranks(2, 3)
def test_products(rank, world):
    mesh = dist.init_device_mesh("cpu", (world,))
    a, b = numbers(0, 9, 7), numbers(1, 7, 6)
    for left, right in ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))):
        product = distribute_tensor(a, mesh, [left]) @ distribute_tensor(b, mesh, [right])
        assert_same(product.full_tensor(), a @ b, f"{left} @ {right}")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor parallel", "with sequence parallel"])
@on_ranks(2)
def test_tensor_parallel(rank, world, sequence):
    mesh = dist.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    alone = Block()
    torch.manual_seed(0)
    split = Block()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(split, mesh, plan)
    x = torch.randn(2, 8, 12)
    mine = x.chunk(world, dim=1)[rank] if sequence else x
    y = split(mine)
    want = alone(x)
    torch.testing.assert_close(y, want.chunk(world, dim=1)[rank] if sequence else want)
    y.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(split.up.weight.grad.full_tensor(), alone.up.weight.grad)


@on_ranks(3)
def test_random_and_uneven(rank, world):
    """Ranks agree on random state over the group; the shards of ten rows on three ranks differ in size."""
    mesh = dist.init_device_mesh("cpu", (world,))
    whole = numbers(0, 10, 4)
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    assert shard.to_local().shape[0] == (4, 4, 2)[rank]
    assert_same((shard * 2 + 1).full_tensor(), whole * 2 + 1, "elementwise")
    assert_same(shard.sum(0).full_tensor(), whole.sum(0), "sum over the sharded rows")
    assert_same(shard.argmax(0).full_tensor() if OVER_NVX else whole.argmax(0), whole.argmax(0), "argmax")
