"""The command line of `nvx bench`, with nccl-tests' flags, except for those that `-h` names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import stand_in
from . import collectives, contenders, machine, payload, sizes, sweep, train, world
from .sizes import above, argument
from .world import RENDEZVOUS, LaunchError

ALL_SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
_EPILOG = """another benchmark, which has its own -h:
  train      step time of DDP and FSDP2 on a communication-bound MLP

nccl-tests' flags work, except -n (its iterations are --iters) and some that are refused, such as -t and -g.
examples:
  nvx bench all_reduce -n 2 -b 8 -e 64M -f 2 --vs gloo
  nvx bench --all -n 4 --vs gloo,null -J results.json
  torchrun --nproc-per-node 2 -m nvx.bench all_gather -b 1M -e 64M -f 4
"""

_OF_A_RANK = "each rank is a process, and -n sets their number"
# nccl-tests' flags that have no meaning here, and the reasons.
_NOT_HERE = {
    "-t --nthreads": _OF_A_RANK,
    "-g --ngpus": _OF_A_RANK,
    "-p --parallel_init": "bench/run.py of a checkout times the start: `bench/run.py init`",
    "-z --blocking": "every call is waited for; -m has several in flight",
    "-a --average": "a call's time is that of its slowest rank",
    "-C --report_cputime": "`bench/run.py memory` of a checkout measures the CPU time of idle groups",
    "-R --local_register": "no tensor needs to be registered",
    "-D --device_implementation": "the backend chooses its kernels: `nvx explain --device cuda` shows nvx's choice",
    "-V --device_cta_count": "the backend chooses the blocks: `nvx explain --device cuda` shows nvx's choice",
}


class _NotHere(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"nccl-tests' {option_string} is not supported: {self.const}")


def _names(text: str) -> list[str]:
    return [name for name in text.replace(" ", "").split(",") if name]


def _dtypes(text: str) -> list[str]:
    return list(payload.DTYPES) if text == "all" else [payload.dtype_of(name)[0] for name in _names(text)]


def _ops(text: str) -> list[str]:
    names = list(payload.OPS) if text == "all" else _names(text)
    for name in names:
        if name not in payload.OPS:
            raise ValueError(f"no reduction '{name}': there are {', '.join(payload.OPS)}")
    return names


def _roots(text: str) -> list[int] | str:
    return text if text == "all" else [int(name) for name in _names(text)]


def common(parser: argparse.ArgumentParser, versus: str = "") -> None:
    """The options of every benchmark with ranks."""
    parser.add_argument("-n", "--ranks", type=above(1, most=1 << 20), help="ranks to start (default 2)")
    parser.add_argument(
        "--hosts", type=above(1), default=1,
        help="hosts to spread them over, made on this machine: network namespaces where that is allowed (default 1)",
    )  # fmt: skip
    parser.add_argument("--backend", default="nvx", help="the backend under test (default nvx)")
    parser.add_argument(
        "--vs", type=argument(_names), default=_names(versus), metavar="A,B",
        help=f"contenders measured beside it: {VERSUS_HELP} (default: {versus or 'none'})",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="tensors' device (default cpu)")
    limit = above(1, float, most=365 * 24 * 3600)
    parser.add_argument("-T", "--timeout", type=limit, default=300.0, help="limit of a call (default 300 s)")
    parser.add_argument("-J", "--json", "--output_file", metavar="FILE", help="write every figure to FILE")
    parser.add_argument(RENDEZVOUS, help=argparse.SUPPRESS)


def _check_common(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Exits with 2 if the ranks could not do as requested."""
    if why := world.why_no(parsed.device):
        parser.error(f"--device {parsed.device}: {why}")
    place = world.placed()
    if place and parsed.ranks not in (None, place[1]):
        parser.error(f"-n {parsed.ranks}, but RANK and WORLD_SIZE, or MPI's, give {place[1]}: unset them or omit -n")
    parsed.ranks = parsed.ranks or 2
    if place is None and parsed.hosts > parsed.ranks:
        parser.error(f"--hosts {parsed.hosts} with -n {parsed.ranks}: every host needs a rank")
    for name in parsed.vs:
        if name not in contenders.known():
            peers = contenders.peers_of(parsed.backend)
            parser.error(f"--vs: unknown contender '{name}'; beside {parsed.backend} there are {peers}")


VERSUS_HELP = (
    "gloo or another torch backend, null (does nothing: what torch's call costs), "
    "socket (what TCP moves), symm_mem (torch's symmetric memory, of CUDA tensors)"
)


