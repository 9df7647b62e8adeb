"""What nvx is held against, as ranks of torch: `python -m nvx.gpucheck.workers symm_mem|gloo|nccl`. The one who is
called starts the ranks; rank 0 prints a JSON object a figure."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from . import clock, processes

SIZES = (64, 1024, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
GLOO_SIZES = (64, 16 << 10, 1 << 20, 16 << 20)
REPLAYED = (64, 4096, 16 << 10, 256 << 10, 1 << 20)
OPERATIONS = 20  # in a graph
OWN_END = 4.0  # seconds by which the ranks begin nothing more, before they are made to end
TURNS = "without MPS the ranks take turns on the GPU: their time slices would be measured"


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# ---- who starts them


def start(arguments: argparse.Namespace) -> int:
    what, began, tried, failed = arguments.what, time.monotonic(), 0, 0

    def end(state: str, why: str = "") -> int:
        say(part=what, end=state, why=why, tried=tried, failed=failed, seconds=round(time.monotonic() - began, 2))
        return 1 if state == "failed" else 0

    if what == "symm_mem" and not arguments.together and arguments.gpus < 2:
        return end("skipped", TURNS)
    ranks = [arguments.gpus] if what == "nccl" else [2] if what == "gloo" else [8, 2, 4]
    for n in ranks:
        if what == "symm_mem" and not arguments.together and n > arguments.gpus:
            continue
        if clock.left(clock.end_of(arguments)) < clock.LEAST:
            say(part=what, left_out=f"{n} ranks", why="time ran out")
            continue
        tried += 1
        why = run_ranks(arguments, n)
        if why:
            failed += 1
            say(part=what, failed=f"{n} ranks", why=why)
    if tried == 0:
        return end("skipped", clock.NO_TIME)
    return end("failed" if failed else "passed")


def run_ranks(arguments: argparse.Namespace, ranks: int) -> str:
    """Empty, or the last words of the rank that failed first."""
    with tempfile.TemporaryDirectory(prefix="nvx-gpucheck-") as folder:
        command = [sys.executable, "-m", "nvx.gpucheck.workers", arguments.what, "--gpus", str(arguments.gpus)]
        end = clock.end_of(arguments)
        command += ["--until", str(end), "--meet", f"{folder}/store", "--ranks", str(ranks)]
        environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "OMP_NUM_THREADS": "1"}
        logs = [open(f"{folder}/{rank}.log", "w+") for rank in range(ranks)]
        started = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=environment, stderr=log, preexec_fn=processes.with_me()
            )
            for rank, log in enumerate(logs)
        ]
        why = ""
        waiting = dict(enumerate(started))
        while waiting and not why:
            for rank, process in list(waiting.items()):
                if process.poll() is not None:
                    del waiting[rank]
                    if process.returncode != 0:
                        why = last_words(logs[rank]) or f"rank {rank} ended with code {process.returncode}"
                        break
            if clock.left(end) < 0:
                why = why or "the ranks did not end in time"
            time.sleep(0.02)
        for process in waiting.values():
            process.kill()
            process.wait()
        for log in logs:
            log.close()
        return why


def last_words(log: Any) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# ---- the ranks


def event_time_us(torch: Any, call: Any, times: int, rounds: int = 5) -> float:
    """Of one of several calls in a row on a stream: the median of rounds."""
    found = []
    for turn in range(rounds + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        if turn:  # the first one warms up
            found.append(begin.elapsed_time(end) * 1e3 / times)
    return statistics.median(found)


def wall_time_us(torch: Any, call: Any, times: int, rounds: int = 5) -> float:
    found = []
    for turn in range(rounds + 1):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            call()
        torch.accelerator.synchronize()
        if turn:
            found.append((time.perf_counter() - began) * 1e6 / times)
    return statistics.median(found)


def hear(mine: Any) -> list[Any]:
    """What each rank says."""
    from . import exchange  # who starts the ranks does without torch

    return exchange.gather(mine)


def slowest(us: float) -> float:
    return max(hear(us))


def be_rank(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", arguments.rank % arguments.gpus)
    torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if arguments.what == "nccl" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{arguments.meet}", rank=arguments.rank, world_size=arguments.ranks
    )
    deadline = clock.end_of(arguments) - OWN_END
    measure = symmetric if arguments.what == "symm_mem" else collective
    measure(arguments, torch, dist, device, deadline)
    sys.stdout.flush()
    os._exit(0)  # what the libraries do at exit is not what is tried here


def goes_on(deadline: float) -> bool:
    """All ranks alike."""
    return all(hear(time.monotonic() < deadline))


def tell(arguments: argparse.Namespace, algorithm: str, size: int, us: float) -> None:
    if arguments.rank == 0:
        say(bench="all_reduce", algorithm=algorithm, ranks=arguments.ranks, bytes=size, launch_us=round(us, 3))


def tell_replays(arguments: argparse.Namespace, torch: Any, dist: Any, buffer: Any, size: int) -> None:
    """The time of one of several one-shot all-reduces in a graph, replayed in a row. The buffer is not written."""
    group = dist.group.WORLD.group_name
    graph, out, why = torch.cuda.CUDAGraph(), None, ""
    try:
        with torch.cuda.graph(graph):
            for _ in range(OPERATIONS):
                out = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group)
    except RuntimeError as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    if why := next(filter(None, hear(why)), ""):
        if arguments.rank == 0:
            say(part="symm_mem", left_out=f"a graph, {size} bytes", why=why)
        return
    buffer.fill_(1.0)
    torch.cuda.synchronize()
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    if not torch.all(out == arguments.ranks).item():
        raise RuntimeError(f"one_shot of {size} bytes in a graph gave a wrong sum")
    dist.barrier()
    us = slowest(event_time_us(torch, graph.replay, 10) / OPERATIONS)
    if arguments.rank == 0:
        named = {"replayed": "all_reduce", "algorithm": "one_shot", "ranks": arguments.ranks}
        say(**named, bytes=size, operations=OPERATIONS, us=round(us, 3))


def symmetric(arguments: argparse.Namespace, torch: Any, dist: Any, device: Any, deadline: float) -> None:
    """torch.ops.symm_mem's one-shot and two-shot all-reduce, of floats."""
    import torch.distributed._symmetric_memory as memory

    group = dist.group.WORLD.group_name
    for size in SIZES:
        buffer = memory.empty(size // 4, dtype=torch.float32, device=device)
        memory.rendezvous(buffer, group=group)
        ways = {
            "one_shot": lambda b=buffer: torch.ops.symm_mem.one_shot_all_reduce(b, "sum", group),
            "two_shot": lambda b=buffer: torch.ops.symm_mem.two_shot_all_reduce_(b, "sum", group),
        }
        for name, call in ways.items():
            if not goes_on(deadline):
                return
            buffer.fill_(1.0)
            torch.cuda.synchronize()
            dist.barrier()
            out = call()
            torch.cuda.synchronize()
            if not torch.all(out == arguments.ranks).item():
                raise RuntimeError(f"{name} of {size} bytes gave a wrong sum")
            dist.barrier()
            buffer.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            us = event_time_us(torch, call, 100 if size <= 1 << 20 else 10)
            tell(arguments, name, size, slowest(us))
        if size in REPLAYED and goes_on(deadline):
            tell_replays(arguments, torch, dist, buffer, size)


def collective(arguments: argparse.Namespace, torch: Any, dist: Any, device: Any, deadline: float) -> None:
    """torch.distributed's all_reduce on CUDA tensors, of NCCL by the GPU's clock, of gloo by the host's."""
    nccl = arguments.what == "nccl"
    for size in SIZES if nccl else GLOO_SIZES:
        if not goes_on(deadline):
            return
        tensor = torch.ones(size // 4, device=device)
        dist.all_reduce(tensor)
        if not torch.all(tensor == arguments.ranks).item():
            raise RuntimeError(f"an all_reduce of {size} bytes gave a wrong sum")
        tensor.zero_()
        times = (100 if size <= 1 << 20 else 10) if nccl else (20 if size <= 64 << 10 else 3)
        dist.barrier()
        time_us = event_time_us if nccl else wall_time_us
        us = time_us(torch, lambda t=tensor: dist.all_reduce(t), times)
        tell(arguments, arguments.what, size, slowest(us))


def read_arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nvx.gpucheck.workers", description=__doc__)
    parser.add_argument("what", choices=("symm_mem", "gloo", "nccl"))
    parser.add_argument("--gpus", type=int, default=1)
    clock.add_options(parser)
    parser.add_argument("--together", action="store_true", help="processes share a GPU at once, under MPS")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--meet", help="a file that does not exist yet")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    arguments = read_arguments(given)
    clock.end_of(arguments)
    return start(arguments) if arguments.rank is None else be_rank(arguments)


if __name__ == "__main__":
    sys.exit(main())
