"""Messages between GPUs: their bits, and their time beside a copy on one device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .rank import Cases, Rank, close

SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)


def median_us(rank: Rank, call: Callable[[], Any], calls: int) -> float:
    found = []
    for _ in range(calls + 1):
        rank.synchronize()
        rank.all_gather("together")
        began = time.perf_counter()
        call()
        rank.synchronize()
        found.append((time.perf_counter() - began) * 1e6)
    return sorted(found[1:])[calls // 2]


def both_ways(rank: Rank, sizes: tuple[int, ...] = SIZES, calls: int = 10) -> None:
    """Both ranks send and receive at once."""
    dist.all_reduce(torch.ones(1, device=rank.device))  # opens the devices
    other = 1 - rank.number
    for size in sizes:
        sent = (torch.arange(size // 4, dtype=torch.int32) + rank.number).to(rank.device)
        got = torch.zeros_like(sent)

        def exchange(sent: torch.Tensor = sent, got: torch.Tensor = got) -> None:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)])
            for work in works:
                work.wait()

        message_us = median_us(rank, exchange, calls)
        close([got], [torch.arange(size // 4, dtype=torch.int32) + other], f"{size} bytes", exact=True)
        got.zero_()
        copy_us = median_us(rank, lambda sent=sent, got=got: got.copy_(sent), calls)
        rank.report(message=size, us=message_us, copy_us=copy_us)


MESSAGES: Cases = {"both ways at once": both_ways}
