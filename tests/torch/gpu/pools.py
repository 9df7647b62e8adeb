"""Tensors in memory that the other ranks map, beside ordinary tensors: same bits, bytes that skip staging, and time per
call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from .rank import Cases, Rank, close
from .splitting import numbers

TIMEOUT = 20.0  # seconds until all ranks have mapped the others' pools


def stats() -> dict[str, Any] | None:
    """The pool statistics of the default group."""
    import nvx

    return nvx.pool_stats()


def pooled(rank: Rank, host: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in the pool."""
    backend = dist.group.WORLD._get_backend(rank.device)
    tensor = backend.allocate_tensor(host.numel(), dtype=host.dtype, device=rank.device)
    tensor.copy_(host)
    return tensor


def ordinary(rank: Rank, host: torch.Tensor) -> torch.Tensor:
    return host.to(rank.device)


def served(rank: Rank) -> bool:
    """Whether kernels serve the group; reports it if not."""
    dist.all_reduce(torch.ones(1, device=rank.device))
    if all(rank.all_gather(stats() is not None)):
        return True
    rank.report(left_out_part="pools", why="no kernels serve the group, and there is no pool without them")
    return False


def map_all(rank: Rank) -> None:
    """Calls until every rank has mapped the pools of all others: launches announce new memory, and mapping runs beside
    them."""
    end = time.monotonic() + TIMEOUT
    while True:
        dist.all_reduce(torch.ones(1, device=rank.device))
        found = stats()
        assert found is not None
        grown = rank.all_gather(found["grown"])
        late = time.monotonic() > end
        held = [found["mapped"][r] >= grown[r] for r in range(rank.world) if r != rank.number]
        answers = rank.all_gather((all(held), late))
        if all(holds for holds, _ in answers):
            return
        if any(is_late for _, is_late in answers):
            raise AssertionError(f"not every rank has mapped the others' pools: {found}, they have grown by {grown}")
        time.sleep(0.002)


Way = tuple[int, int, int, Callable[[torch.Tensor, torch.Tensor], Any]]


def ways(rank: Rank, count: int) -> dict[str, Way]:
    """By name: elements of the input and of the output, bytes between ranks, and the call."""
    world = rank.world
    whole = world * count

    def all_reduce(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x)
        dist.all_reduce(y)

    return {
        "all_gather": (count, whole, 4 * count, lambda x, y: dist.all_gather_into_tensor(y, x)),
        "reduce_scatter": (whole, count, 4 * count, lambda x, y: dist.reduce_scatter_tensor(y, x)),
        "all_reduce": (whole, whole, 4 * count, all_reduce),
    }


def time_of(rank: Rank, call: Callable[[], Any], calls: int) -> float:
    """Milliseconds of one call in a row of `calls` on the slowest rank: the median of three rounds."""
    found = []
    for _ in range(3):
        rank.synchronize()
        rank.all_gather("together")
        began = time.perf_counter()
        for _ in range(calls):
            call()
        rank.synchronize()
        found.append(max(rank.all_gather((time.perf_counter() - began) * 1e3 / calls)))
    return statistics.median(found)


def beside_ordinary(rank: Rank, counts: tuple[int, ...] = (1 << 18, 1 << 22), calls: int = 10) -> None:
    if not served(rank):
        return
    for count in counts:
        for name, (inputs, outputs, piece, call) in ways(rank, count).items():
            host = numbers(rank.number, inputs)
            x, y = ordinary(rank, host), ordinary(rank, torch.zeros(outputs))
            call(x, y)
            want = y.cpu()
            by_staging = time_of(rank, lambda call=call, x=x, y=y: call(x, y), calls)
            x, y = pooled(rank, host), pooled(rank, torch.zeros(outputs))
            map_all(rank)
            before = stats()
            call(x, y)
            rank.synchronize()
            dist.all_reduce(torch.ones(1, device=rank.device))  # a launch reports its counts when it ends
            rank.synchronize()
            after = stats()
            assert before is not None and after is not None
            close([y], [want], f"{name} of {piece} bytes a piece, in the pool", exact=True)
            direct = rank.all_gather((after["direct"] - before["direct"]) % (1 << 32))
            if not all(direct):
                raise AssertionError(f"{name}: pieces that went without staging, by rank: {direct}")
            in_pool = time_of(rank, lambda call=call, x=x, y=y: call(x, y), calls)
            rank.report(
                pool=name,
                piece_bytes=piece,
                direct_pieces=direct[0],
                staging_bytes_saved=direct[0] * piece,
                ordinary_ms=round(by_staging, 4),
                pool_ms=round(in_pool, 4),
            )


def train(rank: Rank, from_pool: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    # Weights of 4 MiB, so that pieces are too large for packets on any GPU: packets always use staging.
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).to(rank.device)
    mesh = DeviceMesh.from_group(dist.group.WORLD, rank.device.type)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
        if from_pool:
            layer.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        given = torch.randn(8, 1024, generator=torch.Generator().manual_seed(10 * step + rank.number))
        model(given.to(rank.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach().cpu() for p in model.parameters()]


def fsdp2(rank: Rank) -> None:
    """FSDP2 whose all-gathers and reduce-scatters use memory from the group's allocator."""
    if not served(rank):
        return
    want = train(rank, from_pool=False)
    close(train(rank, from_pool=True), want, "FSDP2 in the pool, while it is being mapped", exact=True)
    map_all(rank)
    before = stats()
    close(train(rank, from_pool=True), want, "FSDP2 in the pool", exact=True)
    after = stats()
    assert before is not None and after is not None
    direct = rank.all_gather((after["direct"] - before["direct"]) % (1 << 32))
    if not all(direct):
        raise AssertionError(f"FSDP2: pieces that went without staging, by rank: {direct}")
    rank.report(pool="FSDP2, 4 steps", direct_pieces=direct[0])


POOLS: Cases = {"beside ordinary tensors": beside_ordinary, "FSDP2": fsdp2}
