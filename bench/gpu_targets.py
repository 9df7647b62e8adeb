"""nvx's targets on GPUs, judged by the results of scripts/gpu_evidence.py: `python bench/gpu_targets.py FILE`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 8
SMALL = (8, 16 << 10)  # bytes: the least and the most
LARGE = 16 << 20
HBM_SHARE = 0.8
ARENA_BYTES = 64 << 20
INIT_MS = 200.0
CALL_US = 4.0
BUS_GB_S, BULK = 330.0, 256 << 20  # over NVLink, from so many bytes on
GRAPH_US = {8: 6.0, 16 << 10: 6.0, 256 << 10: 9.0, 1 << 20: 15.0}  # by size
Document = dict[str, Any]
Rows = list[dict[str, Any]]


class Verdict(NamedTuple):
    target: str
    state: str  # met, missed, not measured
    measured: str = ""
    how: str = ""


def number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def rows_of(document: Document, part: str, *numbers: str, **same: Any) -> Rows:
    """The rows of a part that have these numbers and these values. A row without one of them counts as not measured."""
    found = document["parts"].get(part, {}).get("rows", [])
    found = [row for row in found if all(number(row.get(name)) for name in numbers)]
    return [row for row in found if all(row.get(name) == value for name, value in same.items())]


def passed(document: Document, part: str) -> bool:
    return document["parts"].get(part, {}).get("state") == "passed"


def least(rows: Rows, by: str, named: str) -> dict[int, float]:
    """The minimum of a figure, by size: each size on its best channel."""
    found: dict[int, float] = {}
    for row in rows:
        found[row[by]] = min(row[named], found.get(row[by], math.inf))
    return found


def verdict(target: str, good: bool, measured: str, how: str = "") -> Verdict:
    return Verdict(target, "met" if good else "missed", measured, how)


def moved_bytes(size: int, ranks: int) -> tuple[float, float]:
    """Bytes of an all-reduce by chunks between ranks of one device: the loads and stores of its kernels, and the
    minimum for any algorithm, which reads every input and writes every output once."""
    others = (ranks - 1) / ranks
    loads = others + 1 + others  # the slices sent to peers, all of my slice, the sums of the others
    stores = others + 1 / ranks + others + others  # chunks, my sums, my sums for the others, their sums
    return size * ranks * (loads + stores), 2.0 * size * ranks


def largest_copy(document: Document, way: str) -> dict[str, Any] | None:
    return max(rows_of(document, "copies", "bytes", "gb_s", copy=way), key=lambda row: row["bytes"], default=None)


def in_graphs(document: Document, algorithm: str) -> dict[int, float]:
    same = {"algorithm": algorithm, "ranks": RANKS}
    rows = [row for part in ("product", "bench") for row in rows_of(document, part, "bytes", "graph_us", **same)]
    return least([row for row in rows if "without" not in row], "bytes", "graph_us")


def one_shot(document: Document) -> Verdict:
    target = f"LL one-shot of {RANKS} ranks, 8 B to 16 KiB, in a graph: two flag rounds or less"
    bounds = {
        figure: [row[figure] for row in rows_of(document, "bench", figure, control="flag_round", ranks=RANKS)]
        for figure in ("graph_2_us", "launch_2_us")  # older files have the host's launches only
    }
    rounds = bounds["graph_2_us"] or bounds["launch_2_us"]
    times = {size: us for size, us in in_graphs(document, "one_shot").items() if SMALL[0] <= size <= SMALL[1]}
    if not rounds or not set(SMALL) <= set(times):
        return Verdict(target, "not measured")
    bound, worst = min(rounds), max(times, key=lambda size: times[size])
    launched = "one of many in a graph" if bounds["graph_2_us"] else "launched by the host"
    how = f"one operation of many in a graph, and a kernel of two control rounds, {launched}; each on its best channel"
    text = f"{times[worst]:.2f} us at {worst} B, two rounds {bound:.2f} us"
    return verdict(target, times[worst] <= bound, text, how)


def two_shot(document: Document) -> Verdict:
    target = (
        f"two-shot of {RANKS} ranks from 16 MiB, in a graph: {HBM_SHARE} of the memory's limit for the bytes it moves"
    )
    copy = largest_copy(document, "device_to_device")
    times = {size: us for size, us in in_graphs(document, "chunks").items() if size >= LARGE}
    if not times or copy is None or copy["bytes"] < LARGE:
        return Verdict(target, "not measured")
    limit = 2 * copy["gb_s"]  # a large copy reads and writes every byte
    shares = {size: moved_bytes(size, RANKS)[0] / us / 1e3 / limit for size, us in times.items()}
    worst = min(shares, key=lambda size: shares[size])
    floor = shares[worst] * moved_bytes(worst, RANKS)[1] / moved_bytes(worst, RANKS)[0]
    how = f"of {limit:.0f} GB/s, which a large copy moves; with inputs and outputs alone it is {floor:.2f}"
    return verdict(target, shares[worst] >= HBM_SHARE, f"{shares[worst]:.2f} at {worst >> 20} MiB", how)


def starts(document: Document, named: str, *parts: str) -> Rows:
    return [row for part in parts for row in rows_of(document, part, named, start="processes")]


def arena(document: Document) -> Verdict:
    target = "memory of the device that a process shares: 64 MiB or less"
    found = starts(document, "arena_bytes", "two_processes", "processes", "bench_processes")
    if not found:
        return Verdict(target, "not measured")
    most = max(row["arena_bytes"] for row in found)
    return verdict(target, most <= ARENA_BYTES, f"{most / 2**20:.0f} MiB")


def init(document: Document) -> Verdict:
    target = f"set-up beyond CUDA's own: under {INIT_MS:.0f} ms"
    found = starts(document, "init_ms", "two_processes", "processes")
    if not found:
        return Verdict(target, "not measured")
    slowest = max(found, key=lambda row: row["init_ms"])
    text = f"{slowest['init_ms']:.0f} ms with {slowest.get('ranks')} ranks"
    return verdict(target, slowest["init_ms"] < INIT_MS, text, "after the context and the kernels were loaded")


def calls(document: Document) -> Verdict:
    target = "a collective of torch's waits for nothing, and takes no memory from the device"
    kinds = [row for row in rows_of(document, "torch_calls", "calls") if "profile" in row]
    if not kinds or document["parts"]["torch_calls"]["state"] not in ("passed", "failed"):
        return Verdict(target, "not measured")
    good = passed(document, "torch_calls")
    text = f"{len(kinds)} kinds of calls" if good else document["parts"]["torch_calls"]["why"]
    return verdict(target, good, text, "CUDA's calls within calls in a row, as torch's profiler sees them")


def host_time(document: Document) -> Verdict:
    target = f"the host's time of a call over that of an empty launch: under {CALL_US:g} us"
    found = rows_of(document, "torch_calls", "over_launch_us")
    if not passed(document, "torch_calls") or not found:
        return Verdict(target, "not measured")
    worst = max(found, key=lambda row: row["over_launch_us"])
    text = f"{worst['over_launch_us']:.2f} us: {worst.get('host')}"
    return verdict(target, worst["over_launch_us"] < CALL_US, text, "the slowest rank and the slowest kind of call")


def beside(target: str, ours: dict[int, float], theirs: dict[int, float], how: str, good: float = 1.0) -> Verdict:
    """Compares at each size that both have, and judges the one with the largest ratio. `good`: the largest ratio
    allowed."""
    sizes = [size for size in ours if size in theirs]
    if not sizes:
        return Verdict(target, "not measured")
    worst = max(sizes, key=lambda size: ours[size] / theirs[size])
    text = f"{ours[worst]:.2f} us at {worst} B, torch's {theirs[worst]:.2f} us"
    return verdict(target, ours[worst] <= good * theirs[worst], text, f"{how}, at {len(sizes)} sizes")


def swept(document: Document, part: str, backend: str) -> dict[int, float]:
    return least(rows_of(document, part, "size", "time_us", backend=backend), "size", "time_us")


def under_mps(document: Document) -> Verdict:
    target = f"one-shot of {RANKS} processes under MPS, to 16 KiB: faster than torch's symmetric memory"
    same = {"algorithm": "one_shot", "ranks": RANKS}
    ours = least(rows_of(document, "bench_processes", "bytes", "launch_us", **same), "bytes", "launch_us")
    theirs = {size: us for size, us in swept(document, "symm_mem_8", "symm_mem").items() if size <= SMALL[1]}
    mps = all(document["parts"].get(part, {}).get("mps") for part in ("bench_processes", "symm_mem_8"))
    if not mps or SMALL[1] not in ours.keys() & theirs.keys():
        return Verdict(target, "not measured")
    return beside(target, ours, theirs, "launches in a row, the slowest rank's time", math.nextafter(1.0, 0.0))


def replayed(document: Document) -> Verdict:
    target = "an all_reduce of 2 ranks in a replayed graph: no slower than torch's symmetric memory"
    ours, theirs = (swept(document, "symm_mem_graphs", name) for name in ("nvx", "symm_mem"))
    return beside(target, ours, theirs, "one of several in a graph, the slowest rank's time")


def one_each(document: Document, *numbers: str) -> Rows:
    """nvx's all_reduces in a graph, of one process a GPU."""
    return rows_of(document, "one_each", "size", "ranks", *numbers, backend="nvx", collective="all_reduce")


