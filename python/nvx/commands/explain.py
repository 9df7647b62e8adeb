"""`nvx explain all_reduce 1M -n 2`: the algorithm that nvx would choose and why, the alternatives, estimated times.

Without a collective it prints the values that the choice follows: the keys of NVX_TUNE.

`--device cuda` is about CUDA tensors. The lines below a table name the source of its estimates, and the last lines
explain the columns.
"""

import argparse
import glob
import json

import nvx

from .. import delegate
from ..bench.collectives import ALIASES
from ..bench.machine import first_line
from ..bench.sizes import above, exact, size_argument
from . import refusing
from .topo import columns

SCHEMA = 2
LEGEND = """\
steps: how often a rank waits for others, one wait after another.
bytes: all that a rank reads, writes, sends and receives; inside a host several times the message.
setting: what changes the choice, a variable or another build; nothing if none does.
estimate: from the source that is named above, not from times of this machine; good for comparing rows only.
nvx chooses by a table of values, not by estimates, so the row that runs need not have the lowest one."""
MESSAGES = ("send", "recv", "isend", "irecv", "sendrecv")
OF_MESSAGES = (
    "send and recv have one algorithm: a small message is sent eagerly with its header, a large one by rendezvous when"
    " the receiver is ready; inside a host through shared staging, between hosts over UCX, or TCP with a job key"
)


def rdma_gb_s(folder="/sys/class/infiniband"):
    """GB/s per direction of the fastest active RDMA port; 0 if there is none."""
    rates = [0.0]
    for port in glob.glob(f"{folder}/*/ports/*"):
        rate = first_line(f"{port}/rate").split()  # 200 Gb/sec (4X HDR)
        if "ACTIVE" in first_line(f"{port}/state") and rate and rate[0].replace(".", "", 1).isdigit():
            rates.append(float(rate[0]) / 8)
    return max(rates)


def query(collective, nbytes, options):
    """One question and its answer, in the form that --json prints."""
    core, ranks, hosts = nvx._load(), options.ranks, options.hosts
    if collective == "barrier" or nbytes == 0 or ranks == 1:  # only one algorithm exists
        title, ways = nvx.explain(collective, nbytes, ranks, hosts), []
    elif options.device == "cuda":
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        title = f"{collective} of {nbytes} bytes a rank, {ranks} rank{'s' * (ranks > 1)} on {where}, CUDA tensors:"
        ways = core.ways_on_device(collective, nbytes, ranks, hosts, delegate.obstacle(), rdma_gb_s())
    else:
        title = nvx.explain(collective, nbytes, ranks, hosts)
        ways = core.ways(collective, nbytes, ranks, hosts, rdma_gb_s())
    by_kernels = any(way["by"].startswith("kernels") for way in ways)
    taken = core.taken_on_device(-(-ranks // hosts)) if by_kernels else {}
    asked = {"collective": collective, "bytes": nbytes, "ranks": ranks, "hosts": hosts, "device": options.device}
    return asked | {"summary": title, "ways": ways, "taken": taken}


def taken_text(taken):
    """The part of a GPU that a group's kernels take from other work on it."""
    memory = f"{taken['gpu_bytes'] / (1 << 20):.1f} MiB of the GPU and {taken['pinned_bytes'] / 1024:.0f} KiB of pinned"
    return (
        f"  kernels take {taken['blocks']} SMs while they run: a block of {taken['threads']} threads on each, with up"
        f" to {taken['registers']} registers a thread, which are all of an SM's; and as long as the group lives"
        f" {memory} host memory. A process's later groups get fewer SMs and less memory"
    )


def took(us):
    return "-" if us is None else f"{us:.0f} us" if us < 10000 else f"{us / 1000:.0f} ms"


def text(answer):
    if not answer["ways"]:
        return answer["summary"]
    rows = [["", "estimate", "steps", "bytes", "by", "algorithm", "reason", "setting"]]
    for way in answer["ways"]:
        counted = ["-" if way[key] is None else str(way[key]) for key in ("steps", "bytes")]
        told = [way[key] for key in ("by", "algorithm", "why", "set_by")]
        rows.append(["  runs" if way["runs"] else "", took(way["estimate_us"]), *counted, *told])
    bases = dict.fromkeys(way["basis"] for way in answer["ways"] if way["basis"])
    taken = [taken_text(answer["taken"])] if answer["taken"] else []
    return "\n".join([answer["summary"], *columns(rows), *taken, *(f"  estimates: {basis}" for basis in bases)])


def keys_table(rows):
    """Every key of NVX_TUNE: its value, and where that comes from."""
    cells = [["key", "value", "set by", "at least", "at most", "between", "meaning"]]
    for row in rows:
        bounds = [exact(row[name]) for name in ("least", "most")]
        cells.append([row["key"], exact(row["value"]), row["set_by"], *bounds, row["link"], row["meaning"]])
    return "\n".join(columns(cells))


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="nvx explain",
        description="Shows the algorithm that nvx would choose and why, its alternatives, and estimated times.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=LEGEND,
    )
    parser.add_argument("collective", nargs="?", help="all_reduce, broadcast, ...; none: the keys of NVX_TUNE")
    parser.add_argument("sizes", nargs="*", type=size_argument, metavar="size", help="bytes per rank: 4096, 4K, 64M")
    parser.add_argument("-n", "--ranks", type=above(0), default=2, help="ranks in all (default 2)")
    parser.add_argument("--hosts", type=above(0), default=1, help="hosts to spread them over evenly (default 1)")
    parser.add_argument("-d", "--device", choices=("cpu", "cuda"), default="cpu", help="tensors' device (default cpu)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    collective = ALIASES.get(options.collective, options.collective)
    summary = {"summary": OF_MESSAGES} if collective in MESSAGES else {}
    if collective == "barrier":
        options.sizes = [0]  # a barrier has no size
    with refusing(ValueError, RuntimeError):
        if collective is not None and not options.sizes and not summary:
            nvx.explain(collective, 0, 2)  # refuses a name that is none
            parser.error("give a size in bytes per rank, such as 4096, 4K or 64M")
        rows = nvx._load().tuning(options.ranks, options.hosts) if options.json or not summary else []
        answers = [] if summary else [query(collective, nbytes, options) for nbytes in options.sizes]
    if options.json:
        print(json.dumps({"schema": SCHEMA, **summary, "answers": answers, "keys": rows}, indent=2))
    elif collective is None or summary:
        print(OF_MESSAGES if summary else keys_table(rows))
    else:
        print("\n".join(text(answer) for answer in answers))
        if any(answer["ways"] for answer in answers):
            print(LEGEND)
        for row in rows:
            if row["set_by"] != "default":
                print(f"tuned: {row['key']} = {exact(row['value'])} ({row['set_by']})")
    return 0
