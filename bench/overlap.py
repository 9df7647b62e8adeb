"""`bench/run.py overlap`: how much a matrix product slows while an all_reduce runs beside it.

Each round starts an asynchronous all_reduce, multiplies as long as the slowest contender's all_reduce
takes by itself, then waits. The product's own time is what counts: a contender that computes with the
cores the product needs shows here."""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from nvx.bench import machine, report, sizes
from nvx.bench.contenders import enlist
from nvx.bench.peers import TorchContender
from nvx.bench.probe import flag_round
from nvx.bench.runner import Clock, Effort, measure
from nvx.bench.world import World

ALONE = "alone"
WARMUP = 1  # rounds of a block that are not timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-b", "--bytes", type=sizes.size_argument, default=16 << 20, help="of the all_reduce (default 16M)"
    )
    parser.add_argument("--side", type=int, default=512, help="rows and columns of the product (default 512)")
    parser.add_argument("--iters", type=int, default=35, help="rounds of each contender (default 35)")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each contender, taking turns (default 7)")


class Round:
    """One round over one contender (None: no collective runs), and the times of its products."""

    def __init__(self, group: dist.ProcessGroup | None, tensor: torch.Tensor, multiply: Callable[[], None]) -> None:
        self.group, self.tensor, self.multiply = group, tensor, multiply
        self.clock = Clock(tensor.device)
        self.marks: list[tuple[Any, Any]] = []

    def __call__(self) -> None:
        began = self.clock.mark()
        work = dist.all_reduce(self.tensor, group=self.group, async_op=True) if self.group else None
        self.multiply()
        self.marks.append((began, self.clock.mark()))
        if work is not None:
            work.wait()

    def products(self, blocks: int, calls: int) -> list[float]:
        """The times in the timed rounds."""
        block = WARMUP + calls // blocks
        marks = self.marks[-blocks * block :]
        return [self.clock.seconds(*mark) for i, mark in enumerate(marks) if i % block >= WARMUP]


def products(device: torch.device, side: int, times: int) -> Callable[[], None]:
    left, right, out = (torch.rand(side, side, device=device) for _ in range(3))

    def multiply() -> None:
        for _ in range(times):
            torch.mm(left, right, out=out)

    return multiply


def enough_products(world: World, side: int, tensor: torch.Tensor, usable: list[TorchContender]) -> tuple[int, dict]:
    """The number of products that last as long as the slowest contender's all_reduce, the same on all ranks; and the
    time of each alone."""
    calls: list[Callable[[], object]] = [products(tensor.device, side, 1)]
    calls += [functools.partial(dist.all_reduce, tensor, group=each.group) for each in usable]
    timings = measure(world, calls, Effort(blocks=3, iterations=9))
    slowest = max(timing.time for timing in timings[1:])
    alone = {each.name: timing.time for each, timing in zip(usable, timings[1:], strict=True)}
    return max(1, math.ceil(world.from_first(slowest / timings[0].time))), alone


def run(world: World, arguments: argparse.Namespace, command: str) -> int:
    contenders, refused = enlist([arguments.backend, *arguments.vs], world, arguments.timeout)
    usable = [contender for contender in contenders if isinstance(contender, TorchContender)]
    if arguments.backend in refused:
        world.log(f"bench/run.py: {arguments.backend}: {refused[arguments.backend]}")
        return 2
    document = machine.document("overlap", command, {"bytes": arguments.bytes, "side": arguments.side})
    tensor = torch.zeros(max(1, arguments.bytes // 4), device=world.device)
    times, alone = enough_products(world, arguments.side, tensor, usable)
    product = f"{times} products of {arguments.side} x {arguments.side}"
    shown = f"{world.size} ranks; {product} beside an all_reduce of {sizes.show_size(arguments.bytes)}"
    world.log(report.opening(command, document, shown, [contender.name for contender in usable]))
    round_trip = flag_round(world)
    world.log(report.state(round_trip))
    results = _rounds(world, arguments, times, tensor, usable, alone)
    if arguments.json and world.rank == 0:
        rest = {"ranks": world.size, "products": times, "flag_round_us": [round_trip], "results": results}
        machine.write(arguments.json, document | rest)
    for contender in contenders:
        contender.close()
    return 0


def _rounds(
    world: World, arguments: argparse.Namespace, times: int, tensor: torch.Tensor, usable:
    list[TorchContender], alone: dict[str, float],
) -> list[dict[str, Any]]:  # fmt: skip
    multiply = products(world.device, arguments.side, times)
    rounds = [Round(None, tensor, multiply), *(Round(each.group, tensor, multiply) for each in usable)]
    timings = measure(world, rounds, Effort(arguments.blocks, arguments.iters, WARMUP))
    times_of = [each.products(arguments.blocks, timing.calls) for each, timing in zip(rounds, timings, strict=True)]
    took = [statistics.median(world.largest(own)) for own in times_of]
    names = [ALONE, *(contender.name for contender in usable)]
    world.log(f"# {'beside':>12}  {'product (ms)':>12}  {'slowed by':>9}  {'whole (ms)':>10}  {'by itself':>16}")
    out: list[dict[str, Any]] = []
    for name, product, timing in zip(names, took, timings, strict=True):
        itself = alone.get(name)
        slowed = product / took[0] - 1
        out.append(
            {
                "backend": name,
                "product_us": round(product * 1e6, 2),
                "slowed_by": round(slowed, 4),
                "all_reduce_alone_us": None if itself is None else round(itself * 1e6, 2),
                **timing.in_microseconds(),
            }
        )
        last = "" if itself is None else f"{itself * 1e3:.2f} ms"
        world.log(f"  {name:>12}  {product * 1e3:12.2f}  {slowed:9.1%}  {timing.time * 1e3:10.2f}  {last:>16}")
    return out
