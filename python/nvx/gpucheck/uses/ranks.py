"""The ranks of a part: processes forked from one that has torch imported and no device touched."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import hashlib
import math
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait as wait_for_any
from typing import Any

import torch
import torch.distributed as dist

from .. import clock, exchange, processes
from .module import load_module

DIED = "its process ended with code"
OWN_END = 0.1  # of the time: by so much they begin nothing more, before they are made to end
GRACE = 4.0  # seconds the other ranks get to speak once one has failed


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the ranks are and what they load."""

    device: str  # cuda, cpu
    ranks: int
    devices: int  # the ranks take them in turn
    module: str  # the torch module of nvx; empty: as `import nvx` finds it
    until: float  # by time.monotonic(): who is not ready then is made to end
    log: str = ""
    environments: tuple[dict[str, str], ...] = ()  # by rank: set before it touches a device


class Rank:
    """One of them, in a default group over nvx."""

    def __init__(self, device: torch.device, tell: Callable[[dict[str, Any]], None], end: float = math.inf) -> None:
        self.number, self.world, self.device, self.tell = dist.get_rank(), dist.get_world_size(), device, tell
        self.beside = dist.new_group(backend="gloo")
        self.end = end  # by time.monotonic()
        self.serves_gloo = device.type in ("cpu", "cuda")  # ... these tensors

    def say(self, **fields: Any) -> None:
        """A figure, from the first rank."""
        if self.number == 0:
            self.tell(fields)

    def hear(self, mine: Any) -> list[Any]:
        """What each rank says, by a road that is not tried here."""
        return exchange.gather(mine, self.beside)

    def goes_on(self) -> bool:
        """Whether there is time for more; all ranks say the same."""
        return all(self.hear(time.monotonic() < self.end))

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def agree(self, tensors: list[torch.Tensor], what: str) -> None:
        """Every rank has the same bits."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(exchange.bytes_of(tensor))
        found = self.hear(digest.hexdigest())
        if len(set(found)) != 1:
            raise AssertionError(f"{what}: the ranks do not have the same bits: {[one[:8] for one in found]}")


Tensors = list[torch.Tensor]


def close(got: Tensors, want: Tensors, what: str, *, exact: bool = False, near: float = 1) -> None:
    """Equal bit for bit, or as near as another order of adding brings them."""
    if len(got) != len(want):
        raise AssertionError(f"{what}: {len(got)} tensors, want {len(want)}")
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        rules = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5 * near, "atol": 1e-6 * near}
        torch.testing.assert_close(
            a.detach().cpu(), b.detach().cpu(), msg=lambda said, n=number: f"{what}, tensor {n}: {said}", **rules
        )


Cases = dict[str, Callable[[Rank], None]]


def run_cases(rank: Rank, cases: Cases) -> None:
    """One after the other on all ranks. What is raised by one is for the caller; the others cannot follow it."""
    for name, case in cases.items():
        if not rank.goes_on():
            rank.say(left_out=name, why="time ran out")
            continue
        began = time.monotonic()
        try:
            case(rank)
        except Exception as error:
            raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
        rank.synchronize()
        rank.say(case=name, seconds=round(time.monotonic() - began, 3))


# ---- in a rank


def _be_rank(layout: Layout, number: int, meet: str, cases: Cases, pipe: Any) -> None:
    own_end = layout.until - clock.left(layout.until) * OWN_END
    processes.die_with(multiprocessing.parent_process().pid)
    log = open(log_of(layout, number), "w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    try:
        os.environ.update(layout.environments[number] if layout.environments else {})
        torch.set_num_threads(1)
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        if layout.module:
            load_module(layout.module)
        import nvx

        assert nvx.__version__
        device = torch.device(layout.device, number % layout.devices if layout.device != "cpu" else None)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(
            "nvx" if device.type == "cpu" else f"cpu:nvx,{device.type}:nvx",
            init_method=f"file://{meet}",
            rank=number,
            world_size=layout.ranks,
            timeout=datetime.timedelta(seconds=max(5.0, clock.left(layout.until) * 0.6)),
        )
        run_cases(Rank(device, lambda fields: pipe.send(("say", fields)), own_end), cases)
        dist.destroy_process_group()
        pipe.send(("end", ""))
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("end", str(error) or type(error).__name__))
    log.flush()
    os._exit(0)  # what libraries do at exit is not what is tried here


def log_of(layout: Layout, number: int) -> str:
    return f"{layout.log}/{number}.log"


# ---- who starts them


@dataclasses.dataclass
class Found:
    why: str = ""  # empty: all went well
    cases: int = 0
    left_out: int = 0
    by_kernels: bool = False
    why_not_kernels: str = ""


def run_ranks(layout: Layout, cases: Cases, say: Callable[..., None]) -> Found:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="nvx-uses-") as folder:
        layout = dataclasses.replace(layout, log=folder)
        waiting: dict[Any, tuple[int, Any]] = {}
        started: list[Any] = []
        for number in range(layout.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_be_rank, args=(layout, number, f"{folder}/store", cases, theirs))
            process.start()
            theirs.close()
            started.append(process)
            waiting[ours] = (number, process)
        found = Found()
        try:
            for number, kind, told in _hear(waiting, layout.until):
                if kind == "say":
                    found.cases += "case" in told
                    found.left_out += "left_out" in told
                    say(**told)
                elif told and (not found.why or told.startswith(DIED)):  # the others may be the first to notice it
                    found.why = f"rank {number}: {told}"[:2000]
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
        logs = "".join(open(log_of(layout, number), errors="replace").read() for number in range(layout.ranks))
        refused = re.search(r"collectives of device \d+ go through host memory: (.+)", logs)
        found.why_not_kernels = refused.group(1) if refused else ""
        found.by_kernels = not refused and len(re.findall(r": GPU \d+, \d+ blocks, ", logs)) >= layout.ranks
        if found.why:
            say(log=logs[-4000:])
        return found


def _hear(waiting: dict[Any, tuple[int, Any]], end: float) -> Iterator[tuple[int, str, Any]]:
    """What the ranks say, until each has ended or time is over; for a moment only once one has failed."""
    while waiting:
        ready = wait_for_any(list(waiting), max(0.0, clock.left(end)))
        if not ready:
            for number, process in waiting.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)
                yield number, "end", "it had not ended in time"
            time.sleep(0.3)  # their stacks are for the log
            return
        for pipe in ready:
            number, process = waiting[pipe]
            try:
                kind, told = pipe.recv()
            except EOFError:
                process.join(5)
                kind, told = "end", f"{DIED} {process.exitcode}"
            if kind == "end":
                del waiting[pipe]
                if told:
                    end = min(end, time.monotonic() + GRACE)
            yield number, kind, told
