"""The collectives of the bench: one row gives the layout of the buffers and the bytes that count as bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Extent = Literal["whole", "block", "nothing"]  # the whole message, one rank's part of it, or no data
Variant = Literal["out-of-place", "in-place"]


def _all_but_one(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Collective:
    """One row of the table. `moved` turns a message's bytes into the bytes that one timed exchange moves."""

    name: str
    sends: Extent
    receives: Extent
    busbw_factor: Callable[[int], float]
    variants: tuple[Variant, ...]
    reduces: bool = False
    rooted: bool = False
    moved: int = 1

    @property
    def in_blocks(self) -> bool:
        """Whether the message has one part a rank, so its count is rounded to a multiple of the ranks."""
        return "block" in (self.sends, self.receives) or self.name == "all_to_all"


# The factors are those of nccl-tests. Its sendrecv is a shift in a ring; ours is a ping-pong between neighbours (one
# send and one recv on each side). An exchange moves the message twice, so algbw is still the rate of one direction.
COLLECTIVES: dict[str, Collective] = {
    row.name: row
    for row in (
        Collective("all_reduce", "whole", "whole", lambda n: 2 * (n - 1) / n, ("in-place",), reduces=True),
        Collective("reduce", "whole", "whole", _one, ("in-place",), reduces=True, rooted=True),
        Collective("broadcast", "whole", "whole", _one, ("in-place",), rooted=True),
        Collective("all_gather", "block", "whole", _all_but_one, ("out-of-place", "in-place")),
        Collective("reduce_scatter", "whole", "block", _all_but_one, ("out-of-place", "in-place"), reduces=True),
        Collective("all_to_all", "whole", "whole", _all_but_one, ("out-of-place",)),
        Collective("gather", "block", "whole", _all_but_one, ("out-of-place",), rooted=True),
        Collective("scatter", "whole", "block", _all_but_one, ("out-of-place",), rooted=True),
        Collective("sendrecv", "whole", "whole", _one, ("out-of-place",), moved=2),
        Collective("barrier", "nothing", "nothing", lambda n: 0.0, ("in-place",)),
    )
}

ALIASES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send_recv": "sendrecv",
    "pingpong": "sendrecv",
}


def find(name: str) -> Collective:
    """The row called `name`, by torch's name or nccl-tests'."""
    key = ALIASES.get(name, name)
    if key not in COLLECTIVES:
        raise ValueError(f"no collective '{name}': there are {', '.join(COLLECTIVES)}")
    return COLLECTIVES[key]


def elements(row: Collective, nbytes: int, itemsize: int, ranks: int) -> int:
    """Elements in the larger of input and output: at least one a rank if the message has one part a rank."""
    if row.sends == "nothing":
        return 0
    count = nbytes // itemsize
    return max(count // ranks, 1) * ranks if row.in_blocks else max(count, 1)


def bandwidth(row: Collective, nbytes: int, ranks: int, seconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s, as nccl-tests defines them."""
    if seconds <= 0 or nbytes == 0:
        return 0.0, 0.0
    algbw = row.moved * nbytes / seconds / 1e9
    return algbw, algbw * row.busbw_factor(ranks)
