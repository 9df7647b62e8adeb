"""The present latency between cores: the round-trip time of a flag between two ranks."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch.distributed as dist

from .peers import native
from .world import World

ROUNDS, TRIES = 200, 9


def flag_round(world: World) -> float | None:
    """Microseconds of one round between ranks 0 and 1, the median of some tries; None without nvx's C++ part."""
    bounce = getattr(native(), "flag_round", None)
    if world.agreed("" if bounce else "not built") or world.size < 2 or bounce is None:
        return None
    with _shared_page(world) as page:
        tries = sorted(bounce(page, world.rank, ROUNDS) for _ in range(TRIES)) if world.rank < 2 else [0.0]
        world.barrier()
    middle = world.from_first(tries[len(tries) // 2])
    return round(middle * 1e6, 4) if middle >= 0 else None


def _shared_page(world: World) -> mmap.mmap:
    """A page that all ranks map; its file is unlinked before this returns."""
    name: list[str | None] = [None]
    if world.rank == 0:
        descriptor, path = tempfile.mkstemp(prefix="nvx-bench-", dir="/dev/shm")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        os.close(descriptor)
        name[0] = path
    dist.broadcast_object_list(name, src=0)
    with open(str(name[0]), "r+b") as file:
        page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    world.barrier()
    if world.rank == 0:
        os.unlink(str(name[0]))
    return page
