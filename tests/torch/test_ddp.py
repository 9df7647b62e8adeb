"""DistributedDataParallel and what belongs to it, trained over nvx and over gloo to the same bits."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, on_ranks, only_nvx
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from training import (
    WIDTH,
    Net,
    assert_as_alone,
    assert_ranks_agree,
    assert_same_weights,
    batch,
    net,
    same_over_gloo,
    train,
    weights,
)


class SometimesUnused(Net):
    """Rank and step select which of two branches has a gradient."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, 37)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        branch = self.other if (self.calls + int(x[0, 0] > 0)) % 2 else self.first
        return self.last(torch.tanh(self.second(self.norm(torch.relu(branch(x))))))


class WithEmbedding(nn.Module):
    """A sparse gradient whose rows differ between ranks."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(50, 8, sparse=True)
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        index = (x[:, :3].abs() * 10).long() % 50
        return self.last(self.rows(index).sum(1))


class WithBatchNorm(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(37)


OPTIONS = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.001},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_options(rank, world, name):
    same_over_gloo(lambda group: weights(train(DDP(net(), process_group=group, **OPTIONS[name]), rank)), name)


@on_ranks(3)
def test_against_one_process(rank, world):
    """DDP computes the mean of the ranks' gradients, added in rank order."""
    trained = weights(train(DDP(net()), rank))
    assert_ranks_agree(trained, "weights after training")
    assert_as_alone(trained, world)


@on_ranks(2)
def test_unused_parameters(rank, world):
    def run(group):
        model = DDP(net(SometimesUnused), process_group=group, find_unused_parameters=True)
        return weights(train(model, rank, steps=6))

    same_over_gloo(run, "find_unused_parameters")


@on_ranks(2)
def test_gradient_accumulation(rank, world):
    def run(group):
        model = DDP(net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            x, y = batch(rank, step)
            with model.no_sync() if step % 3 else contextlib.nullcontext():
                nn.functional.mse_loss(model(x), y).backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    same_over_gloo(run, "no_sync")


@on_ranks(2)
def test_sparse_embedding(rank, world):
    def run(group):
        model = DDP(net(WithEmbedding), process_group=group)
        return weights(train(model, rank, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))

    same_over_gloo(run, "sparse gradients")


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
@on_ranks(2)
def test_hooks(rank, world, name):
    def run(group):
        model = DDP(net(), process_group=group)
        model.register_comm_hook(group, getattr(default_hooks, name))
        return weights(train(model, rank))

    same_over_gloo(run, name)


@only_nvx
@on_ranks(2)
def test_power_sgd_hook(rank, world):
    """The callbacks of the hook chain collectives, and one may drop the last reference to the group."""

    def run(group):
        model = DDP(net(), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return weights(train(model, rank, steps=5))

    trained = run(dist.group.WORLD)
    assert_ranks_agree(trained, "powerSGD")
    assert_same_weights(run(dist.new_group()), trained, "powerSGD again")


@on_ranks(2)
def test_a_hook_written_in_python(rank, world):
    """The hook returns a future; its callback divides and calls another collective."""

    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()
        return future.then(lambda f: f.value()[0] / world)

    def run(group):
        model = DDP(net(), process_group=group, bucket_cap_mb=0.001)
        model.register_comm_hook(group, hook)
        return weights(train(model, rank))

    same_over_gloo(run, "python hook")


@on_ranks(2)
def test_broadcast_buffers(rank, world):
    def run(group):
        model = DDP(net(WithBatchNorm), process_group=group, broadcast_buffers=True)
        return [t.clone() for t in train(model, rank).module.parameters()]

    same_over_gloo(run, "broadcast_buffers")


@on_ranks(2)
def test_zero_redundancy_optimizer(rank, world):
    def run(group):
        model = DDP(net(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, parameters_as_bucket_view=True, lr=0.01
        )
        train(model, rank, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=0)
        return weights(model)

    same_over_gloo(run, "ZeRO")
    model = DDP(net())
    assert_same_weights(
        run(dist.group.WORLD),
        weights(train(model, rank, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))),
        "ZeRO against plain Adam",
    )


@on_ranks(2)
def test_join_with_uneven_inputs(rank, world):
    def run(group):
        model = DDP(net(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(3 + 2 * rank):
                x, y = batch(rank, step)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return weights(model)

    same_over_gloo(run, "Join")


@on_ranks(2)
def test_two_models_over_two_groups(rank, world):
    """Trains two DDP models alternately, each over its own group."""

    def run(kind):
        models = [DDP(net(seed=s), process_group=dist.new_group(backend=kind)) for s in (0, 1)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for step in range(3):
            x, y = batch(rank, step)
            for model in models:
                nn.functional.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [t for m in models for t in weights(m)]

    assert_same_weights(run(BACKEND), run("gloo"), "two models")


@only_nvx
@on_ranks(2)
def test_differing_models_are_refused(rank, world):
    """Rank 1 detects different shapes and leaves; rank 0 must get an error and not wait for ever."""
    with pytest.raises(RuntimeError) as raised:
        DDP(nn.Linear(3, 3 + rank))
        dist.barrier()
    if rank == 1:
        assert "appears not to match" in str(raised.value)
