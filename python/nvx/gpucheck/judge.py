"""The figures of a run held against what nvx aims at on one GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

from .lines import count, figure, lines_of, number, text

RANKS = 8
SMALL = (8, 16 << 10)  # bytes, from and to
LARGE = 16 << 20
HBM_SHARE = 0.8
ARENA_BYTES = 64 << 20
INIT_MS = 200.0
CALL_US = 4.0
REPLAYING = 2  # ranks


@dataclasses.dataclass
class Verdict:
    target: str
    state: str  # met, missed, not measured
    measured: str = ""
    how: str = ""

    def as_json(self) -> dict[str, str]:
        return dataclasses.asdict(self)


def best(rows: list[dict[str, Any]], named: str) -> dict[str, Any] | None:
    """The fastest of several channels."""
    rows = [row for row in rows if figure(row.get(named))]
    return min(rows, key=lambda row: row[named], default=None)


def bench_rows(document: dict[str, Any], algorithm: str, ranks: int) -> dict[int, list[dict[str, Any]]]:
    """By size, what was measured of an algorithm on all channels."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in lines_of(document, "bench", bytes=count):
        if line.get("bench") == "all_reduce" and line.get("algorithm") == algorithm and line.get("ranks") == ranks:
            found.setdefault(line["bytes"], []).append(line)
    return found


def rounds(document: dict[str, Any], ranks: int, named: str) -> float | None:
    """A figure of the control kernel, on the channel where it is best."""
    found = [line for line in lines_of(document, "bench") if line.get("control") == "flag_round"]
    row = best([line for line in found if line.get("ranks") == ranks], named)
    return row[named] if row else None


def moved_bytes(size: int, ranks: int) -> tuple[float, float]:
    """Of an all-reduce by chunks between ranks of one device: what its kernels load and store, each byte once; and the
    floor for any algorithm, every input read and every output written."""
    others = (ranks - 1) / ranks
    loads = others + 1 + others  # the slices sent out, all of my slice, the sums of the others
    stores = others + 1 / ranks + others + others  # chunks, my sums, my sums to the others, theirs
    return size * ranks * (loads + stores), 2.0 * size * ranks


def largest_copy(document: dict[str, Any], way: str) -> dict[str, Any] | None:
    found = [line for line in lines_of(document, "copies", bytes=count, gb_s=figure) if line.get("copy") == way]
    return max(found, key=lambda line: line["bytes"], default=None)


def hbm_gb_s(document: dict[str, Any]) -> float | None:
    """What the device's memory gives: a large copy reads and writes every byte."""
    largest = largest_copy(document, "device_to_device")
    return 2 * largest["gb_s"] if largest and largest["bytes"] >= LARGE else None


def _one_shot(document: dict[str, Any]) -> Verdict:
    target = f"LL one-shot of {RANKS} ranks, 8 B to 16 KiB, fused: two flag rounds or less"
    bound = rounds(document, RANKS, "launch_2_us")
    sizes = {n: rows for n, rows in bench_rows(document, "one_shot", RANKS).items() if SMALL[0] <= n <= SMALL[1]}
    times = {n: row["launch_us"] for n, rows in sizes.items() if (row := best(rows, "launch_us"))}
    if bound is None or not {SMALL[0], SMALL[1]} <= set(times):
        return Verdict(target, "not measured")
    worst = max(times, key=lambda n: times[n])
    return Verdict(
        target,
        "met" if times[worst] <= bound else "missed",
        f"{times[worst]:.2f} us at {worst} B, two rounds {bound:.2f} us",
        "launches in a row of one operation, and of the control kernel with two rounds; each on its best channel",
    )


def _two_shot(document: dict[str, Any]) -> Verdict:
    target = f"two-shot of {RANKS} ranks from 16 MiB, fused: {HBM_SHARE} of the memory's limit for the bytes it moves"
    limit = hbm_gb_s(document)
    rows = {n: best(found, "launch_us") for n, found in bench_rows(document, "chunks", RANKS).items() if n >= LARGE}
    shares = {n: moved_bytes(n, RANKS)[0] / row["launch_us"] / 1e3 / limit for n, row in rows.items() if row and limit}
    if not shares or limit is None:
        return Verdict(target, "not measured")
    worst = min(shares, key=lambda n: shares[n])
    floor = shares[worst] * moved_bytes(worst, RANKS)[1] / moved_bytes(worst, RANKS)[0]
    return Verdict(
        target,
        "met" if shares[worst] >= HBM_SHARE else "missed",
        f"{shares[worst]:.2f} at {worst >> 20} MiB",
        f"of {limit:.0f} GB/s, which a large copy reads and writes; staging counts as moved, though it may stay in the "
        f"cache; with inputs and outputs alone it is {floor:.2f}",
    )


def _arena(document: dict[str, Any]) -> Verdict:
    target = "memory of the device that a process shares: 64 MiB or less"
    starts = [
        line
        for part in ("processes", "bench_processes")
        for line in lines_of(document, part, start=text, arena_bytes=count)
    ]
    most = max((line["arena_bytes"] for line in starts), default=None)
    if most is None:
        return Verdict(target, "not measured")
    return Verdict(target, "met" if most <= ARENA_BYTES else "missed", f"{most / 2**20:.0f} MiB")


def _init(document: dict[str, Any]) -> Verdict:
    target = f"set-up beyond CUDA's own: under {INIT_MS:.0f} ms"
    found = lines_of(document, "processes", start=text, init_ms=number, ranks=count)
    slowest = max(found, key=lambda line: line["init_ms"], default=None)
    if slowest is None:
        return Verdict(target, "not measured")
    return Verdict(
        target,
        "met" if slowest["init_ms"] < INIT_MS else "missed",
        f"{slowest['init_ms']:.0f} ms with {slowest['ranks']} ranks",
        "the slowest rank of `processes`, after its context and the kernels were loaded",
    )


