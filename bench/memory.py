"""`bench/run.py memory`: what a group holds and what it costs while it does nothing.

Resident memory of a rank, private and shared alike but without the pages of libraries, before there is a
group, with one, with many, and after each has been used; and the CPU time of the groups' threads while the
process sleeps. Fresh processes for every contender, so that none profits from what another left behind."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from nvx.bench import machine, sizes, world


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=64, help="groups held at once (default 64)")
    parser.add_argument(
        "-b", "--bytes", type=sizes.size_argument, default=16 << 20, help="all_reduced on each (default 16M)"
    )
    parser.add_argument("--idle", type=float, default=2.0, help="seconds of doing nothing (default 2)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)


def resident() -> dict[str, int]:
    """Bytes: resident memory without file pages (libraries); the part of it in shared memory; the proportional
    share."""
    rollup = _kilobytes("/proc/self/smaps_rollup")
    status = _kilobytes("/proc/self/status")
    return {
        "resident": rollup["Rss"] - status["RssFile"],
        "shared": status["RssShmem"],
        "proportional": rollup["Pss"],
    }


def on_device(device: Any) -> dict[str, int]:
    """Bytes of the GPU's memory that all processes use."""
    if device.type != "cuda":
        return {}
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {"device": total - free}


def _kilobytes(path: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in Path(path).read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def cpu_by_thread() -> dict[int, float]:
    """CPU seconds of each thread of this process, in nanosecond resolution."""
    found: dict[int, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended, or the kernel has no schedstat
    return found


def idle_cpu(seconds: float, others: set[int]) -> float:
    """CPU seconds of the process while the caller sleeps, without the threads in `others`: the caller and the
    bench's own threads wake up now and then in any measurement."""
    before, process_before = cpu_by_thread(), time.process_time()
    time.sleep(seconds)
    if not before.get(threading.get_native_id()):  # the kernel does not count by thread
        return time.process_time() - process_before
    return sum(now - before.get(thread, 0.0) for thread, now in cpu_by_thread().items() if thread not in others)


def work(arguments: argparse.Namespace) -> int:
    """One rank: runs the stages in order; each figure is the worst of the ranks."""
    import torch
    import torch.distributed as dist
    from nvx.bench.peers import torch_backend

    me = world.join(arguments.rendezvous, arguments.timeout, arguments.device)
    backend = torch_backend(arguments.worker)
    tensor = torch.zeros(max(1, arguments.bytes // 4), device=me.device)
    small = torch.zeros(2, device=me.device)
    stages: dict[str, dict[str, float]] = {}
    others = set(cpu_by_thread())

    def stage(name: str, idle: bool = False) -> None:
        gc.collect()
        me.barrier()
        cpu = idle_cpu(arguments.idle, others) if idle else 0.0
        me.synchronize()
        here = resident() | on_device(me.device)
        values = me.largest([*here.values(), cpu])
        stages[name] = dict(zip([*here, "idle_cpu_s"], values, strict=True))
        me.barrier()

    me.barrier()
    stage("none")
    backend = backend if me.device.type == "cpu" else f"{me.device.type}:{backend}"
    groups = [dist.new_group(backend=backend)]
    stage("one")
    groups += [dist.new_group(backend=backend) for _ in range(arguments.groups - 1)]
    stage("many", idle=True)
    for group in groups:
        dist.all_reduce(small, group=group)
    stage("used_small")
    for group in groups:
        dist.all_reduce(tensor, group=group)
    stage("used", idle=True)
    if me.rank == 0:
        Path(arguments.into).write_text(json.dumps(stages))
    me.leave()
    return 0


def figures(name: str, stages: dict[str, dict[str, float]], groups: int) -> dict[str, Any]:
    """The figures of one group, from the stages. The first group also pays costs of once a process."""

    def grew(after: str, before: str) -> float:
        return stages[after]["resident"] - stages[before]["resident"]

    taken = {
        f"{stage}_device_bytes": stages[stage]["device"] - stages["none"]["device"]
        for stage in ("one", "many", "used_small", "used")
        if "device" in stages[stage]
    }
    return taken | {
        "backend": name,
        "first_group_bytes": grew("one", "none"),
        "group_bytes": grew("many", "one") / max(1, groups - 1),
        "used_small_group_bytes": grew("used_small", "none") / groups,
        "used_group_bytes": grew("used", "none") / groups,
        "used_bytes": grew("used", "none"),
        "used_proportional_bytes": stages["used"]["proportional"] - stages["none"]["proportional"],
        "idle_cpu_s": stages["many"]["idle_cpu_s"],
        "used_idle_cpu_s": stages["used"]["idle_cpu_s"],
        "stages": stages,
    }


def alone(arguments: argparse.Namespace, command: str) -> int:
    """Starts fresh ranks for each contender and prints the table."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="nvx-bench-") as folder:
        for name in [arguments.backend, *arguments.vs]:
            into = f"{folder}/{name}.json"
            given = [
                "memory", "--worker", name, "--into", into, "--groups", str(arguments.groups),
                "-b", str(arguments.bytes), "--idle", str(arguments.idle), "-T", str(arguments.timeout),
                "--device", arguments.device,
            ]  # fmt: skip
            if world.launch(given, arguments.ranks):
                print(f"{world.NAME}: a rank of {name} failed (its error is above)")
                return 2
            results.append(figures(name, json.loads(Path(into).read_text()), arguments.groups))
    print(f"# {command}\n# {machine.cpu_model()}, {arguments.ranks} ranks, {arguments.groups} groups")
    _show(results, sizes.show_size(arguments.bytes), arguments.idle)
    if arguments.json:
        given_arguments = {"groups": arguments.groups, "bytes": arguments.bytes, "idle_s": arguments.idle}
        document = machine.document("memory", command, given_arguments, ranks=arguments.ranks)
        machine.write(arguments.json, document | {"results": results})
    return 0


_COLUMNS = (
    ("first group", "first_group_bytes"),
    ("a further one", "group_bytes"),
    ("each after 8 B", "used_small_group_bytes"),
    ("each after {}", "used_group_bytes"),
    ("all after it", "used_bytes"),
    ("proportional", "used_proportional_bytes"),
)


def _show(results: list[dict[str, Any]], used: str, idle: float) -> None:
    """Prints resident KiB a rank, and milliseconds of CPU while it sleeps. Memory that two ranks map counts in both,
    but in the last column of memory each has its share."""
    names = [*(name.format(used) for name, _ in _COLUMNS), "idle CPU", "after use"]
    units = [*("(KiB)" for _ in _COLUMNS), *[f"(ms in {idle:g} s)"] * 2]
    print(f"# {'backend':>12}  " + "  ".join(f"{name:>15}" for name in names))
    print(f"# {'':>12}  " + "  ".join(f"{unit:>15}" for unit in units))
    for each in results:
        memory = "  ".join(f"{each[key] / 1024:15.1f}" for _, key in _COLUMNS)
        cpu = "  ".join(f"{each[key] * 1e3:15.2f}" for key in ("idle_cpu_s", "used_idle_cpu_s"))
        print(f"  {each['backend']:>12}  {memory}  {cpu}")
        for stage, taken in ((key, each[key]) for key in each if key.endswith("_device_bytes")):
            print(f"# {each['backend']}: {taken / 1024:.0f} KiB of the GPUs, of all ranks: {stage}")
