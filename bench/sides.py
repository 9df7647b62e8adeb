"""Two builds of nvx side by side: how much longer an all_reduce of 8 B and of 1 MiB takes with the installed one.

    pip install --no-deps --target SITE <a checkout of the commit before>
    python bench/sides.py --before SITE

Two ranks of each build, on one host and then on two hosts by name. The builds take turns, a batch of calls each, while
the ranks of the other wait for a line; which of them begins alternates. Each world is one of fresh processes of both.
Prints by how much the installed build is slower: the median over all turns of the ratio of a turn's two batches. Beside
it the median and the fastest batch of each build.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RANKS = 2
SIZES = {"8 B": (2, 2000), "1 MiB": (1 << 18, 20)}  # elements of float32, calls of a batch


def be_rank(site: str, store: str, rank: int) -> None:
    """Answers each size that comes on a line with the mean seconds of a call."""
    import nvx
    import torch
    import torch.distributed as dist

    if not Path(nvx.__file__).is_relative_to(site):
        sys.exit(f"bench/sides.py: nvx comes from {nvx.__file__}, not from {site}")
    torch.set_num_threads(1)
    dist.init_process_group("nvx", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    for line in sys.stdin:
        count, calls = SIZES[line.strip()]
        x = torch.zeros(count)
        for _ in range(max(2, calls // 10)):
            dist.all_reduce(x)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(x)
        print((time.perf_counter() - began) / calls, flush=True)
    dist.destroy_process_group()


@contextlib.contextmanager
def side(site: str, hosts: int, store: str) -> Iterator[list[subprocess.Popen]]:
    ranks = []
    for rank in range(RANKS):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])}
        environment |= {"NVX_HOST_ID": f"host{rank}"} if hosts > 1 else {}
        command = [sys.executable, __file__, "--rank", str(rank), "--site", site, "--store", store]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        yield ranks
        for rank in ranks:
            rank.stdin.close()
        if any(rank.wait(60) for rank in ranks):
            sys.exit(f"bench/sides.py: a rank of {site} failed; its error is above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def batch(ranks: list[subprocess.Popen], size: str) -> float:
    """Of the slower rank."""
    for rank in ranks:
        print(size, file=rank.stdin, flush=True)
    lines = [rank.stdout.readline() for rank in ranks]
    if not all(lines):
        sys.exit("bench/sides.py: a rank failed; its error is above")
    return max(map(float, lines))


def compare(sites: tuple[str, str], hosts: int, worlds: int, turns: int) -> dict[str, list[tuple[float, ...]]]:
    """By size: the seconds of a call of each turn, before and now."""
    took: dict[str, list[tuple[float, ...]]] = {size: [] for size in SIZES}
    for _ in range(worlds):
        with tempfile.TemporaryDirectory(prefix="nvx-sides-") as folder, contextlib.ExitStack() as stack:
            pair = [stack.enter_context(side(site, hosts, f"{folder}/{i}")) for i, site in enumerate(sites)]
            for turn in range(-2, turns):  # two to warm up
                for size, rows in took.items():
                    order = (0, 1) if turn % 2 else (1, 0)
                    seconds = {which: batch(pair[which], size) for which in order}
                    if turn >= 0:
                        rows.append((seconds[0], seconds[1]))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="the folder with the other build's package")
    parser.add_argument("--worlds", type=int, default=6, help="sets of fresh processes (default 6)")
    parser.add_argument("--turns", type=int, default=50, help="of a world (default 50)")
    for name in ("--rank", "--site", "--store"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return be_rank(given.site, given.store, int(given.rank))
    here = importlib.util.find_spec("nvx")
    if not given.before or not here or not (Path(given.before) / "nvx").is_dir():
        parser.error("needs an installed nvx, and --before with a folder that has another one")
    sites = (str(Path(given.before).resolve()), str(Path(here.origin).resolve().parents[1]))
    for hosts in (1, 2):
        for size, rows in compare(sites, hosts, given.worlds, given.turns).items():
            before, now = zip(*rows, strict=True)
            more = 100 * (statistics.median(new / old for old, new in rows) - 1)
            parts = [f"{size} on {hosts} host(s): {more:+.2f} % in {len(rows)} turns"]
            for word, pick in (("median", statistics.median), ("best", min)):
                parts.append(f"{word} {1e6 * pick(before):.2f} us before, {1e6 * pick(now):.2f} us now")
            print("; ".join(parts), flush=True)


if __name__ == "__main__":
    main()
