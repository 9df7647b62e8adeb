"""The present latency between cores: the round-trip time of a flag between two ranks."""

from __future__ import annotations

import contextlib
import mmap
import tempfile

import torch.distributed as dist

from .peers import native
from .world import World

ROUNDS, TRIES = 200, 9
SHARED = 1e-3  # seconds; a round of two ranks that share one core takes two time slices


def flag_round(world: World) -> float | None:
    """Microseconds of one round between ranks 0 and 1, the median of some tries; None without nvx's C++ part, or if the
    two share no memory."""
    bounce = getattr(native(), "flag_round", None)
    if world.agreed("" if bounce else "not built") or world.size < 2 or bounce is None:
        return None
    page = _shared_page(world)
    if world.agreed("" if page or world.rank > 1 else "no page"):
        return None
    middle = world.from_first(min(bounce(page, world.rank, 3) for _ in range(5)) if page else 0.0)
    if middle < SHARED:
        tries = sorted(bounce(page, world.rank, ROUNDS) for _ in range(TRIES)) if page else [0.0]
        middle = world.from_first(tries[len(tries) // 2])
    return round(middle * 1e6, 4) if middle >= 0 else None


def _shared_page(world: World) -> mmap.mmap | None:
    """A page that ranks 0 and 1 map, of a file that is unlinked before this returns. None if this rank is another one
    or cannot: the two may be on different machines, or in different containers."""
    name, page = [""], None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if world.rank == 0:
                file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="nvx-bench-", dir="/dev/shm"))
                file.truncate(mmap.PAGESIZE)
                page, name[0] = mmap.mmap(file.fileno(), mmap.PAGESIZE), file.name
        dist.broadcast_object_list(name, src=0)
        with contextlib.suppress(OSError):
            if world.rank == 1:
                page = mmap.mmap(stack.enter_context(open(name[0], "r+b")).fileno(), mmap.PAGESIZE)
        world.barrier()
    return page
