"""Collectives in graphs: those of `torch.compile`, and those that are captured from a stream and replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Shard, distribute_tensor

from . import training
from .rank import Cases, Rank, close
from .splitting import mesh_of, numbers

ROUNDS = 5

# ---- torch.compile


def collectives(x: torch.Tensor, world: int) -> list[torch.Tensor]:
    group = dist.group.WORLD
    total = functional.all_reduce(x, "sum", group)
    mean = functional.all_reduce(x, "avg", group)
    whole = functional.all_gather_tensor(x, 0, group)
    part = functional.reduce_scatter_tensor(whole * 2, "sum", 0, group)
    swapped = functional.all_to_all_single(whole, [x.shape[0]] * world, [x.shape[0]] * world, group)
    shared = functional.broadcast(x + 1, 0, group)
    several = functional.all_reduce_coalesced([x, x * 2], "sum", group)
    return [total, mean, whole, part, swapped, shared, *several]


def expected(rank: int, world: int) -> list[torch.Tensor]:
    xs = [numbers(r, 6, 4) for r in range(world)]
    total = sum(xs)
    swapped = torch.cat([xs[rank]] * world)
    return [total, total / world, torch.cat(xs), xs[rank] * 2 * world, swapped, xs[0] + 1, total, total * 2]


def run_collectives(rank: Rank, compiler: str) -> None:
    torch._dynamo.reset()
    run = collectives if not compiler else torch.compile(collectives, backend=compiler, fullgraph=True)
    for _ in range(2):
        got = run(numbers(rank.number, 6, 4).to(rank.device), rank.world)
        close([functional.wait_tensor(t) + 0 for t in got], expected(rank.number, rank.world), compiler or "eager")


def run_replayed(rank: Rank) -> None:
    """Compiles into CUDA graphs, which the third and later calls replay, with other inputs each time."""
    torch._dynamo.reset()
    run = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, mode="reduce-overhead")
    for turn in range(ROUNDS):
        torch.compiler.cudagraph_mark_step_begin()
        got = run(numbers(100 * turn + rank.number, 64, 8).to(rank.device)).clone()
        want = sum(numbers(100 * turn + r, 64, 8) for r in range(rank.world)) * 2 + 1
        close([got], [want], f"reduce-overhead, call {turn}")


def compiled_ddp(rank: Rank, compiler: str) -> None:
    torch._dynamo.reset()
    model = torch.compile(training.ddp(rank, cap=25), backend=compiler)
    got = training.weights(training.train(rank, model))
    rank.agree(got, "compiled DDP")
    close(got, training.alone(rank), "against one process", near=10)


def compiled_dtensor(rank: Rank) -> None:
    torch._dynamo.reset()
    mesh, whole = mesh_of(rank), numbers(0, 8, 6)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Any) -> Any:
        return (x * 2).redistribute(mesh, [Shard(1)])

    got = run(distribute_tensor(whole.to(rank.device), mesh, [Shard(0)])).full_tensor()
    close([got], [whole * 2], "compiled redistribute", exact=True)


def only_on_cuda(case: Callable[[Rank], None], rank: Rank) -> None:
    """Inductor generates code only for CUDA and the CPU, and takes long."""
    if rank.device.type == "cuda":
        case(rank)
    else:
        rank.report(left_out_part="inductor", why=f"the tensors are of {rank.device.type}")


COMPILE: Cases = {
    "functional collectives": functools.partial(run_collectives, compiler=""),
    "traced": functools.partial(run_collectives, compiler="aot_eager"),
    "DTensor": compiled_dtensor,
    "DDP": functools.partial(compiled_ddp, compiler="aot_eager"),
    "inductor": functools.partial(only_on_cuda, functools.partial(run_collectives, compiler="inductor")),
    "inductor, reduce-overhead": functools.partial(only_on_cuda, run_replayed),
    "inductor, DDP": functools.partial(only_on_cuda, functools.partial(compiled_ddp, compiler="inductor")),
}

# ---- captured and replayed


class CudaGraph:
    """A CUDA graph of the work that a function enqueues."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()

    def replay(self) -> None:
        self.graph.replay()


GRAPHS: dict[str, Callable[[Callable[[], None]], Any]] = {"cuda": CudaGraph}  # by device type


def steps(rank: Rank, count: int) -> dict[str, tuple[torch.Tensor, torch.Tensor, Callable[..., None]]]:
    """By name: an input, an output, and the call that computes the output from the input."""
    world, device = rank.world, rank.device

    def empty(n: int) -> torch.Tensor:
        return torch.zeros(n, device=device)

    def in_place(x: torch.Tensor, y: torch.Tensor, call: Callable[..., Any]) -> None:
        y.copy_(x)
        call(y)

    def between(x: torch.Tensor, y: torch.Tensor) -> None:
        """Computes before and after two collectives in a row, one of them asynchronous."""
        y.copy_(x * 2)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        y.add_(1)
        dist.all_reduce(y, op=dist.ReduceOp.MAX)

    whole = world * count
    return {
        "all_reduce": (empty(count), empty(count), lambda x, y: in_place(x, y, dist.all_reduce)),
        "broadcast": (empty(count), empty(count), lambda x, y: in_place(x, y, lambda t: dist.broadcast(t, world - 1))),
        "all_gather": (empty(count), empty(whole), lambda x, y: dist.all_gather_into_tensor(y, x)),
        "reduce_scatter": (empty(whole), empty(count), lambda x, y: dist.reduce_scatter_tensor(y, x)),
        "all_to_all": (empty(whole), empty(whole), lambda x, y: dist.all_to_all_single(y, x)),
        "computing between": (empty(count), empty(count), between),
    }