def bus_bandwidth(document: Document) -> Verdict:
    target = f"an all_reduce of one process a GPU, from {BULK >> 20} MiB, in a graph: {BUS_GB_S:g} GB/s on the bus"
    rows = [row for row in one_each(document, "busbw") if row["size"] >= BULK]
    if not rows:
        return Verdict(target, "not measured")
    best = max(rows, key=lambda row: row["busbw"])
    text = f"{best['busbw']:.0f} GB/s at {best['size'] >> 20} MiB with {best['ranks']} ranks"
    return verdict(target, best["busbw"] >= BUS_GB_S, text, "2(n-1)/n bytes for each byte of the tensor")


def latency(document: Document) -> Verdict:
    bounds = ", ".join(f"{us:g} us at {size} B" for size, us in GRAPH_US.items())
    target = f"an all_reduce of one process a GPU, in a graph: {bounds}"
    times = least(one_each(document, "time_us"), "size", "time_us")
    if not GRAPH_US.keys() <= times.keys():
        return Verdict(target, "not measured")
    text = ", ".join(f"{times[size]:.2f} us" for size in GRAPH_US)
    return verdict(target, all(times[size] <= us for size, us in GRAPH_US.items()), text, "the slowest rank's time")


def copies_ms(document: Document, size: int) -> float:
    """The time to copy so many bytes to the host and back, at the speed of the largest copies; 0 if none was
    measured."""
    ways = [largest_copy(document, way) for way in ("device_to_host", "host_to_device")]
    return sum(size / way["gb_s"] / 1e6 for way in ways if way) if all(ways) else 0.0


