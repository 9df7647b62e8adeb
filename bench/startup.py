"""`bench/run.py init`: from init_process_group to the end of the first all_reduce.

Every sample is a set of fresh processes that have imported torch and nothing more, so that loading a
backend counts; the contenders take turns. Beside it the same again in the same processes, after
destroy_process_group."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from nvx.bench import machine, world

AGAIN = 3  # re-initializations in each set of processes
LOADED = "nvx, loaded"  # a contender: nvx, with its module loaded before the clock starts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=5, help="sets of fresh processes of each contender (default 5)")
    parser.add_argument("--loaded", action="store_true", help="also nvx with its module loaded before the clock starts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)


class StoreBarrier:
    """Barriers and numbers over a file store: no process group may exist before the timed one."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        import torch.distributed as dist

        self.store = dist.FileStore(path, ranks)
        self.rank, self.ranks, self.count = rank, ranks, 0

    def largest(self, value: float) -> float:
        """The largest value over the ranks; also a barrier."""
        self.count += 1
        self.store.set(f"{self.count}/{self.rank}", repr(value))
        return max(float(self.store.get(f"{self.count}/{rank}")) for rank in range(self.ranks))

    def start_together(self) -> None:
        """Returns at the same time on all ranks, to some microseconds. Ranks poll a file store only now and then, so
        after a barrier over it they would differ by milliseconds."""
        moment = self.largest(time.monotonic()) + 0.2
        while time.monotonic() < moment:
            pass

    def store_server(self, timeout: timedelta) -> tuple[Any, int]:
        """A store that listens before any rank connects, as torchrun's does, and its port. A client that comes
        before the store listens retries only after half a second, which would dominate the measurement."""
        import torch.distributed as dist

        server = None
        if self.rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return server, int(self.largest(server.port if server else 0))


def work(arguments: argparse.Namespace) -> int:
    """One rank of one set: starts, and times one fresh initialization and then repeated ones."""
    import torch
    import torch.distributed as dist
    from nvx.bench.peers import NULL_BACKEND, torch_backend

    rank, ranks = world.placed() or (0, 1)
    torch.set_num_threads(1)
    backend = torch_backend("nvx" if arguments.worker == LOADED else arguments.worker)
    if arguments.worker == LOADED:
        import nvx

        nvx._load()
    barrier = StoreBarrier(arguments.rendezvous.removeprefix("file://"), rank, ranks)
    took: list[float] = []
    timeout = timedelta(seconds=arguments.timeout)
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")  # makes every rank a client
    for _ in range(1 + AGAIN):
        server, port = barrier.store_server(timeout)
        # Since 2.15, torch uses the agent's store only at this address.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        tensor = torch.ones(2)
        barrier.start_together()
        began = time.perf_counter()
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks,
            timeout=timeout,
        )  # fmt: skip
        dist.all_reduce(tensor)
        took.append(barrier.largest(time.perf_counter() - began))
        if float(tensor[0]) != ranks and backend not in ("fake", NULL_BACKEND):
            raise RuntimeError(f"the first all_reduce over {backend} gave {float(tensor[0])}, not {ranks}")
        dist.destroy_process_group()
        barrier.largest(0)
        del server
    if rank == 0:
        Path(arguments.into).write_text(json.dumps(took))
    barrier.largest(0)
    return 0


def alone(arguments: argparse.Namespace, command: str) -> int:
    """Starts the sets one after the other and prints their times."""
    if arguments.device != "cpu":
        raise world.LaunchError("init times tensors of the CPU only")
    names = [arguments.backend, *arguments.vs, *([LOADED] if arguments.loaded else [])]
    fresh: dict[str, list[float]] = {name: [] for name in names}
    again: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="nvx-bench-") as folder:
        for sample in range(arguments.samples):
            for name in names:
                into = f"{folder}/{name}-{sample}.json"
                given = ["init", "--worker", name, "--into", into, "-T", str(arguments.timeout)]
                if world.launch(given, arguments.ranks):
                    print(f"{world.NAME}: a rank of {name} failed (its error is above)")
                    return 2
                first, *others = json.loads(Path(into).read_text())
                fresh[name].append(first)
                again[name] += others
    print(
        f"# {command}\n# {machine.cpu_model()}, {arguments.ranks} ranks, "
        f"{arguments.samples} sets of fresh processes of each"
    )
    print(f"# {'backend':>12}  {'fresh (ms)':>10}  {'again (ms)':>10}  {'fresh, times ' + names[0]:>20}")
    results: list[dict[str, Any]] = []
    for name in names:
        first, other = statistics.median(fresh[name]), statistics.median(again[name])
        results.append(
            {
                "backend": name,
                "fresh_us": first * 1e6,
                "again_us": other * 1e6,
                "all_fresh_us": [t * 1e6 for t in fresh[name]],
            }
        )
        times = first / statistics.median(fresh[names[0]])
        print(f"  {name:>12}  {first * 1e3:10.2f}  {other * 1e3:10.2f}  {times:20.2f}")
    if arguments.json:
        document = machine.document(
            "init", command, {"samples": arguments.samples, "loaded": arguments.loaded}, ranks=arguments.ranks
        )
        machine.write(arguments.json, document | {"results": results})
    return 0
