"""Collectives over two hosts, both of them this machine. Kernels reduce inside each host and parts cross between hosts,
or kernels only copy a rank's data to host memory and back."""

from __future__ import annotations

import functools
import time

import torch
import torch.distributed as dist

from .rank import Cases, Rank, close

COUNTS = (3_333_333, (4 << 20) + 1)  # several slices each
LATE = 1.0  # seconds by which a rank comes after the others


def floats(rank: int, turn: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + rank))


def proxied(rank: Rank, asynchronous: bool, counts: tuple[int, ...] = COUNTS) -> None:
    """The bits equal those of CPU tensors, which use another algorithm."""
    ops = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)
    for turn, (count, op) in enumerate(zip(counts * 2, ops, strict=False)):
        want = floats(rank.number, turn, count)
        tensor = want.to(rank.device)
        dist.all_reduce(want, op)
        work = dist.all_reduce(tensor, op, async_op=asynchronous)
        if work is not None:
            work.wait()
        close([tensor], [want], f"{count} elements, {op}", exact=True)


def several(rank: Rank, count: int = COUNTS[0]) -> None:
    """Starts several operations in a row and waits for them at the end."""
    wants = [floats(rank.number, turn, count) for turn in range(3)]
    tensors = [want.to(rank.device) for want in wants]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for want in wants:
        dist.all_reduce(want)
    for work in works:
        work.wait()
    close(tensors, wants, "several at once", exact=True)


def others(rank: Rank, counts: tuple[int, ...] = (5, 70_001, COUNTS[0])) -> None:
    """Collectives with a block for each rank, and collectives that kernels do not implement."""

    def calls(tensor: torch.Tensor) -> list[torch.Tensor]:
        whole, part = torch.empty(rank.world * tensor.numel(), device=tensor.device), torch.empty_like(tensor)
        dist.all_gather_into_tensor(whole, tensor)
        dist.reduce_scatter_tensor(part, whole)
        dealt = torch.empty_like(whole)
        dist.all_to_all_single(dealt, whole)
        dist.broadcast(tensor, rank.world - 1)
        reduced = tensor.clone()
        dist.reduce(reduced, 1)
        return [whole, part, dealt, tensor, *([reduced] if rank.number == 1 else [])]

    for turn, count in enumerate(counts):
        want = floats(rank.number, turn, count)
        close(calls(want.to(rank.device, copy=True)), calls(want), f"blocks of {count} elements", exact=True)


def host_goes_on(rank: Rank, count: int = COUNTS[0]) -> None:
    """If a peer comes late, neither the call nor `wait()` blocks the host: only the device waits."""
    tensor = torch.full((count,), rank.number + 1.0, device=rank.device)
    dist.all_reduce(tensor)
    rank.synchronize()
    rank.all_gather("all have opened their devices")
    if rank.number == 0:
        time.sleep(LATE)
    began = time.monotonic()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 1)
    dist.all_reduce(tensor, async_op=True).wait()
    took = time.monotonic() - began
    if rank.device.type != "cpu" and rank.number != 0 and took > LATE / 2:
        raise AssertionError(f"the host was held for {took:.2f} s, as a peer came {LATE} s late")
    rank.report(proxy="host time of three calls, a peer late", us=round(1e6 * took, 1))
    close([tensor], [torch.full((count,), 160.0)], "what came of it", exact=True)


RELAY: Cases = {
    "all_reduce": functools.partial(proxied, asynchronous=False),
    "all_reduce, async_op": functools.partial(proxied, asynchronous=True),
    "several at once": several,
    "blocks, and what the hosts do": others,
    "the host goes on": host_goes_on,
}
