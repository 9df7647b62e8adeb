"""The error of `nvx simulate` against real runs: `bench/simulation.py` (root, three minutes) writes
results/simulation.json.

Hosts are network namespaces, and `tc` limits each one's link in both directions, so that the link limits, not the CPU.
The model is given the rate and the latency that a raw TCP socket has on these links, and none of nvx's times between
hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nvx
from nvx.bench import hosts, machine
from nvx.bench.sizes import short_size
from nvx.bench.world import rank_environment

RESULTS = Path(__file__).parent / "results" / "simulation.json"
LAYOUTS = ((4, 1), (5, 1), (4, 2), (8, 1))  # hosts, and ranks of each
SIZES = (192 << 10, 1 << 20, 3 << 20)  # of the whole message
RATE = 400  # Mbit/s of all hosts together
INSIDE = 10e9  # bytes a second, for the model; the steps inside hosts take hardly any of the time
REPEATS = 3


def shape(made: hosts.Hosts) -> None:
    """Limits what every host sends and what it receives. TCP's windows are open from the beginning."""
    limit = ["root", "tbf", "rate", f"{RATE // made.count}mbit", "burst", "16kb", "latency", "400ms"]
    windows = ["net.ipv4.tcp_slow_start_after_idle=0", "net.ipv4.tcp_congestion_control=reno"]
    for host in range(made.count):
        subprocess.run(made.inside(host, ["sysctl", "-qw", *windows]), check=True)
        route = ["10.77.0.0/24", "dev", hosts.INTERFACE, "src", made.address(host), "scope", "link", "proto", "kernel"]
        change = ["ip", "-n", made.name(host), "route", "change", *route, "initcwnd", "1000", "initrwnd", "1000"]
        subprocess.run(change, check=True)
        links = ((made.name(host), hosts.INTERFACE), (f"{made.tag}-s", f"port{host}"))
        for where, link in links:
            subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", link, *limit], check=True)


def echo(address: str) -> None:
    """The other end of `probe()`."""
    with socket.create_server((address, 5000)) as server:
        channel = server.accept()[0]
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while size := int.from_bytes(channel.recv(8, socket.MSG_WAITALL), "big"):
            while size > 0:
                size -= len(channel.recv(min(size, 1 << 20)))
            channel.send(b".")


def probe(address: str) -> None:
    """Prints the latency and the rate of a TCP connection."""
    for _ in range(100):
        try:
            channel = socket.create_connection((address, 5000), timeout=30)
            break
        except OSError:
            time.sleep(0.05)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def seconds(size: int) -> float:
        began = time.perf_counter()
        channel.sendall(size.to_bytes(8, "big") + bytes(size))
        channel.recv(1)
        return time.perf_counter() - began

    round_trip = statistics.median(seconds(1) for _ in range(200))
    seconds(4 << 20)  # until the window is open
    took = seconds(20 << 20) - seconds(4 << 20)
    channel.sendall(bytes(8))
    print(json.dumps([round_trip / 2, (16 << 20) / took]))


def calls(size: int, rank: int, ranks: int) -> dict[str, tuple[int, Any]]:
    """For each collective its bytes, as `nvx simulate` counts them, and the call."""
    import torch
    import torch.distributed as dist

    count = size // 4 // ranks * ranks
    whole, block = torch.ones(count), torch.ones(count // ranks)
    other = torch.empty(count)
    blocks = list(other.chunk(ranks))
    return {
        "all_reduce": (count * 4, lambda: dist.all_reduce(whole)),
        "reduce": (count * 4, lambda: dist.reduce(whole, 0)),
        "broadcast": (count * 4, lambda: dist.broadcast(whole, 0)),
        "reduce_scatter": (count * 4, lambda: dist.reduce_scatter_tensor(block, whole)),
        "all_gather": (count * 4 // ranks, lambda: dist.all_gather_into_tensor(other, block)),
        "all_to_all": (count * 4, lambda: dist.all_to_all_single(other, whole)),
        "gather": (count * 4 // ranks, lambda: dist.gather(block, blocks if rank == 0 else None)),
        "scatter": (count * 4, lambda: dist.scatter(block, blocks if rank == 0 else None)),
    }


def be_rank(init_method: str) -> None:
    """Rank 0 prints a row for each collective and size: its bytes, and the slowest rank's seconds."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("nvx", init_method=init_method, rank=rank, world_size=ranks)
    rows = []
    for size in SIZES:
        for name, (nbytes, call) in calls(size, rank, ranks).items():
            took = []
            for _ in range(1 + REPEATS):
                dist.barrier()
                began = time.perf_counter()
                call()
                took.append(time.perf_counter() - began)
            slowest = torch.tensor(took[1:], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rows.append({"collective": name, "size": size, "bytes": nbytes, "seconds": slowest.median().item()})
    if rank == 0:
        print(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def output(started: list[subprocess.Popen]) -> str:
    """The output of the first of these, once all have ended."""
    texts = [child.communicate(timeout=300)[0] for child in started]
    if any(child.returncode for child in started):
        raise RuntimeError("a process failed; its message is above")
    return texts[0]


def measure(count: int, per_host: int) -> list[dict[str, Any]]:
    """Runs every case on so many hosts, and adds what the model says."""
    ranks = count * per_host
    with hosts.Hosts(count) as made, tempfile.TemporaryDirectory(prefix="nvx-simulation-") as folder:
        shape(made)

        def start(host: int, *arguments: str, **environment: str) -> subprocess.Popen:
            command = made.inside(host, [sys.executable, __file__, *arguments])
            return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)

        ends = [start(0, "--probe", made.address(1)), start(1, "--echo", made.address(1))]
        latency, between = json.loads(output(ends))
        init_method = f"file://{folder}/store"
        places = [(rank // per_host, rank_environment(rank, ranks, 0) | made.environment()) for rank in range(ranks)]
        rows = json.loads(output([start(host, "--rank", init_method, **env) for host, env in places]))
    for row in rows:
        row |= {"hosts": count, "ranks": ranks, "latency_us": round(latency * 1e6, 1), "rate_mb_s": between / 1e6}
        found = nvx._load().simulate(row["collective"], row["bytes"], count, per_host, INSIDE, between, latency)
        row |= {
            "schedule": found["schedule"],
            "predicted": found["seconds"],
            "error": found["seconds"] / row["seconds"] - 1,
        }
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        where = f"{row['hosts']} hosts, {row['ranks']} ranks"
        print(
            f"{where:19} {row['collective']:15} {row['schedule']:19} {short_size(row['size']):>5}"
            f" {row['seconds'] * 1e3:8.1f} ms  {row['predicted'] * 1e3:8.1f} ms {row['error']:+7.1%}"
        )
    errors = sorted(abs(row["error"]) for row in rows)
    within = sum(error <= 0.15 for error in errors)
    print(f"{within} of {len(rows)} within 15 %, median {statistics.median(errors):.1%}, largest {errors[-1]:.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-J", "--json", default=str(RESULTS), help="the file to write")
    for part in ("--probe", "--echo", "--rank"):
        parser.add_argument(part, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for part, given in ((probe, options.probe), (echo, options.echo), (be_rank, options.rank)):
        if given:
            part(given)
            return 0
    if (why := hosts.why_no_namespaces()) is not None:
        print(f"simulation.py: {why}", file=sys.stderr)
        return 2
    rows = [row for count, per_host in LAYOUTS for row in measure(count, per_host)]
    show(rows)
    arguments = {"mbit_of_all_hosts": RATE, "repeats": REPEATS}
    machine.write(options.json, machine.document("simulation", "bench/simulation.py", arguments, rows=rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
