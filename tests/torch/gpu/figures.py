"""The cost of torch's calls: the host time of a call, and its events in a profile."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .rank import Cases, Rank, close

# ---- host time


def empty_launch(rank: Rank) -> Callable[[], Any]:
    """Launches the smallest possible work on a stream: on CUDA a kernel that sleeps for zero cycles."""
    if rank.device.type == "cuda":
        return lambda: torch.cuda._sleep(0)
    one = torch.zeros(1, device=rank.device)
    return lambda: one.zero_()


def floor(rank: Rank) -> dict[str, Callable[[], Any]]:
    """Calls that cost only torch's own time: a backend that does nothing, and an event of a device."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

    nothing, x = dist.new_group(backend="fake"), torch.zeros(256)
    calls: dict[str, Callable[[], Any]] = {
        "torch alone": lambda: dist.all_reduce(x, group=nothing),
        "torch alone, async_op": lambda: dist.all_reduce(x, group=nothing, async_op=True).wait(),
    }
    if rank.device.type != "cpu":
        event = torch.Event(rank.device)
        calls["an event"] = event.record
        calls["an event, made and destroyed"] = lambda: torch.Event(rank.device).record()
    return calls


def host_us(rank: Rank, call: Callable[[], Any], calls: int, rounds: int) -> float:
    """Host time of one call in a row of `calls`, while the device does not block the host. It is the minimum of the
    rounds' means, because other load only adds time."""
    found = []
    for _ in range(rounds + 1):
        rank.synchronize()
        rank.all_gather("together")
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) * 1e6 / calls)
        rank.synchronize()
    return min(found[1:])


def host_time(rank: Rank, calls: int = 100, rounds: int = 7) -> None:
    device, world = rank.device, rank.world
    x, whole = torch.zeros(256, device=device), torch.zeros(256 * world, device=device)
    eager: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce, async_op": lambda: dist.all_reduce(x, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, whole),
        "broadcast": lambda: dist.broadcast(x, 0),
    }
    launch = host_us(rank, empty_launch(rank), calls, rounds)
    rank.report(host="an empty launch", us=round(launch, 3))
    for name, call in floor(rank).items():
        rank.report(host=name, us=round(host_us(rank, call, calls, rounds), 3))
    for name, call in eager.items():
        us = max(rank.all_gather(host_us(rank, call, calls, rounds)))
        rank.report(host=name, us=round(us, 3), over_launch_us=round(us - launch, 3))
    x.fill_(rank.number + 1)
    dist.all_reduce(x)
    close([x], [torch.full((256,), world * (world + 1) / 2)], "after so many calls", exact=True)


HOST: Cases = {"calls in a row": host_time}

# ---- profiles

# CUDA calls that block the host, and CUDA calls that allocate or free memory.
WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(2D|3D)?")
MEMORY = re.compile(r"cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)\w*|cuMem(Alloc|Free|Create|Map|Host)\w*")
LAUNCHES = re.compile(r"cu(da)?Launch\w*Kernel\w*")


@contextlib.contextmanager
def cuda_calls(rank: Rank) -> Iterator[Counter[str]]:
    """Counts the CUDA calls inside the block by name."""
    from torch.profiler import ProfilerActivity, profile, record_function

    seen: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("nvx calls"):
            yield seen
    events = profiler.events()
    span = next(event.time_range for event in events if event.name == "nvx calls")
    # The profiler itself waits for the device when it begins and ends.
    inside = (event for event in events if span.start <= event.time_range.start <= span.end)
    seen.update(event.name for event in inside if event.name.startswith("cu"))


WATCHES: dict[str, Callable[[Rank], Any]] = {"cuda": cuda_calls}  # by device type


def breach(calls: int, seen: dict[str, int], taken: int) -> str:
    """Returns a violation or an empty string: each call must be launched, and none may wait or allocate memory."""

    def of(kind: re.Pattern[str]) -> dict[str, int]:
        return {call: n for call, n in seen.items() if kind.fullmatch(re.sub(r"_v\d+$", "", call))}

    launches = sum(of(LAUNCHES).values())
    if launches < calls:
        return f"{launches} launches seen of {calls} calls: {dict(seen)}"
    if of(WAITS):
        return f"{calls} calls waited for the device: {of(WAITS)}"
    if of(MEMORY) or taken:
        return f"{calls} calls took memory or gave it back: {of(MEMORY)}, torch's allocator {taken} times"
    return ""


def per_call(rank: Rank, calls: int = 20) -> None:
    """No call waits for the device or allocates device memory; each is a launch."""
    watch = WATCHES[rank.device.type]
    x, whole = torch.ones(5000, device=rank.device), torch.ones(5000 * rank.world, device=rank.device)
    others = whole.clone()
    ways: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX),
        "all_reduce, async_op": lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, whole, op=dist.ReduceOp.MAX),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, others),
    }
    for name, call in ways.items():
        for _ in range(3):  # warms up the allocator
            call()
        rank.synchronize()
        before = allocations(rank)
        with watch(rank) as seen:
            for _ in range(calls):
                call()
        rank.synchronize()
        taken = allocations(rank) - before
        rank.report(profile=name, calls=calls, seen=dict(seen), device_allocations=taken)
        if why := breach(calls, seen, taken):
            raise AssertionError(f"{name}: {why}")
    close([x, whole], [torch.ones(5000), torch.ones(5000 * rank.world)], "after so many calls", exact=True)


def allocations(rank: Rank) -> int:
    """The number of allocations that torch's allocator has requested from the device."""
    if rank.device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


PROFILE: Cases = {"calls in a row": per_call}
