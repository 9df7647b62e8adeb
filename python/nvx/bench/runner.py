"""Time measurement. Contenders take turns, block by block, in the same processes, so a slow phase of the machine
affects all of them. A block begins with a barrier of the control group and with calls that are not timed. The time
of a call is that of its slowest rank. A contender's time is the median over its blocks."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .peers import Call
from .world import World

FEWEST, MOST = 3, 2000  # calls in one block, if the bench chooses


@dataclass(frozen=True)
class Effort:
    """How long to measure. `iterations` is the least number of calls of each contender; with 0 a block lasts
    `block_seconds`."""

    blocks: int = 7
    iterations: int = 0
    warmup: int = 1
    block_seconds: float = 0.02

    def calls(self) -> int:
        """The calls in a block; 0 if as many as fill it."""
        return math.ceil(self.iterations / self.blocks)


@dataclass
class Timing:
    """One contender's figures for one case, in seconds a call."""

    time: float
    p50: float
    p99: float
    least: float
    most: float
    cv: float
    calls: int
    blocks: list[float] = field(default_factory=list)
    fullest_core: list[int] = field(default_factory=list)  # the number of ranks on it at the end of each block

    def in_microseconds(self) -> dict[str, float | int | list[float] | list[int]]:
        """The form of the results file."""
        return {
            "time_us": _us(self.time), "p50_us": _us(self.p50), "p99_us": _us(self.p99), "min_us":
            _us(self.least), "max_us": _us(self.most), "cv_percent": round(100 * self.cv, 2), "calls":
            self.calls, "blocks_us": [_us(block) for block in self.blocks], "fullest_core": self.fullest_core,
        }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 4)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank, of values in ascending order."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarize(blocks: Sequence[float], calls: Sequence[float]) -> Timing:
    """Computes the figures from each block's mean and every single call."""
    ordered = sorted(calls)
    mean = statistics.fmean(ordered)
    spread = statistics.pstdev(ordered) / mean if mean else 0.0
    return Timing(
        statistics.median(blocks), percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[0],
        ordered[-1], spread, len(ordered), list(blocks),
    )  # fmt: skip


def timed(call: Call, stamps: list[int]) -> None:
    """Runs `call` once between each two stamps."""
    clock = time.perf_counter_ns
    stamps[0] = clock()
    for i in range(1, len(stamps)):
        call()
        stamps[i] = clock()


class Clock:
    """Marks between calls. On CUDA they are events of the current stream, so successive calls do not wait for the
    host; on other accelerators each mark synchronizes the device."""

    def __init__(self, device: torch.device) -> None:
        self.by_events = device.type == "cuda"
        self.waits = device.type not in ("cpu", "cuda")

    def mark(self) -> Any:
        if self.by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self.waits:
            torch.accelerator.synchronize()
        return time.perf_counter_ns()

    def seconds(self, began: Any, ended: Any) -> float:
        if not self.by_events:
            return (ended - began) / 1e9
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3


def timed_by(clock: Clock, call: Call, stamps: list[int]) -> None:
    """timed() for calls that only enqueue work on a device."""
    marks = [clock.mark()]
    for _ in stamps[1:]:
        call()
        marks.append(clock.mark())
    stamps[:] = [round(clock.seconds(marks[0], mark) * 1e9) for mark in marks]


def measure(world: World, calls: Sequence[Call], effort: Effort, aggregate: int = 1) -> list[Timing]:
    """Times every call, interleaved, and returns the same figures on every rank."""
    counts = [_calls_per_block(world, call, effort) for call in calls]
    stamps = [[0] * (count + 1) for count in counts]
    means: list[list[float]] = [[] for _ in calls]
    singles: list[list[float]] = [[] for _ in calls]
    cores: list[list[int]] = [[] for _ in calls]
    for block in range(effort.blocks):
        for turn in range(len(calls)):
            which = (turn + block) % len(calls)
            own = stamps[which]
            _one_block(world, calls[which], effort.warmup, own)
            means[which].append((own[-1] - own[0]) / counts[which] / 1e9)
            cores[which].append(_this_core())
            singles[which].extend((own[i + 1] - own[i]) / 1e9 for i in range(counts[which]))
    found: list[Timing] = []
    for which in range(len(calls)):
        slowest = world.largest([*means[which], *singles[which]])
        slowest = [value / aggregate for value in slowest]
        timing = summarize(slowest[: effort.blocks], slowest[effort.blocks :])
        timing.fullest_core = _ranks_on_the_fullest(world, cores[which])
        found.append(timing)
    return found


def _this_core() -> int:
    return ctypes.CDLL(None).sched_getcpu()


def _ranks_on_the_fullest(world: World, cores: Sequence[int]) -> list[int]:
    """The number of ranks on the fullest core for each block, from the core on which this rank ended it. Empty if
    ranks may be on several machines."""
    count = round(world.largest([max(cores, default=0)])[0]) + 1
    if world.size > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) != world.size:
        return []
    here = [float(core == this) for core in cores for this in range(count)]
    everywhere = world.total(here)
    return [round(max(everywhere[i : i + count])) for i in range(0, len(everywhere), count)]


def _one_block(world: World, call: Call, warmup: int, stamps: list[int]) -> None:
    world.barrier()
    for _ in range(warmup):
        call()
    world.synchronize()
    gc.disable()
    try:
        if world.device.type == "cpu":
            timed(call, stamps)
        else:
            timed_by(Clock(world.device), call, stamps)
    finally:
        gc.enable()


def _calls_per_block(world: World, call: Call, effort: Effort) -> int:
    """The number of calls that fill a block, the same on all ranks."""
    if effort.iterations:
        return effort.calls()
    call()
    world.synchronize()
    count, once = 2, math.inf
    while True:
        world.barrier()
        began = time.perf_counter()
        for _ in range(count):
            call()
        world.synchronize()
        once = min(once, world.largest([(time.perf_counter() - began) / count])[0])
        if count * once > effort.block_seconds / 8 or count >= 64:
            break
        count *= 4
    return min(MOST, max(FEWEST, round(effort.block_seconds / max(once, 1e-7))))
