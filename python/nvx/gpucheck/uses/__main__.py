"""`python -m nvx.gpucheck.uses PART`: its ranks, and a JSON object a line of what they find."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from .. import clock, probe, workers
from .. import torch_tests as own_tests
from . import surroundings


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def end(part: str, began: float, state: str, why: str = "", tried: int = 0, failed: int = 0) -> int:
    seconds = round(time.monotonic() - began, 2)
    say(part=part, end=state, why=why, tried=tried, failed=failed, seconds=seconds)
    return 1 if state == "failed" else 0


def main(given: list[str] | None = None) -> int:
    arguments = read_arguments(given)
    began, part, until = time.monotonic(), arguments.part, clock.end_of(arguments)
    gpus = arguments.gpus
    if arguments.device == "cuda" and gpus < 1:
        answer = probe.ask()
        if not answer.gpus:
            return end(part, began, "skipped", f"there is no GPU here: {answer.why}")
        gpus = len(answer.gpus)
    if part in surroundings.AT_ONCE and arguments.device == "cuda" and gpus < 2 and not arguments.together:
        return end(part, began, "skipped", workers.TURNS)
    if part in surroundings.WITH_NUMPY and not surroundings.has_numpy():
        return end(part, began, "skipped", surroundings.NO_NUMPY)
    # Before torch and the module look at it: which way a group takes is told on stderr.
    os.environ["NVX_DEBUG"] = "info"
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool is made by forking, and so are the ranks
    os.environ.update(surroundings.of_all(part, dict(os.environ)))
    if part == "torch_tests":
        found_here = own_tests.run(arguments, gpus, say)
        return end(part, began, found_here.state, found_here.why, found_here.tried, found_here.failed)
    from . import relay
    from .parts import PARTS
    from .ranks import Layout, run_ranks

    if part == "relay" and (why := relay.obstacle(arguments.module)):
        return end(part, began, "skipped", why)
    ranks = surroundings.ranks_of(part, gpus, arguments.ranks)
    devices = surroundings.devices_of(part, max(gpus, 1))
    apart = tuple(surroundings.of_rank(part, number, max(gpus, 1), dict(os.environ)) for number in range(ranks))
    layout = Layout(arguments.device, ranks, devices, arguments.module, until, environments=apart)
    lines: list[dict[str, Any]] = []

    def hear(**fields: Any) -> None:
        lines.append(fields)
        say(part=part, **fields)

    if clock.left(until) < clock.LEAST:
        return end(part, began, "skipped", clock.NO_TIME)
    found_of = run_ranks(layout, PARTS[part], hear)
    if arguments.device == "cuda":
        hear(way="kernels" if found_of.by_kernels else "host memory", why=found_of.why_not_kernels)
    if not found_of.why and arguments.kernels and not found_of.by_kernels:
        found_of.why = f"nvx's kernels did not serve: {found_of.why_not_kernels or 'it was not said that they do'}"
    tried = found_of.cases + bool(found_of.why)
    if found_of.why:
        return end(part, began, "failed", found_of.why, tried, 1)
    if not tried:
        return end(part, began, "skipped", clock.NO_TIME)
    state, why = refusals(lines)
    return end(part, began, state, why, tried)


def refusals(lines: list[dict[str, Any]]) -> tuple[str, str]:
    """How a part ends whose ranks found nothing wrong: where all that it is about was refused, nothing was tried."""
    served = [name for line in lines for name in line.get("served", [])]
    refused = {name: why for line in lines for name, why in line.get("refused", {}).items()}
    if not refused:
        return "passed", ""
    names = ", ".join(refused)
    return "passed" if served else "skipped", f"refused: {names}: {next(iter(refused.values()))}"


def read_arguments(given: list[str] | None) -> argparse.Namespace:
    from .names import NAMES

    parser = argparse.ArgumentParser(prog="nvx.gpucheck.uses", description=__doc__)
    parser.add_argument("part", choices=(*NAMES, "torch_tests"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="how many there are (default: asks)")
    parser.add_argument("--ranks", type=int, default=2, help="with one GPU, or none; with several each has a rank")
    clock.add_options(parser)
    parser.add_argument("--module", default="", help="nvx's torch module (default: as `import nvx` finds it)")
    parser.add_argument("--kernels", action="store_true", help="fails where nvx's kernels do not serve")
    parser.add_argument("--together", action="store_true", help="processes share a GPU at once, under MPS")
    parser.add_argument("--source", default="", help="the checkout, whose tests of torch's own are run")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
