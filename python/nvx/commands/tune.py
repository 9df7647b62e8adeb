"""`nvx tune`: measures on this machine the keys of NVX_TUNE that one host can measure, and writes them to a file.

Every candidate runs `nvx bench` in fresh rank processes, in turns. A default stays unless another value is faster in
every round, and by more than 3 % in the median.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace

import nvx

from .. import interrupts
from .._version import __version__
from ..bench import machine, sizes
from . import Refused, refusing
from .topo import columns

GAIN = 0.03
ONE_SHOT = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")
SMALL = [8, *(1 << bits for bits in range(10, 17))]
PACKETS = [1 << bits for bits in range(12, 21)]
LARGE = [1 << 20, 16 << 20]


@dataclass(frozen=True)
class Step:
    """Cases that every candidate runs. `keys`: those that the times of some of the collectives decide. Their values are
    limits: the candidates are the algorithms up to the first key's limit, up to the second's and so on, and beyond. Or
    the candidates are the values of one key, and "" is the default."""

    keys: dict[tuple[str, ...], tuple[str, ...]]  # keys: collectives
    sizes: list[int]
    candidates: dict[str, str]  # name: NVX_TUNE


def numbers(key, sizes, values):
    return Step({(key,): ("all_reduce",)}, sizes, {"": "", **{value: f"{key}={value}" for value in values.split()}})


STEPS = {
    "cpu": [
        Step(
            {(f"{c}.one_shot",): (c,) for c in ONE_SHOT},
            SMALL,
            {k: ",".join(f"{c}.one_shot={n}" for c in ONE_SHOT) for k, n in (("one_shot", "64K"), ("pipelined", 0))},
        ),
        numbers("lease", LARGE, "1M 2M 8M"),
    ],
    "cuda": [
        Step(
            {("kernels.one_shot", "kernels.two_shot"): ("all_reduce",)},
            PACKETS,
            {
                "one_shot": "kernels.one_shot=1G",
                "two_shot": "kernels.one_shot=0",
                "chunks": "kernels.one_shot=0,kernels.two_shot=0",
            },
        ),
        Step(
            {("kernels.piece",): ("reduce_scatter", "all_gather", "broadcast")},
            PACKETS,
            {"packets": "kernels.piece=1G", "chunks": "kernels.piece=0"},
        ),
        numbers("kernels.blocks", [64 << 10, *LARGE], "8 16 32 48"),
        numbers("kernels.packets", [256 << 10, 512 << 10, 1 << 20], "1K 2K 4K 8K"),
        numbers("kernels.chunk", LARGE, "8K 16K 32K 64K"),  # and packets: the pad only gives their defaults
    ],
}


def planned(collective, size, options):
    """The bytes that nvx's choice follows: of pieces on GPUs, and of an all_gather, one rank's."""
    in_pieces = collective == "all_gather" or (collective == "reduce_scatter" and options.device == "cuda")
    return size // options.ranks if in_pieces else size


def run(step, tune, options):
    """{(collective, size): microseconds} of one `nvx bench`."""
    with tempfile.TemporaryDirectory(prefix="nvx-tune-") as folder:
        file = f"{folder}/results.json"
        wanted = options.sizes or step.sizes
        collectives = itertools.chain(*step.keys.values())
        command = [sys.executable, "-m", "nvx.bench", *collectives, "-n", str(options.ranks), "-J", file]
        command += ["--device", options.device, "--primary", "--blocks", "3", "--sizes", ",".join(map(str, wanted))]
        environment = dict(os.environ, NVX_TUNE=tune, NVX_ALGO="")
        how, bench = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}, None
        try:
            with interrupts.deferred():
                bench = subprocess.Popen(command, env=environment, **how)
            out, error = bench.communicate()
        finally:
            if bench:
                bench.terminate()  # not killed: it ends its ranks
                bench.communicate()
        if bench.returncode:
            raise Refused((error + out).strip() or f"nvx bench ended with {bench.returncode}")
        with open(file) as results:
            rows = json.load(results)["results"]
    return {(row["collective"], row["size"]): row["time_us"] for row in rows}


def measure(step, options):
    """For each round {candidate: {(collective, size): microseconds}}. The candidates take turns, in changing order."""
    rounds = []
    for turn in range(options.rounds):
        order = list(step.candidates)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        rounds.append({name: run(step, step.candidates[name], options) for name in order})
    return rounds


def median(rounds, name, case):
    return statistics.median(one[name][case] for one in rounds)


def choices_of(keys, cases, step, defaults, most, options):
    """[(values of the keys, {case: candidate})] of the numbers, or limits that nvx accepts; defaults first."""
    if "" in step.candidates:
        values = {name: sizes.parse_size(name) if name else defaults[keys[0]] for name in step.candidates}
        return [([value], dict.fromkeys(cases, name)) for name, value in values.items()]

    def row(limits):
        limits = [min(limit, most[key]) for key, limit in zip(keys, limits, strict=True)]
        bounds = list(zip(step.candidates, [*limits, math.inf], strict=True))
        return limits, {case: next(name for name, end in bounds if planned(*case, options) <= end) for case in cases}

    found = sorted({0, *(planned(*case, options) for case in cases)})
    rising = itertools.combinations_with_replacement(found, len(keys))
    return [row([defaults[key] for key in keys]), *map(row, rising)]


def best(rounds, choices):
    """The choice with the least times; of equal ones the first."""
    return min(choices, key=lambda choice: sum(math.log(median(rounds, choice[1][case], case)) for case in choice[1]))


def gains(rounds, choices):
    """For each round, how much longer the defaults take than the choice that the other rounds make: a choice that
    follows the noise of some rounds does not gain in another. The mean logarithm of the ratios where they differ."""
    for at, one in enumerate(rounds):
        (_, own), (_, other) = choices[0], best(rounds[:at] + rounds[at + 1 :] or rounds, choices)
        ratios = [math.log(one[own[case]][case] / one[other[case]][case]) for case in own if own[case] != other[case]]
        yield statistics.fmean(ratios) if ratios else 0.0


def decided(rounds, choices):
    """(values, why): not the defaults only if those are faster in every round, and by GAIN in the median."""
    own, found, gained = choices[0][0], best(rounds, choices)[0], sorted(gains(rounds, choices))
    if found == own:
        return own, "no other value is faster"
    low, middle, high = (100 * math.expm1(gain) for gain in (gained[0], statistics.median(gained), gained[-1]))
    other = " ".join(map(sizes.exact, found))
    text = f"{other} gains {middle:.1f} % in the median, {low:.1f} to {high:.1f} % over the rounds"
    if low > 0 and middle > 100 * GAIN:
        return found, text
    return own, f"{text}: {f'less than {100 * GAIN:g} %' if low > 0 else 'within the noise'}"


def chosen(step, rounds, defaults, most, options):
    """{key: (value, why)}"""
    found = {}
    for keys, collectives in step.keys.items():
        cases = [case for case in next(iter(rounds[0].values())) if case[0] in collectives]
        values, why = decided(rounds, choices_of(keys, cases, step, defaults, most, options))
        found |= {key: (value, why) for key, value in zip(keys, values, strict=True)}
    return found


def table(step, rounds):
    rows = [["collective", "size", *(name or "default" for name in step.candidates)]]
    for case in next(iter(rounds[0].values())):
        times = [f"{median(rounds, name, case):.1f} us" for name in step.candidates]
        rows.append([case[0], sizes.short_size(case[1]), *times])
    return columns(rows)


def file_text(values, options):
    core = nvx._load()
    host = f"{machine.cpu_model()}, {core.processor()['cores']} cores"
    if options.device == "cuda":
        host += "".join(f", {gpu['name']}" for gpu in core.gpu_topology(False)["gpus"])
    head = [
        f"# Written by `nvx tune -n {options.ranks} --device {options.device}`.",
        "# nvx reads it where NVX_TUNE=@FILE names it, the same on all ranks.",
        f"nvx = {__version__}",
        f"host = {host}",
        f"ranks = {options.ranks}",
    ]
    return "\n".join([*head, *(f"{key} = {value}" for key, value in values.items())]) + "\n"


def selected(steps, keys):
    """The steps that measure any of these keys, or all."""
    if not keys:
        return steps
    kept = [replace(step, keys={k: c for k, c in step.keys.items() if set(k) & set(keys)}) for step in steps]
    return [step for step in kept if step.keys]


def parse(arguments):
    """The options, and the steps to measure."""
    parser = argparse.ArgumentParser(prog="nvx tune", description="M" + (__doc__ or "").partition(": m")[2])
    known = [key for steps in STEPS.values() for step in steps for keys in step.keys for key in keys]
    parser.add_argument("keys", nargs="*", metavar="key", help=f"only these: {', '.join(known)}")
    parser.add_argument("-n", "--ranks", type=sizes.above(2), default=2, help="ranks, all on this host (default 2)")
    parser.add_argument("-d", "--device", choices=tuple(STEPS), default="cpu", help="tensors' device (default cpu)")
    parser.add_argument("-w", "--write", metavar="FILE", help="write the values there, for NVX_TUNE=@FILE")
    parser.add_argument("--rounds", type=sizes.above(1), default=5, help="runs of each candidate (default 5)")
    sizes_help = "sizes to measure instead of the default ones, such as 4K,64K"
    parser.add_argument("--sizes", type=sizes.sizes_argument, help=sizes_help)
    options = parser.parse_args(arguments)
    steps = selected(STEPS[options.device], options.keys)
    if strange := set(options.keys) - {key for step in steps for keys in step.keys for key in keys}:
        there = ", ".join(key for step in STEPS[options.device] for keys in step.keys for key in keys)
        parser.error(f"nothing measures {', '.join(sorted(strange))} with --device {options.device}: there are {there}")
    from ..bench import world  # loads torch

    if why := world.why_no(options.device):
        parser.error(f"--device {options.device}: {why}")
    return options, steps


def tune(options, steps):
    """Measures, prints and writes. Raises Refused."""
    with refusing(OSError, ValueError, RuntimeError):
        if options.write:
            machine.check_writable(options.write)
        rows = nvx._load().tuning(options.ranks)
    defaults, most = ({row["key"]: row[what] for row in rows} for what in ("value", "most"))
    values = {}
    for step in steps:
        rounds = measure(step, options)
        print(*table(step, rounds), sep="\n")
        for key, (value, why) in chosen(step, rounds, defaults, most, options).items():
            shown = sizes.exact(value).replace("any", "1024G")  # as NVX_TUNE takes it
            print(f"{key} = {shown} (default {sizes.exact(defaults[key])}): {why}", flush=True)
            values[key] = value
    if options.write:
        with open(options.write, "w") as file:
            file.write(file_text(values, options))


def main(arguments=None):
    options, steps = parse(arguments)
    os.environ["NVX_TUNE"] = ""  # the candidates are compared with the defaults, not with the user's values
    from ..bench import world

    for name in itertools.chain(*world.RANK_NAMES):  # the bench starts -n ranks, also in a shell or pod that is a rank
        os.environ.pop(name, None)
    with interrupts.interruptible():
        tune(options, steps)
    return 0
