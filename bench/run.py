"""`nvx bench` with the measurements that only nvx's own figures need: `python bench/run.py init | overlap | memory |
plot`, and the contenders deepspeed and mpi. Every other word is `nvx bench`'s."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType

import direct
import memory
import overlap
import plot
import startup
from nvx.bench import cli, contenders, world
from nvx.bench.world import LaunchError


def in_ranks(module: ModuleType, given: list[str]) -> int:
    return cli.in_ranks(cli.parse(module, given), module.run, given)


def in_fresh_ranks(module: ModuleType, given: list[str]) -> int:
    """A benchmark that starts its own ranks: `alone` starts them, and `work` is one of them."""
    parsed = cli.parse(module, given)
    if parsed.worker:
        return module.work(parsed)
    if world.placed() is not None:
        raise LaunchError(f"{given[0]} starts its own ranks: run it by itself, not under torchrun or mpirun")
    return module.alone(parsed, world.shown_command(given))


def sweep(usual: Callable[[list[str]], int], given: list[str]) -> int:
    """A sweep, which DeepSpeed's op needs a compiler for, and MPI its own launcher."""
    if world.placed() is None:
        parsed = cli.parse_sweep(given)
        if "deepspeed" in parsed.vs:
            direct.build_deepspeed()
        if "mpi" in parsed.vs:
            return direct.launch_by_mpi(given, parsed.ranks)
    return usual(given)


if __name__ == "__main__":
    world.NAME, world.PROGRAM = "bench/run.py", (__file__,)
    contenders.OTHERS |= {"deepspeed": direct.DeepSpeedContender, "mpi": direct.MpiContender}
    cli.COMMANDS |= {
        "init": functools.partial(in_fresh_ranks, startup),
        "memory": functools.partial(in_fresh_ranks, memory),
        "overlap": functools.partial(in_ranks, overlap),
        "plot": plot.main,
        cli.SWEEP: functools.partial(sweep, cli.COMMANDS[cli.SWEEP]),
    }
    try:
        sys.exit(cli.main())
    except LaunchError as error:
        print(f"{world.NAME}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