def step(document: Document) -> Verdict:
    target = "a step of DDP with 2 ranks on a GPU: faster than over gloo by the copies that it saves"
    rows = rows_of(document, "train", "time_us", "gradient_bytes", kind="ddp")
    ms = {name: row["time_us"] / 1e3 for name in ("nvx", "gloo") for row in rows if row.get("backend") == name}
    if len(ms) < 2 or not passed(document, "train"):
        return Verdict(target, "not measured")
    saved, faster = copies_ms(document, rows[0]["gradient_bytes"]), ms["gloo"] - ms["nvx"]
    known = f"the copies are {saved:.2f} ms" if saved else "the copies were not measured, so by anything"
    text = f"{ms['nvx']:.2f} ms, over gloo {ms['gloo']:.2f} ms; {known}"
    return verdict(target, faster > 0 and faster >= saved, text, "steps by turns; copies at the speed of `copies`")


CHECKS = (one_shot, under_mps, two_shot, arena, init, calls, host_time, replayed, step, bus_bandwidth, latency)


def judge(document: Document) -> list[Verdict]:
    return [check(document) for check in CHECKS]


def main(given: list[str]) -> int:
    if len(given) != 1:
        print("usage: python bench/gpu_targets.py FILE", file=sys.stderr)
        return 2
    document = json.loads(Path(given[0]).read_text())
    print(f"# {given[0]}: {document['commit'][:12]}, {document['when']}{', a dry run' * document['dry_run']}")
    for found in judge(document):
        print(f"{found.state:12}  {found.target}{f': {found.measured}' if found.measured else ''}")
        if found.how:
            print(f"{'':12}  ({found.how})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
