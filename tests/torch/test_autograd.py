"""Differentiable collectives (torch.distributed.nn) and SyncBatchNorm: values and gradients."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from ranks import OVER_NVX, on_ranks, only_nvx
from reference import assert_same, small_numbers
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as SyncFunction


def leaf(rank, *shape):
    return small_numbers(torch.float64, torch.Size(shape).numel(), rank).view(shape).requires_grad_()


def weight(rank, *shape):
    """A different factor for every output element and rank, so that each gradient identifies its source."""
    return small_numbers(torch.float64, torch.Size(shape).numel(), rank, salt=7).view(shape)


@on_ranks(2, 3)
def test_all_reduce_and_broadcast(rank, world):
    x = leaf(rank, 5)
    y = differentiable.all_reduce(x)
    assert_same(y.detach(), sum(leaf(r, 5).detach() for r in range(world)), "all_reduce")
    (y * weight(rank, 5)).sum().backward()
    assert_same(x.grad, sum(weight(r, 5) for r in range(world)), "its gradient")
    x = leaf(rank, 5)
    y = differentiable.broadcast(x, 1)
    assert_same(y.detach(), leaf(1, 5).detach(), "broadcast")
    (y * weight(rank, 5)).sum().backward()
    want = sum(weight(r, 5) for r in range(world)) if rank == 1 else torch.zeros(5, dtype=torch.float64)
    assert_same(x.grad, want, "its gradient")


@on_ranks(2, 3)
def test_gathers_and_scatters(rank, world):
    x = leaf(rank, 4)
    parts = differentiable.all_gather(x)
    (torch.stack(parts) * weight(rank, world, 4)).sum().backward()
    assert_same(x.grad, sum(weight(r, world, 4)[rank] for r in range(world)), "gradient of all_gather")
    x = leaf(rank, 4)
    parts = differentiable.gather(x, 0)
    loss = (torch.stack(parts) * weight(0, world, 4)).sum() if rank == 0 else sum(p.sum() * 0 for p in parts)
    loss.backward()
    assert_same(x.grad, weight(0, world, 4)[rank], "gradient of gather")
    x = leaf(rank, world, 4)
    y = differentiable.reduce_scatter(torch.zeros(4, dtype=torch.float64), list(x.unbind()))
    assert_same(y.detach(), sum(leaf(r, world, 4).detach()[rank] for r in range(world)), "reduce_scatter")
    (y * weight(rank, 4)).sum().backward()
    assert_same(x.grad, torch.stack([weight(r, 4) for r in range(world)]), "gradient of reduce_scatter")


@only_nvx
@on_ranks(2, 3)
def test_all_to_all(rank, world):
    x = leaf(rank, world, 4)
    outputs = differentiable.all_to_all([torch.zeros(4, dtype=torch.float64) for _ in range(world)], list(x.unbind()))
    (torch.stack(outputs) * weight(rank, world, 4)).sum().backward()
    assert_same(x.grad, torch.stack([weight(r, world, 4)[rank] for r in range(world)]), "gradient of all_to_all")
    x = leaf(rank, world, 4)
    y = differentiable.all_to_all_single(torch.zeros(world, 4, dtype=torch.float64), x)
    (y * weight(rank, world, 4)).sum().backward()
    assert_same(
        x.grad,
        torch.stack([weight(r, world, 4)[rank] for r in range(world)]),
        "gradient of all_to_all_single",
    )


# --- SyncBatchNorm ------------------------------------------------------------------------------------------
# torch implements the kernels around its collectives only for accelerators; these formulas replace them.


def channels(x):
    return x.transpose(0, 1).flatten(1)


def shaped(v, x):
    return v.view(1, -1, *[1] * (x.dim() - 2))


def stats(x, eps):
    flat = channels(x)
    return flat.mean(1), (flat.var(1, unbiased=False) + eps).rsqrt()


def gather_stats(x, means, inverse, running_mean, running_var, momentum, eps, counts):
    share = (counts / counts.sum()).unsqueeze(1)
    mean = (means * share).sum(0)
    second = ((inverse**-2 - eps + means**2) * share).sum(0)
    return mean, (second - mean**2 + eps).rsqrt()


def normalise(x, w, b, mean, inverse, eps):
    return (x - shaped(mean, x)) * shaped(inverse * w, x) + shaped(b, x)


def backward_sums(grad, x, mean, inverse, w, *needs):
    dy = channels(grad).sum(1)
    dy_xmu = channels(grad * (x - shaped(mean, x))).sum(1)
    return dy, dy_xmu, dy_xmu * inverse, dy


def backward_elements(grad, x, mean, inverse, w, dy, dy_xmu, counts):
    count = counts.sum()
    slope = shaped(dy_xmu / count * inverse**2, x) * (x - shaped(mean, x))
    return (grad - shaped(dy / count, x) - slope) * shaped(inverse * w, x)


STAND_INS = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalise,
    "batch_norm_backward_reduce": backward_sums,
    "batch_norm_backward_elemt": backward_elements,
}


@on_ranks(2, 3)
def test_sync_batch_norm(rank, world):
    """Every rank has a different number of rows; the statistics are those of one batch."""
    batches = [
        torch.randn(4 + 3 * r, 6, 5, generator=torch.Generator().manual_seed(r), dtype=torch.float64)
        for r in range(world)
    ]
    together = torch.cat(batches).requires_grad_()
    norm = nn.BatchNorm1d(6, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 7.0))
    want = norm(together)
    (want**3).sum().backward()
    x = batches[rank].clone().requires_grad_()
    with mock.patch.multiple(torch, **STAND_INS):
        got = SyncFunction.apply(x, norm.weight, norm.bias, None, None, norm.eps, 0.1, dist.group.WORLD, world)
        (got**3).sum().backward()
    start = sum(b.shape[0] for b in batches[:rank])
    rows = slice(start, start + x.shape[0])
    torch.testing.assert_close(got, want[rows])
    torch.testing.assert_close(x.grad, together.grad[rows])


@pytest.mark.skipif(not OVER_NVX, reason="gloo takes another way")
@on_ranks(2)
def test_sync_batch_norm_refuses_the_cpu_in_torch_itself(rank, world):
    """The reason for the formulas above. When torch supports the CPU, use the layer itself."""
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        nn.SyncBatchNorm(3)(torch.ones(2, 3))


@on_ranks(2)
def test_a_saved_output_that_is_overwritten_is_noticed(rank, world):
    """As over gloo, which copies to these outputs. The others are written in place, and have no new version."""

    def counted(call, output):
        before = output._version
        call()
        return output._version > before

    parts, whole, one = [torch.ones(2) for _ in range(world)], torch.ones(2 * world), torch.ones(2)
    assert counted(lambda: dist.all_gather(parts, one), parts[1])
    assert counted(lambda: dist.all_gather_into_tensor(whole, one), whole)
    assert counted(lambda: dist.reduce_scatter(one, parts), one)
    assert counted(lambda: dist.reduce_scatter_tensor(one, whole), one)
    assert counted(lambda: dist.gather(one, parts if rank == 0 else None), parts[1]) == (rank == 0)
    assert not counted(lambda: dist.all_reduce(one), one)
    assert not counted(lambda: dist.broadcast(one, 0), one)
    with torch.inference_mode():
        dist.all_gather([torch.ones(2) for _ in range(world)], torch.ones(2))
    factor = torch.ones(2, requires_grad=True)
    product = (factor * parts[0]).sum()
    dist.all_gather(parts, torch.full((2,), 5.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