def first_of(error: BaseException) -> BaseException:
    """The original error, before any cleanup failed."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def capture(rank: Rank, name: str, run: Callable[[], None]) -> tuple[Any, str]:
    """Returns the graph, or the reason of the refusal: by nvx, or by CUDA where torch has no query for it."""
    record = GRAPHS.get(rank.device.type)
    if record is None:
        raise RuntimeError(f"{rank.device.type} has no graphs")
    graph, why = None, ""
    try:
        graph = record(run)
    except RuntimeError as error:
        why = str(first_of(error)).strip().splitlines()[0]
    if len(set(rank.all_gather(bool(why)))) != 1:
        raise AssertionError(f"{name}: some ranks were refused and some not")
    return graph, why


def replay(rank: Rank, count: int) -> None:
    """Replays with other inputs each time, between eager calls, have the bits of eager calls. A refused capture reports
    the reason, and eager calls work after it."""
    served, refused = [], {}
    for name, (x, y, run) in steps(rank, count).items():
        run(x, y)  # the set-up of a first call cannot be captured
        rank.synchronize()
        graph, why = capture(rank, name, lambda x=x, y=y, run=run: run(x, y))
        for turn in range(ROUNDS):
            x.copy_(numbers(100 * turn + rank.number, x.numel()))
            run(x, y)
            eager = y.cpu()
            y.zero_()
            if graph is not None:
                graph.replay()
                close([y], [eager], f"{name}, replay {turn}", exact=True)
        if why:
            refused[name] = why
        else:
            served.append(name)
        rank.all_gather("done with this graph")
    rank.report(graphs=count * 4, served=served, refused=refused)


# Keeps the current stream busy for some milliseconds; by device type.
SLEEPS: dict[str, Callable[[Rank], None]] = {"cuda": lambda rank: torch.cuda._sleep(40_000_000)}


def across_streams(rank: Rank, count: int = 5000) -> None:
    """Replays two graphs and makes an eager call on one group, each on its own stream. One rank keeps a stream busy in
    front of them. The order of the calls must still hold: the three operations differ, so another order on that rank
    would be a mismatch."""
    a, b, c = (torch.Stream(rank.device) for _ in range(3))
    found = steps(rank, count)
    calls, graphs = [found[name] for name in ("all_reduce", "all_gather", "reduce_scatter")], []
    for name, (x, y, run) in zip(("all_reduce", "all_gather"), calls, strict=False):
        run(x, y)  # the set-up of a first call cannot be captured
        rank.synchronize()
        graph, why = capture(rank, name, lambda x=x, y=y, run=run: run(x, y))
        if why:
            rank.report(served=[], refused={f"{name}, across streams": why})
            return
        graphs.append(graph)
    x, y, run = calls[2]
    orders = {
        "graphs, then eager": ((a, graphs[0].replay), (b, graphs[1].replay), (c, lambda: run(x, y))),
        "eager, then graphs": ((c, lambda: run(x, y)), (b, graphs[0].replay), (a, graphs[1].replay)),
    }
    for late in range(rank.world):
        for what, order in orders.items():
            wants = fill(rank, 10 * late, calls)
            rank.all_gather("together")
            if rank.number == late:
                with order[0][0]:
                    SLEEPS[rank.device.type](rank)
            for stream, call in order:
                with stream:
                    call()
            rank.synchronize()
            close([y for _, y, _ in calls], wants, f"{what}, rank {late} late", exact=True)
    rank.all_gather("done with these graphs")
    rank.report(across_streams=list(orders), served=["across streams"], refused={})


def fill(rank: Rank, seed: int, calls: list[Any]) -> list[torch.Tensor]:
    """Returns new inputs and the results of eager calls on one stream. The outputs are zero afterwards."""
    wants = []
    for number, (x, y, run) in enumerate(calls):
        x.copy_(numbers(100 * (seed + number) + rank.number, x.numel()))
        run(x, y)
        wants.append(y.cpu())
        y.zero_()
    rank.synchronize()
    return wants


def crossed(rank: Rank, count: int) -> None:
    """Rank 0's all_reduce has begun and waits for rank 1. Rank 1 first needs a message from rank 0."""
    dist.all_reduce(torch.ones(1, device=rank.device))  # the first call opens the devices on all ranks together
    for turn in range(ROUNDS):
        seed = 100 * turn
        total, message = (numbers(first + rank.number, count).to(rank.device) for first in (seed, seed + 50))
        works = []
        if rank.number == 0:
            works.append(dist.all_reduce(total, async_op=True))
            dist.recv(message, 1)
            dist.send(message * 2, 1)
        elif rank.number == 1:
            dist.send(message, 0)
            dist.recv(message, 0)
        if rank.number != 0:
            works.append(dist.all_reduce(total, async_op=True))
        for work in works:
            work.wait()
        close([total], [sum(numbers(seed + r, count) for r in range(rank.world))], f"turn {turn}", exact=True)
        if rank.number < 2:
            want = numbers(seed + 51, count) * (1 + rank.number)
            close([message], [want], f"message of turn {turn}", exact=True)


REPLAY: Cases = {
    "small": functools.partial(replay, count=1000),
    "large": functools.partial(replay, count=1 << 20),
    "across streams": across_streams,
    "messages beside a collective that waits": functools.partial(crossed, count=1000),
    "large messages beside it": functools.partial(crossed, count=1 << 20),
}
