"""Large all-reduces over two hosts, both of them this machine: kernels sum inside each, and parts go between them."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import torch
import torch.distributed as dist

from .ranks import Cases, Rank, close

COUNTS = (3_333_333, (4 << 20) + 1)  # beyond what goes as one operation through host memory

_ASKS = """
import json, sys
from nvx.gpucheck.uses.module import load_module
if sys.argv[1]:
    load_module(sys.argv[1])
import nvx
print(json.dumps(nvx._load().network()))
"""


def obstacle(module: str) -> str:
    """Why this module cannot go between hosts; empty where it can. Asked in a process of its own: ranks are forked from
    this one, and UCX is not to be looked at before."""
    asks = [sys.executable, "-c", _ASKS, module]
    try:
        told = subprocess.run(asks, capture_output=True, text=True, timeout=60, check=True).stdout
        network = json.loads(told.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return f"nvx does not say whether it reaches other hosts: {getattr(error, 'stderr', '') or error}".strip()
    return "" if network["link"] else network["none"]


def floats(rank: int, turn: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * turn + rank))


def relayed(rank: Rank, asynchronous: bool, counts: tuple[int, ...] = COUNTS) -> None:
    """The bits are those of the CPU, whose tensors go another way."""
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
    """Begun one after the other, and waited for in the end."""
    wants = [floats(rank.number, turn, count) for turn in range(3)]
    tensors = [want.to(rank.device) for want in wants]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for want in wants:
        dist.all_reduce(want)
    for work in works:
        work.wait()
    close(tensors, wants, "several at once", exact=True)


RELAY: Cases = {
    "all_reduce": functools.partial(relayed, asynchronous=False),
    "all_reduce, async_op": functools.partial(relayed, asynchronous=True),
    "several at once": several,
}
