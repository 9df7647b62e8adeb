"""Small models whose training can be compared bit for bit: the same steps over nvx and over gloo."""

import torch
import torch.distributed as dist
from reference import assert_same
from torch import nn
from torch.nn import functional as f

WIDTH = 24


class Net(nn.Module):
    """Uneven layers, so that shards and buckets have odd sizes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 37)
        self.norm = nn.LayerNorm(37)
        self.second = nn.Linear(37, 19)
        self.last = nn.Linear(19, 5, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(f.relu(self.first(x))))))


def net(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def batch(rank, step, rows=6):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 5, generator=generator)


def train(model, rank, steps=4, optimizer=None, rows=6):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(rank, step, rows)
        f.mse_loss(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same_weights(got, want, what):
    assert len(got) == len(want), what
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same(a, b, f"{what}: parameter {number}")


def assert_as_alone(got, world, divisor=None):
    """Asserts that DDP's or FSDP's weights are, to rounding, those of one process that adds the ranks' gradients."""
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        for rank in range(world):
            x, y = batch(rank, step)
            (f.mse_loss(alone(x), y) / (divisor or world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(got, weights(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_ranks_agree(tensors, what):
    """Asserts that every rank has the same bits, over an independent path: objects over gloo."""
    gloo = dist.new_group(backend="gloo")
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, [t.tolist() for t in tensors], group=gloo)
    assert all(other == of_all[0] for other in of_all), what


def same_over_gloo(run, what):
    """run(group) returns tensors; over gloo they must have the same bits (on two ranks sums commute)."""
    got = run(dist.group.WORLD)
    want = run(dist.new_group(backend="gloo"))
    assert_same_weights(got, want, what)
    return got