def _sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=world.NAME, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Times collectives. Before a case is timed, it runs once (-c) and every element is compared.",
    )  # fmt: skip
    size = sizes.size_argument
    add = parser.add_argument
    add("collectives", nargs="*", metavar="collective", help=", ".join(collectives.COLLECTIVES))
    add("--all", action="store_true", help="every collective; of 8 bytes to 64M, unless sizes are given")
    common(parser)
    add("-b", "--minbytes", type=size, help="smallest size (default 32M)")
    add("-e", "--maxbytes", type=size, help="largest size (default 32M)")
    add("-f", "--stepfactor", type=above(0, float), help="factor between sizes")
    add("-i", "--stepbytes", type=size, help="step between sizes, where there is no factor")
    add("--sizes", type=sizes.sizes_argument, help="a list of sizes, instead of -b, -e, -f and -i")
    iterations = "the fewest iterations of each contender; 0 (default): as many as fill the blocks"
    add("--iters", type=above(0), default=0, help=iterations)
    calls = "calls not timed, before each block (default 2)"
    add("-w", "--warmup_iters", type=above(0), default=2, help=calls)
    add("-m", "--agg_iters", type=above(1), default=1, help="operations in flight together in one iteration")
    add("--blocks", type=above(1), default=7, help="blocks of each contender, taking turns (default 7)")
    add("--block-ms", type=above(0, float), default=20.0, help="length of a block (default 20)")
    add("-o", "--op", type=argument(_ops), default=["sum"], help=f"{'/'.join(payload.OPS)}/all")
    add("-d", "--datatype", type=argument(_dtypes), default=["float"], help=f"{'/'.join(payload.DTYPES)}/all")
    add("-r", "--root", type=argument(_roots), default=[0], help="root ranks, or all")
    add("-c", "--check", type=above(0), default=1, help="checked runs before timing (default 1)")
    add("-I", "--per_iter_timing", type=int, choices=(0, 1), default=0, help="1: add columns of single iterations")
    add("-u", "--unalign", type=above(0, most=1 << 20), default=0, help="index of the first element in its buffer")
    add("-G", "--cudagraph", action="store_true", help="time replays of a CUDA graph of -m operations (--device cuda)")
    add("--primary", action="store_true", help="time only one of out-of-place and in-place")
    for letters, why_not in _NOT_HERE.items():
        add(*letters.split(), action=_NotHere, nargs="?", const=why_not, help=argparse.SUPPRESS)
    return parser


def parse_sweep(arguments: list[str]) -> argparse.Namespace:
    """The options of a sweep. Exits with 2 if they make no sense."""
    parser = _sweep_parser()
    parsed = parser.parse_args(arguments)
    _check_common(parser, parsed)
    if parsed.cudagraph and parsed.device != "cuda":
        parser.error("-G needs --device cuda")
    if parsed.all:
        parsed.collectives = list(collectives.COLLECTIVES)
        if {None} == {parsed.minbytes, parsed.maxbytes, parsed.stepfactor, parsed.stepbytes}:
            parsed.sizes = parsed.sizes or ALL_SIZES
        elif parsed.minbytes is None:
            parsed.minbytes, parsed.stepfactor = 8, parsed.stepfactor or (2 if parsed.stepbytes is None else 0)
    defaults = {"minbytes": 32 << 20, "maxbytes": 32 << 20, "stepfactor": 0, "stepbytes": 1 << 20}
    vars(parsed).update({name: value for name, value in defaults.items() if getattr(parsed, name) is None})
    if not parsed.collectives:
        parser.error("name a collective, or --all")
    ranks = (world.placed() or (0, parsed.ranks))[1]
    parsed.root = list(range(ranks)) if parsed.root == "all" else parsed.root
    try:
        parsed.collectives = [collectives.find(name).name for name in parsed.collectives]
        sizes.scan(parsed.minbytes, parsed.maxbytes, parsed.stepfactor, parsed.stepbytes)
        if not all(0 <= root < ranks for root in parsed.root):
            raise ValueError(f"a root is outside 0..{ranks - 1}")
    except ValueError as error:
        parser.error(str(error))
    return parsed


def parse(module: Any, arguments: list[str]) -> argparse.Namespace:
    """The options of a benchmark with a module of its own; its name is the first argument."""
    parser = argparse.ArgumentParser(prog=f"{world.NAME} {arguments[0]}", description=(module.__doc__ or "").strip())
    common(parser, versus="gloo")
    module.add_arguments(parser)
    parsed = parser.parse_args(arguments[1:])
    _check_common(parser, parsed)
    return parsed


def in_ranks(parsed: argparse.Namespace, run: Callable, arguments: list[str]) -> int:
    """Inside a rank: runs the benchmark. Outside: starts the ranks, which call this again."""
    if parsed.json and (world.placed() or (0,))[0] == 0:
        try:
            Path(parsed.json).parent.mkdir(parents=True, exist_ok=True)
            machine.check_writable(parsed.json)
        except OSError as error:
            raise LaunchError(f"-J: {error}") from None
    if world.placed() is None:
        return world.launch(arguments, parsed.ranks, hosts=parsed.hosts)
    me = world.join(parsed.rendezvous, parsed.timeout, parsed.device)
    status = run(me, parsed, world.shown_command(arguments))
    me.leave()
    return status


SWEEP = "sweep"  # the benchmark that goes by the names of its collectives
COMMANDS: dict[str, Callable[[list[str]], int]] = {  # bench/run.py has more
    SWEEP: lambda given: in_ranks(parse_sweep(given), lambda *rank: sweep.Sweep(*rank).run(), given),
    "train": lambda given: in_ranks(parse(train, given), train.run, given),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one benchmark; 0 success, 1 a wrong result, 2 a usage error. Raises LaunchError."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    stand_in.serve_none()
    return COMMANDS[given[0] if given and given[0] in COMMANDS else SWEEP](given)