def _calls(document: dict[str, Any]) -> Verdict:
    target = "a collective of torch's waits for nothing, and takes no memory from the device"
    part = document["parts"].get("profile", {})
    kinds = lines_of(document, "profile", profile=text)
    if not kinds or part["state"] not in ("passed", "failed"):
        return Verdict(target, "not measured")
    measured = f"{len(kinds)} kinds of calls" if part["state"] == "passed" else part["why"]
    how = "CUDA's calls within calls in a row, as torch's profiler sees them"
    return Verdict(target, "met" if part["state"] == "passed" else "missed", measured, how)


def by_size(document: dict[str, Any], part: str, named: str, **same: Any) -> dict[int, float]:
    """The least of a figure in the lines of a part that say the same, by size."""
    found: dict[int, float] = {}
    for line in lines_of(document, part, bytes=count, **{named: figure}):
        if all(line.get(key) == value for key, value in same.items()):
            found[line["bytes"]] = min(line[named], found.get(line["bytes"], line[named]))
    return found


def _under_mps(document: dict[str, Any]) -> Verdict:
    target = f"one-shot of {RANKS} processes under MPS, to {SMALL[1] >> 10} KiB: faster than torch's symmetric memory"
    both = ("bench_processes", "symm_mem")
    ours, theirs = (by_size(document, part, "launch_us", ranks=RANKS, algorithm="one_shot") for part in both)
    sizes = [n for n in ours if n in theirs and n <= SMALL[1]]
    mps = all(document["parts"].get(part, {}).get("mps") for part in both)
    if not mps or SMALL[1] not in sizes:
        return Verdict(target, "not measured")
    worst = max(sizes, key=lambda n: ours[n] / theirs[n])
    return Verdict(
        target,
        "met" if ours[worst] < theirs[worst] else "missed",
        f"{ours[worst]:.2f} us at {worst} B, torch's {theirs[worst]:.2f} us",
        f"launches in a row, the slowest rank's time, at {len(sizes)} sizes that both have; that which suits nvx least",
    )


def _host_time(document: dict[str, Any]) -> Verdict:
    target = f"the host's time of a call over that of an empty launch: under {CALL_US:g} us"
    passed = document["parts"].get("host_time", {}).get("state") == "passed"  # or it may have gone by host memory
    lines = lines_of(document, "host_time", host=text, over_launch_us=number)
    calls = {line["host"]: line["over_launch_us"] for line in lines}
    if not passed or not calls:
        return Verdict(target, "not measured")
    worst = max(calls, key=lambda name: calls[name])
    return Verdict(
        target,
        "met" if calls[worst] < CALL_US else "missed",
        f"{calls[worst]:.2f} us: {worst}",
        f"{len(calls)} kinds of calls, each many times in a row; the slowest rank and the slowest kind",
    )


def _replayed(document: dict[str, Any]) -> Verdict:
    target = f"an all_reduce of {REPLAYING} ranks in a replayed graph: no slower than torch's symmetric memory"
    same = {"ranks": REPLAYING, "replayed": "all_reduce"}
    ours, theirs = (by_size(document, part, "us", **same) for part in ("replay_time", "symm_mem"))
    sizes = [n for n in ours if n in theirs]
    if not sizes or document["parts"]["replay_time"]["state"] != "passed":
        return Verdict(target, "not measured")
    worst = max(sizes, key=lambda n: ours[n] / theirs[n])
    return Verdict(
        target,
        "met" if ours[worst] <= theirs[worst] else "missed",
        f"{ours[worst]:.2f} us at {worst} B, torch's {theirs[worst]:.2f} us",
        f"of one of several in a graph, the slowest rank's time, at {len(sizes)} sizes; that which suits nvx least",
    )


def copies_ms(document: dict[str, Any], size: int) -> float:
    """Of so many bytes to the host and back, at the speed of the largest copies; 0 where none was measured."""
    ms = 0.0
    for way in ("device_to_host", "host_to_device"):
        largest = largest_copy(document, way)
        if largest is None:
            return 0.0
        ms += size / largest["gb_s"] / 1e6
    return ms


def _step(document: dict[str, Any]) -> Verdict:
    target = "a step of DDP with 2 ranks on a GPU: faster than over gloo by the copies that it saves"
    lines = lines_of(document, "training", nvx_ms=figure, gloo_ms=figure, gradient_bytes=count)
    step = next((line for line in lines if line.get("step") == "DDP" and line.get("ranks") == 2), None)
    one_each = len(document.get("gpus", ())) > 1  # with several GPUs each rank has its own
    if step is None or one_each or document["parts"]["training"]["state"] != "passed":
        return Verdict(target, "not measured")
    saved = copies_ms(document, step["gradient_bytes"])
    faster = step["gloo_ms"] - step["nvx_ms"]
    known = f"the copies are {saved:.2f} ms" if saved else "the copies were not measured, so by anything"
    return Verdict(
        target,
        "met" if faster > 0 and faster >= saved else "missed",
        f"{step['nvx_ms']:.2f} ms, over gloo {step['gloo_ms']:.2f} ms; {known}",
        "steps by turns; copies: the gradients of one rank to the host and back, at the speed that `copies` found",
    )


def judge(document: dict[str, Any]) -> list[Verdict]:
    checks = (_one_shot, _under_mps, _two_shot, _arena, _init, _calls, _host_time, _replayed, _step)
    return [check(document) for check in checks]
