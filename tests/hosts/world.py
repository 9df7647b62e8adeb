"""Ranks on hosts that the test makes on this machine: network namespaces joined by veth. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import warm
from nvx.bench.hosts import host_of

from tests.hosts.network import Hosts

ROOT = Path(__file__).parents[2]


class Cluster:
    """Processes that each run one body of bodies.py on their hosts. `results` returns their return values."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.ranks: list[subprocess.Popen] = []

    def start(
        self,
        body: str,
        ranks: int,
        environment: dict | list[dict] | None = None,
        by_name: bool = False,
        **arguments: object,
    ) -> Cluster:
        """`environment`: of all ranks, or one of each. `by_name`: every rank is on a host of its own, by
        `NVX_HOST_ID`."""
        for rank in range(ranks):
            more = environment[rank] if isinstance(environment, list) else environment or {}
            variables = {
                **os.environ,
                **self.hosts.environment(),
                "HOST": self.hosts.name(host_of(rank, ranks, self.hosts.count)),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1",
                **({"NVX_HOST_ID": f"host{rank}"} if by_name else {}),
                **{name: str(value) for name, value in more.items()},
            }
            command = ["-m", "tests.hosts.bodies", body, str(self.folder), json.dumps(arguments)]
            with open(self.folder / f"rank{rank}.log", "wb") as log:
                process = warm.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
            self.ranks.append(process)
        return self

    def wait_for(self, name: str, seconds: float = 60) -> None:
        """Waits until every live rank has reached that mark in its body."""
        end = time.monotonic() + seconds
        while any(not (self.folder / f"{name}{rank}").exists() for rank in range(len(self.ranks))):
            assert time.monotonic() < end, f"not all ranks came to {name}\n{self.logs()}"
            assert all(rank.poll() is None for rank in self.ranks), f"a rank ended early\n{self.logs()}"
            time.sleep(0.01)

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[rank].pid, number)

    def results(self, seconds: float = 120, without: tuple[int, ...] = ()) -> list:
        """The return values of the ranks. The ranks in `without` must have failed."""
        end = time.monotonic() + seconds
        values = []
        for rank, process in enumerate(self.ranks):
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} hangs\n{self.logs()}") from None
            if rank in without:
                assert code != 0
                values.append(None)
                continue
            assert code == 0, f"rank {rank} ended with {code}\n{self.logs()}"
            values.append(json.loads((self.folder / f"result{rank}").read_text()))
        return values

    def logs(self) -> str:
        def tail(rank: int) -> str:
            return (self.folder / f"rank{rank}.log").read_text(errors="replace")[-3000:]

        return "\n".join(f"--- rank {rank}\n{tail(rank)}" for rank in range(len(self.ranks)))

    def end(self) -> None:
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
