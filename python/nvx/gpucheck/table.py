"""A results file as tables, for the docs and for the terminal."""

from __future__ import annotations

from typing import Any

from .judge import bench_rows, best, moved_bytes, rounds
from .lines import count, figure, lines_of, number, row, table, text


def size(n: int) -> str:
    for unit, shift in (("MiB", 20), ("KiB", 10)):
        if n >= 1 << shift:
            return f"{n >> shift} {unit}"
    return f"{n} B"


def rows_as_markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows)]


def machine_line(document: dict[str, Any]) -> str:
    gpus = lines_of(document, "facts", gpu=count, name=text, processors=count)
    none = document.get("no_gpu", {}).get("why")
    names = ", ".join(f"{line['name']} ({line['processors']} processors)" for line in gpus)
    names = names or (f"no GPU ({none})" if none else "no GPU")
    versions = document.get("versions", {})
    return f"{names}; driver: {document.get('driver') or 'none'}; torch {versions.get('torch', 'none')}"


def part_rows(document: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, part in document["parts"].items():
        ends = lines_of(document, name, end=text, tried=count, failed=count)
        tried = f"{ends[-1]['tried'] - ends[-1]['failed']}/{ends[-1]['tried']}" if ends else "-"
        rows.append([name, part["state"], tried, f"{part['seconds']:.0f}", part["why"].replace("|", "/") or "-"])
    return rows


def cell(value: Any) -> str:
    return "-" if not number(value) else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bench_table(document: dict[str, Any], ranks: int) -> list[str]:
    """Fused all-reduces of so many ranks: each algorithm on its best channel, beside the control kernel."""
    found = {name: bench_rows(document, name, ranks) for name in ("one_shot", "two_shot", "chunks")}
    sizes = sorted({n for by_size in found.values() for n in by_size})
    if not sizes:
        return []
    rows = []
    for n in sizes:
        cells = [size(n)]
        for by_size in found.values():
            one = best(by_size.get(n, []), "launch_us")
            cells.append(f"{cell(one['launch_us'])} ({one.get('blocks', '-')})" if one else "-")
        chunks = best(found["chunks"].get(n, []), "launch_us")
        gb_s = moved_bytes(n, ranks)[0] / chunks["launch_us"] / 1e3 if chunks else None
        inside = best(found["one_shot"].get(n, []), "inside_us")
        rows.append([*cells, cell(inside["inside_us"] if inside else None), cell(gb_s)])
    head = ["size", "one-shot us (blocks)", "two-shot us", "chunks us", "one-shot, inside us", "chunks moved GB/s"]
    note = ", ".join(
        f"{what} {cell(rounds(document, ranks, named))} us"
        for what, named in (("a round", "round_us"), ("launch of 0", "launch_0_us"), ("of 2", "launch_2_us"))
    )
    title = f"{ranks} ranks in one launch. Flag rounds of the control kernel: {note}."
    return [title, "", *rows_as_markdown(head, rows)]


def contenders_table(document: dict[str, Any]) -> list[str]:
    """Ranks as processes: nvx's kernels, torch's and NCCL, by size."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    names: list[str] = []
    for part in ("bench_processes", "symm_mem", "nccl", "gloo"):
        for line in lines_of(document, part, ranks=count, bytes=count, algorithm=text, launch_us=figure):
            if "bench" in line:
                name = f"{part} {line['algorithm']}" if part != line["algorithm"] else part
                names += [name] if name not in names else []
                spot = found.setdefault((line["ranks"], line["bytes"]), {})
                spot[name] = min(line["launch_us"], spot.get(name, line["launch_us"]))
    if not found:
        return []
    head = ["ranks", "size", *(f"{name.replace('bench_processes', 'nvx')} us" for name in names)]
    return rows_as_markdown(
        head, [[str(r), size(n), *(cell(spot.get(name)) for name in names)] for (r, n), spot in sorted(found.items())]
    )


def step_table(document: dict[str, Any]) -> list[str]:
    """Steps of DDP by turns: with kernels, and through host memory."""
    rows = []
    for part, way in (("training", "kernels"), ("staging", "host memory")):
        for line in lines_of(document, part, ranks=count, gradient_bytes=count):
            if line.get("step") == "DDP":
                times = [cell(line.get(f"{name}_ms")) for name in ("nvx", "gloo", "alone")]
                rows.append([way, str(line["ranks"]), size(line["gradient_bytes"]), *times])
    head = ["nvx goes by", "ranks", "gradients", "nvx ms", "gloo ms", "without DDP ms"]
    return ["A step of DDP.", "", *rows_as_markdown(head, rows)] if rows else []


def call_table(document: dict[str, Any]) -> list[str]:
    """The host's time of a call, and what CUDA is asked for in one."""
    asked = {line["profile"]: line for line in lines_of(document, "profile", profile=text, calls=figure, seen=table)}
    rows = []
    for line in lines_of(document, "host_time", host=text, us=number):
        one = asked.get(line["host"], {})
        seen = [(call, n) for call, n in sorted(one.get("seen", {}).items()) if number(n)]
        calls = ", ".join(f"{n / one['calls']:g} {call}" for call, n in seen)
        rows.append([line["host"], cell(line["us"]), cell(line.get("over_launch_us")), calls or "-"])
    head = ["call", "host us", "over an empty launch us", "CUDA's calls in one"]
    return rows_as_markdown(head, rows) if rows else []


def graph_table(document: dict[str, Any]) -> list[str]:
    rows = []
    for line in lines_of(document, "replay", graphs=count, served=row, refused=table):
        refused = ", ".join(f"{name}: {why}" for name, why in line["refused"].items()).replace("|", "/")
        rows.append([size(line["graphs"]), ", ".join(map(str, line["served"])) or "-", refused or "-"])
    return rows_as_markdown(["captured and replayed", "as eager", "refused"], rows) if rows else []


def replay_table(document: dict[str, Any]) -> list[str]:
    """One of several all-reduces in a graph: nvx's, and torch's one-shot."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for part in ("replay_time", "symm_mem"):
        for line in lines_of(document, part, replayed=text, ranks=count, bytes=count, us=figure):
            found.setdefault((line["ranks"], line["bytes"]), {})[part] = line["us"]
    rows = [
        [str(ranks), size(n), *(cell(spot.get(part)) for part in ("replay_time", "symm_mem"))]
        for (ranks, n), spot in sorted(found.items())
    ]
    head = ["ranks", "all_reduce in a replayed graph", "nvx us", "torch's one-shot us"]
    return rows_as_markdown(head, rows) if rows else []


def pool_table(document: dict[str, Any]) -> list[str]:
    rows = []
    for line in lines_of(document, "pools", pool=text, piece_bytes=count, staging_bytes_saved=count):
        saved = [size(line[key]) for key in ("piece_bytes", "staging_bytes_saved")]
        rows.append([line["pool"], *saved, cell(line.get("ordinary_ms")), cell(line.get("pool_ms"))])
    head = ["tensors of the pool", "a piece", "not staged, by a rank and call", "ordinary ms", "pool ms"]
    return rows_as_markdown(head, rows) if rows else []


def markdown(document: dict[str, Any]) -> str:
    """All of a results file that a reader wants."""
    blocks = [
        [machine_line(document), f"`{document['command']}`, {document['when']}"],
        rows_as_markdown(["part", "state", "passed", "s", "why"], part_rows(document)),
        rows_as_markdown(
            ["target", "", "measured", "how"],
            [[t["target"], t["state"], t["measured"] or "-", t["how"] or "-"] for t in document["targets"]],
        ),
        *(bench_table(document, ranks) for ranks in (8, 4, 2)),
        contenders_table(document),
        step_table(document),
        call_table(document),
        graph_table(document),
        replay_table(document),
        pool_table(document),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)
