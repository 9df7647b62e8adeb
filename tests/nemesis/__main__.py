"""python -m tests.nemesis --seed S [--worlds N] [--hosts 2]: worlds of random calls with faults; see README.md."""

import argparse
import importlib.util
import subprocess
import sys
import time

from tests.nemesis.program import make
from tests.nemesis.world import Worlds


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.nemesis", description=__doc__.partition(":")[2])
    parser.add_argument("--seed", type=int, default=1, help="the first world's seed")
    parser.add_argument("--worlds", type=int, default=1, help="how many, of consecutive seeds")
    parser.add_argument("--hosts", type=int, default=1, help="hosts by name (NVX_HOST_ID), ranks by turns")
    parser.add_argument("--timeout", type=float, default=6.0, help="of the groups, in seconds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no world after so long")
    parser.add_argument("--jobs", type=int, default=1, help="worlds at once")
    parser.add_argument("--fresh", action="store_true", help="new processes for each world: no leak is seen")
    parser.add_argument("--show", action="store_true", help="print the programs and run nothing")
    return parser.parse_args()


def replay(seed, options, found):
    """The command that plays a world again, with the worlds before it if a process holds too much: a leak shows only
    after several worlds of one process."""
    held = any(text.startswith("I4") and " holds " in text for text in found)
    worlds = f"{options.seed} --worlds {seed - options.seed + 1}" if held else seed
    return f"python -m tests.nemesis --seed {worlds} --hosts {options.hosts} --timeout {options.timeout:g}"


def run_here(options):
    """Runs the worlds one after the other; returns the seeds that failed."""
    began, failed, ran = time.monotonic(), [], 0
    worlds = Worlds(options.fresh)
    try:
        for seed in range(options.seed, options.seed + options.worlds):
            if time.monotonic() - began > options.seconds:
                break
            program = make(seed, options.hosts, options.timeout)
            found = worlds.run(program)
            ran += 1
            if found:
                failed.append(seed)
                print(
                    f"FAILED {replay(seed, options, found)}", *found, "its program:", program, "", sep="\n", flush=True
                )
    finally:
        worlds.close()
    took = time.monotonic() - began
    print(
        f"{ran} worlds from seed {options.seed} on {options.hosts} host(s) in {took:.1f} s: {len(failed)} failed",
        flush=True,
    )
    return failed


def run_beside(options):
    """Shares the worlds among processes that run beside each other."""
    share = -(-options.worlds // options.jobs)
    tail = ["--hosts", options.hosts, "--timeout", options.timeout, "--seconds", options.seconds]
    tail += ["--fresh"] if options.fresh else []
    runs = []
    for job in range(options.jobs):
        count = min(share, options.worlds - job * share)
        command = ["-m", "tests.nemesis", "--seed", options.seed + job * share, "--worlds", count, *tail]
        if count > 0:
            runs.append(subprocess.Popen([sys.executable, *map(str, command)]))
    return [run.args for run in runs if run.wait()]


def main():
    options = arguments()
    if options.show:
        for seed in range(options.seed, options.seed + options.worlds):
            print(make(seed, options.hosts, options.timeout), end="\n\n")
        return 0
    if importlib.util.find_spec("nvx") is None:
        sys.exit("nvx is not importable: build it, and put it on PYTHONPATH")
    return bool(run_beside(options) if options.jobs > 1 else run_here(options))


if __name__ == "__main__":
    sys.exit(main())
