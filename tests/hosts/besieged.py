"""The cost of strangers for a job of two ranks on two hosts with a job key: all_reduces of 4 KiB while clients of every
kind come to the ports of both ranks, in turn with seconds in which the clients are stopped.

    PYTHONPATH=tests/support python -m tests.hosts.besieged [seconds]

Prints the connections that the kernel has accepted for the ranks, and the median call without clients and with them.
Only a machine with idle cores shows the cost for the ranks: on others the clients take the ranks' processors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.network import Hosts
from tests.hosts.world import ROOT, Cluster

KEY = {"NVX_JOB_KEY": "a secret of the whole job, all ranks"}


def accepted_by(pid: int) -> int:
    """The TCP connections that the host of this process has accepted, by the kernel's counter."""
    names, values = (line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if "Tcp:" in line)
    return int(values[names.index("PassiveOpens")])


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    with Hosts(2) as hosts, tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(hosts, Path(folder))
        try:
            cluster.start("time_calls", 2, environment=KEY, seconds=seconds)
            cluster.wait_for("ready")
            clients = []
            for rank in range(2):
                pid = str(cluster.ranks[rank].pid)
                command = ["-m", "tests.hosts.stranger", pid, hosts.address(rank), "", "", "tcp"]
                inside = hosts.inside(1 - rank, [sys.executable, *command])
                clients.append(subprocess.Popen(inside, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            turns, stopped, pids = [], False, [rank.pid for rank in cluster.ranks]
            before = connections = sum(map(accepted_by, pids))
            while cluster.ranks[0].poll() is None:
                stopped = not stopped
                for client in clients:
                    os.kill(client.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
                turns.append((time.time(), stopped))
                with contextlib.suppress(OSError, ValueError):  # the ranks have ended
                    connections = sum(map(accepted_by, pids))
                time.sleep(1)
            calls = cluster.results()[0]
        finally:
            cluster.end()
        for client in clients:
            os.kill(client.pid, signal.SIGCONT)
            client.terminate()
            client.communicate(timeout=60)
    spans = {True: [], False: []}
    for (begun, was_stopped), (over, _) in zip(turns, turns[1:], strict=False):
        spans[was_stopped] += [took for when, took in calls if begun < when < over]
    alone, besieged = (1e6 * statistics.median(spans[key]) for key in (True, False))
    print(f"{connections - before:,} connections, 0 errors in {len(calls):,} calls")
    print(f"median call {alone:.0f} us alone, {besieged:.0f} us with clients ({besieged / alone - 1:+.1%})")


if __name__ == "__main__":
    main()
