"""`nvx simulate all_reduce 64M --hosts 1024 --ranks-per-host 8 --inter 50GB/s`: a collective on hosts of given links.

The plan and the schedules are those that run. docs/performance.md states the model and its error.
"""

import argparse
import importlib.util
import json
import re

import nvx

from ..bench.collectives import ALIASES
from ..bench.sizes import above, exact, size_argument
from . import refusing
from .topo import columns

SCHEMA = 1
BYTES = {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
RATES = BYTES | {name.replace("B", bit): scale / 8 for name, scale in BYTES.items() for bit in ("b", "bit")}
TIMES = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
EXAMPLE = "example: nvx simulate all_reduce 64M --hosts 16 --ranks-per-host 8 --inter 400Gbit/s"
LEGEND = """\
time: of one call, without torch's own part.
between: bytes that the busiest host sends or receives, and the part of the time in which its network card does.
inside: bytes that a rank reads and writes inside its host and, on another thread, for reductions; and the part of the
time that both take together: over 100 % where both threads work at once.
bottleneck: the larger of the two, or latency if neither takes half of the time."""


def quantity(units, such):
    """Parses a number with one of these units. such: examples."""

    def parse(text):
        number, unit = re.fullmatch(r"([\d.]*)(.*)", text, re.DOTALL).groups()
        try:
            return float(number) * units[unit]
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number with a unit, such as {such}") from None

    return parse


def scaled(value, units):
    """The value in the unit, each 1000 times the one before, that leaves at least 1."""
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:.0f} {units[0]}"


def simulate(options, hosts, nbytes):
    links = (options.intra, options.inter, options.latency, options.cards)
    found = nvx._load().simulate(options.collective, nbytes, hosts, options.ranks_per_host, *links)
    busy = {"between hosts": found["between_seconds"], "inside hosts": found["inside_seconds"]}
    busy["latency"] = found["seconds"] - max(busy.values())
    ranks = hosts * options.ranks_per_host
    return {"hosts": hosts, "ranks": ranks, "bytes": nbytes, **found, "bottleneck": max(busy, key=busy.get)}


def table(rows):
    cells = [["hosts", "ranks", "size", "time", "schedule", "slices", "between", "", "inside", "", "bottleneck"]]
    for row in rows:
        cells.append([str(row["hosts"]), str(row["ranks"]), exact(row["bytes"])])
        cells[-1] += [scaled(row["seconds"] * 1e6, ("us", "ms", "s")), row["schedule"], str(row["slices"])]
        for where in ("between", "inside"):
            cells[-1].append(scaled(row[f"{where}_bytes"], ("B", "KB", "MB", "GB", "TB")))
            cells[-1].append(f"{row[f'{where}_seconds'] / (row['seconds'] or 1):.0%}")
        cells[-1].append(row["bottleneck"])
    return "\n".join(columns(cells))


def plot(path, rows, options):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.6))
    over = "hosts" if options.over == "hosts" else "bytes"
    axes.loglog([row[over] for row in rows], [row["seconds"] * 1e3 for row in rows], marker="o", markersize=3)
    title = f"{options.collective}, {options.ranks_per_host} a host, simulated"
    axes.set(title=title, xlabel=over, ylabel="time (ms)")
    axes.grid(True, alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)


def requested(options):
    """(hosts, bytes) of every row."""
    if options.over == "hosts":
        powers = [1 << k for k in range(1, 32) if 1 << k < options.hosts]
        return [(hosts, options.size) for hosts in [*powers, options.hosts]]
    powers = [4**k for k in range(5, 32) if 4**k < options.size and options.over == "sizes"]
    return [(options.hosts, nbytes) for nbytes in [*powers, options.size]]


def arguments_of(arguments):
    parser = argparse.ArgumentParser(
        prog="nvx simulate",
        description="Simulates a collective of CPU tensors between hosts. RATE: bytes (50GB/s) or bits (400Gbit/s).",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{EXAMPLE}\n\n{LEGEND}",
    )
    rate, time = quantity(RATES, "50GB/s (bytes) or 400Gbit/s (bits)"), quantity(TIMES, "3us")
    show = parser.add_argument
    show("collective", help="all_reduce, all_gather, broadcast, ...")
    show("size", nargs="?", type=size_argument, default=0, help="bytes per rank: 4096, 4K, 64M")
    show("--hosts", type=above(2), required=True, metavar="N", help="number of hosts, each with as many ranks")
    show("--ranks-per-host", type=above(1), default=1, metavar="N", help="ranks of each host; default 1")
    show("--intra", type=rate, default=50e9, metavar="RATE", help="rate of a rank's memory accesses; default 50GB/s")
    show("--inter", type=rate, required=True, metavar="RATE", help="rate of a network card, in each direction: 50GB/s")
    show("--cards", type=above(1), default=1, metavar="N", help="network cards that a host's ranks share; default 1")
    show("--latency", type=time, default=3e-6, metavar="TIME", help="latency of a message between hosts; default 3us")
    show("--over", choices=("hosts", "sizes"), help="a row for each power of 2 up to --hosts, or of 4 up to the size")
    show("--plot", metavar="FILE.svg", help="draws the rows of --over (needs matplotlib)")
    show("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    options.collective = ALIASES.get(options.collective, options.collective)
    if options.collective == "barrier":
        options.size = 0
    elif options.size == 0:
        parser.error("give a size in bytes per rank, such as 4096, 4K or 64M")
    if options.plot and not options.over:
        parser.error("--plot draws the rows of --over")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main(arguments=None):
    options = arguments_of(arguments)
    with refusing(ValueError, RuntimeError, OSError):
        rows = [simulate(options, *one) for one in requested(options)]
        if options.plot:
            plot(options.plot, rows, options)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "collective": options.collective, "rows": rows}, indent=2))
        return 0
    if not options.over:
        print(nvx.explain(options.collective, options.size, rows[0]["ranks"], options.hosts))
    print(f"{table(rows)}\n{LEGEND}")
    return 0
