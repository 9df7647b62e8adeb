"""`nvx explain all_reduce 1M -n 2`: what would run, and why. With --device cuda: of CUDA tensors, and what else."""

import argparse
import sys

import nvx

from .. import delegate
from ..bench.collectives import ALIASES
from .topo import columns

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MESSAGES = ("send", "recv", "isend", "irecv", "sendrecv")
OF_MESSAGES = (
    "send and recv: nothing is chosen, as it is for collectives; a small message travels with its announcement, a large"
    " one when the receiver is ready for it: inside a host through shared staging, between hosts over UCX"
)
UNTIMED = "  how long each takes is not known: none has been measured on a GPU (nvx gpucheck measures the kernels)"


def size(text):
    """Bytes from 4096, 4K, 64M or 1G."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in UNITS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 4096, 4K, 64M or 1G")
    return int(number) * UNITS[unit]


def on_device(collective, nbytes, ranks):
    """Of CUDA tensors: all ways that there are, and which of them would be gone."""
    ways = nvx._load().explain_on_device(collective, nbytes, ranks, delegate.obstacle())
    lines = [f"{collective} of {nbytes} bytes a rank, {ranks} rank{'s' * (ranks > 1)} on one host, CUDA tensors:"]
    rows = [["", "by", "algorithm", "why, or why not", "changed by"]]
    for by, what, why, set_by, runs in ways:
        rows.append(["  runs" if runs else "", by, what, why, set_by])
    return "\n".join([*lines, *columns(rows), UNTIMED])


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="nvx explain", description="Says what nvx would run, and why.")
    parser.add_argument("collective", help="all_reduce, all_gather, broadcast, ...")
    parser.add_argument("sizes", nargs="+", type=size, metavar="size", help="bytes a rank puts in: 4096, 4K, 64M")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks in all (default 2)")
    parser.add_argument("--hosts", type=int, default=1, help="hosts like this one, over which they are spread evenly")
    parser.add_argument("-d", "--device", choices=("cpu", "cuda"), default="cpu", help="of whose tensors (default cpu)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and options.hosts != 1:
        parser.error("--device cuda tells of ranks on one host: leave out --hosts")
    obstacle = nvx.obstacle()
    if obstacle is not None:
        print(f"nvx explain: {obstacle}", file=sys.stderr)
        return 2
    collective = ALIASES.get(options.collective, options.collective)
    if collective in MESSAGES:
        print(OF_MESSAGES)
        return 0
    try:
        for nbytes in options.sizes:
            if options.device == "cuda":
                print(on_device(collective, nbytes, options.ranks))
            else:
                print(nvx.explain(collective, nbytes, options.ranks, options.hosts))
    except (ValueError, RuntimeError) as error:
        print(f"nvx explain: {str(error).removeprefix('nvx: ')}", file=sys.stderr)
        return 2
    return 0
