"""The ranks of a benchmark, started by the bench, by torchrun or by mpirun, and the gloo control group.

Control data never uses the backend under test: barriers between blocks, agreed iteration counts and the slowest
rank's time use a separate gloo group."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import interrupts
from ..cli import reader_is_gone
from ..commands import Refused
from . import hosts

INCOMPLETE = "RANK, WORLD_SIZE, ... are incomplete or wrong: use torchrun or mpirun, or unset them"
NAME, PROGRAM = "nvx bench", ("-m", "nvx.bench")  # bench/run.py of a checkout changes both
RENDEZVOUS = "--rendezvous"
RANK_NAMES = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


class LaunchError(Refused):
    """The ranks could not be started; the text states what to do."""


def placed() -> tuple[int, int] | None:
    """(rank, ranks) if a launcher made this process one of several, from the variables of torchrun or MPI. A shell
    that srun started is one rank of MPI, and no launcher."""
    for rank, size in RANK_NAMES:
        given = [os.environ[name] for name in (rank, size) if name in os.environ]
        if len(given) == 2 and (rank == "RANK" or given[1] != "1"):
            if not all(map(str.isdecimal, given)) or int(given[0]) >= int(given[1]):
                raise LaunchError(INCOMPLETE)
            return int(given[0]), int(given[1])
    return None


def under_mpi() -> bool:
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a rank. One thread a rank: the ranks share the cores with each other's helper threads."""
    import nvx

    source = str(Path(next(iter(nvx.__path__))).parent)
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    place = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(ranks))
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **place}


def launch(arguments: Sequence[str], ranks: int, hosts: int = 1) -> int:
    """Runs the command line again in every rank; the status of a rank that fails, or 0. No process outlives it."""
    with tempfile.TemporaryDirectory(prefix="nvx-bench-") as folder:
        rendezvous = f"file://{folder}/store"
        command = [sys.executable, *PROGRAM, *arguments, RENDEZVOUS, rendezvous]
        if hosts > 1:
            return _run_on_hosts(command, ranks, hosts)
        return run_all([(command, rank_environment(rank, ranks, run_number())) for rank in range(ranks)])


def _run_on_hosts(command: list[str], ranks: int, count: int) -> int:
    """Runs the ranks on so many hosts, which the bench makes on this machine."""
    port = run_number()
    why = hosts.why_no_namespaces()
    with ExitStack() as stack:
        made = stack.enter_context(hosts.Hosts(count)) if why is None else None
        if made is None:
            print(f"nvx bench: {why}: the ranks only claim to be on {count} hosts, and connect over loopback")
        starts = []
        for rank in range(ranks):
            host = hosts.host_of(rank, ranks, count)
            environment = rank_environment(rank, ranks, port)
            environment[hosts.LAYOUT] = f"{count} {'namespaces' if made else 'names'}"
            on_host = [r for r in range(ranks) if hosts.host_of(r, ranks, count) == host]
            environment |= {"LOCAL_RANK": str(on_host.index(rank)), "LOCAL_WORLD_SIZE": str(len(on_host))}
            if made:
                environment.update(made.environment())
            else:
                environment["NVX_HOST_ID"] = f"host{host}"
            starts.append((made.inside(host, command) if made else command, environment))
        return run_all(starts)


def run_number() -> int:
    """A number that distinguishes runs (no process listens on it: the rendezvous is a file)."""
    return 20000 + os.getpid() % 40000


def run_all(starts: list[tuple[list[str], dict[str, str]]]) -> int:
    """Runs these commands in these environments. The first failure ends all; so does an exception or a signal here."""
    children: list[subprocess.Popen] = []
    with interrupts.interruptible():
        try:
            for command, environment in starts:
                with interrupts.deferred():
                    children.append(subprocess.Popen(command, env=environment))
            while None in (states := [child.poll() for child in children]) and not any(states):
                if reader_is_gone():
                    raise BrokenPipeError
                time.sleep(0.02)
            worst = min(filter(None, states), default=0)
            if worst < 0:
                which = f"rank {states.index(worst)}" if len(states) > 1 else Path(starts[0][0][0]).name
                print(f"{NAME}: {which} was ended by signal {-worst} ({signal.strsignal(-worst)})", file=sys.stderr)
            return worst if worst >= 0 else 128 - worst
        finally:
            _end(children)


def _end(children: list[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def shown_command(arguments: Sequence[str]) -> str:
    """The command line as a user would type it, without the launcher's additions."""
    end = arguments.index(RENDEZVOUS) if RENDEZVOUS in arguments else len(arguments)
    return f"{NAME} {shlex.join([*arguments[:end], *arguments[end + 2 :]])}"


@dataclass
class World:
    """This rank and the control group. Made by `join`."""

    rank: int
    size: int
    device: Any = "cpu"  # torch's device of the measured tensors

    def synchronize(self) -> None:
        """Waits for the work that this rank has enqueued on its device."""
        if str(self.device) != "cpu":
            torch.accelerator.synchronize()

    def barrier(self) -> None:
        dist.barrier()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Element by element, the largest over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], op: Any) -> list[float]:
        numbers = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(numbers, op=op)
        return numbers.tolist()

    def from_first(self, value: float) -> float:
        """Rank 0's value on every rank."""
        number = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(number, src=0)
        return float(number.item())

    def agreed(self, reason: str) -> str:
        """The first rank's non-empty reason, on every rank: if one rank cannot take part, none does."""
        reasons: list[str] = [""] * self.size
        dist.all_gather_object(reasons, reason)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")

    def log(self, text: str) -> None:
        """Prints on rank 0 only."""
        if self.rank == 0:
            print(text, flush=True)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def join(rendezvous: str | None, timeout: float, device: str = "cpu") -> World:
    """Joins the ranks: the default process group is the gloo control group."""
    if rendezvous is None and under_mpi() and "MASTER_ADDR" not in os.environ:
        rendezvous = _rendezvous_over_mpi()
    place = placed()
    if place is None or not (rendezvous or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        raise LaunchError(INCOMPLETE)
    rank, size = place
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", rendezvous or "env://", timeout=limit, rank=rank, world_size=size)
    return World(rank, size, place_on(device))


def place_on(device: str) -> Any:
    """The torch device of this rank: ranks of one machine use its devices in turn."""
    if device == "cpu":
        return torch.device(device)
    index = int(os.environ.get("LOCAL_RANK", placed()[0])) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(device, index)


def why_no(device: str) -> str:
    """The reason why ranks cannot have tensors on it; empty if they can."""
    if device == "cpu":
        return ""
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    return "" if torch.cuda.is_available() else "torch finds no GPU (nvx topo shows more)"


def _rendezvous_over_mpi() -> str:
    """A bare mpirun gives no rendezvous address: rank 0 names a free port of its host."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # it is not installed, or finds no library
        unset = "if no mpirun started this process, unset OMPI_COMM_WORLD_RANK and PMI_RANK"
        raise LaunchError(f"ranks of MPI find each other by mpi4py ({error}): pip install mpi4py; {unset}") from None
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_size()
    host = "127.0.0.1" if here == MPI.COMM_WORLD.Get_size() else socket.gethostname()  # its name need not resolve
    return MPI.COMM_WORLD.bcast(f"tcp://{host}:{port}", root=0)
