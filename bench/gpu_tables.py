"""The tables of docs/gpu-results.md, from a file of scripts/gpu_evidence.py: `python bench/gpu_tables.py FILE`.

With `--plot` also FILE.png, which needs matplotlib: the time of an all-reduce by size, and what the model predicted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "gpu-results.md"
BEGIN, END = "<!-- made by bench/gpu_tables.py -->\n", "<!-- end of the tables -->\n"
Row = dict[str, Any]

# The model of `nvx explain` before any device was seen: 5 us for a launch, 1.5 us a step, and the bytes that
# a rank sends at 0.7 of NVLink's 450 GB/s. Steps of: one trip of packets, two trips, chunks.
STEPS = {"one_shot": 1, "two_shot": 2, "chunks": 3}


def predicted_us(algorithm: str, size: int, ranks: int) -> float:
    slices = 2 * size * (ranks - 1) / ranks
    sent = {"one_shot": 2 * size * (ranks - 1), "two_shot": 2 * slices, "chunks": slices}[algorithm]
    return 5 + 1.5 * STEPS[algorithm] + sent / (0.7 * 450e3)


def size_text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def rows_of(document: Row, part: str, key: str) -> list[Row]:
    return [row for row in document["parts"].get(part, {}).get("rows", []) if key in row]


def chosen(document: Row) -> dict[tuple[int, int], Row]:
    """By ranks and size, with the channel and algorithm that a group chooses: the first channel of its ranks."""
    first: dict[tuple[int, int], Row] = {}
    for row in rows_of(document, "product", "product"):
        if row["chosen"]:
            first.setdefault((row["ranks"], row["bytes"]), row)
    return first


def all_reduces(document: Row) -> str:
    first = chosen(document)
    ranks = sorted({n for n, _ in first})
    shapes = {n: next(row for (m, _), row in first.items() if m == n) for n in ranks}
    head = ["all_reduce of", *(f"{n} ranks, {shapes[n]['blocks']} blocks each" for n in ranks)]
    cells = []
    for size in sorted({size for _, size in first}):
        row = [size_text(size)]
        for n in ranks:
            one = first.get((n, size))
            row.append(f"{one['graph_us']:.1f} us, {one['algorithm'].replace('_', '-')}" if one else "-")
        cells.append(row)
    return table(head, cells)


def predictions(document: Row) -> str:
    seen, cells = set(), []
    for row in rows_of(document, "product", "product"):
        key = (row["algorithm"], row["bytes"])
        if row["ranks"] != 8 or "without" in row or not row["chosen"] or key in seen:
            continue
        seen.add(key)
        model, took = predicted_us(row["algorithm"], row["bytes"], 8), row["graph_us"]
        name = row["algorithm"].replace("_", "-")
        cells.append([size_text(row["bytes"]), name, f"{model:.1f} us", f"{took:.1f} us", f"{took / model - 1:+.0%}"])
    return table(["size, 8 ranks", "algorithm", "predicted", "measured", "error"], cells)


def costs(document: Row) -> str:
    cells = []
    rows = rows_of(document, "product", "product")
    for row in (row for row in rows if "without" in row and row["ranks"] in (2, 8)):
        same = ("ranks", "blocks", "bytes", "algorithm")
        whole = next(
            (one for one in rows if "without" not in one and all(one[name] == row[name] for name in same)), None
        )
        if whole:
            took, saved = row["graph_us"], whole["graph_us"] - row["graph_us"]
            what = f"{size_text(row['bytes'])} by {row['algorithm'].replace('_', '-')}, {row['ranks']} ranks"
            cells.append([what, row["without"], f"{whole['graph_us']:.2f} us", f"{took:.2f} us", f"{saved:+.2f} us"])
    return table(["operation", "without", "as it is", "without it", "cost"], cells)


def throughput(document: Row) -> str:
    cells = []
    for row in rows_of(document, "bench", "bench"):
        if row["algorithm"] == "chunks" and row["bytes"] == 64 << 20:
            rate = f"{row['processor_gb_s_each_way']:.1f} GB/s"
            channel = f"{row['ranks']} ranks x {row['blocks']} blocks"
            cells.append([channel, size_text(row["chunk_bytes"]), f"{row['graph_us']:.0f} us", rate])
    return table(["64 MiB by chunks", "chunk", "time", "a block sends, and receives"], cells)


def calls(document: Row) -> str:
    cells = [[row["host_call"], f"{row['us']:.2f} us"] for row in rows_of(document, "host_calls", "host_call")]
    cells += [[f"torch: {row['host']}", f"{row['us']:.1f} us"] for row in rows_of(document, "torch_calls", "host")]
    return table(["the host's time of", "a call"], cells)


REFUSED = ("nccl", "symm_mem_graphs", "symm_mem_8")  # comparisons, of which a run on one GPU has nvx's half
ALONE = "nvx alone: the other backend refuses ranks that share a GPU"


def parts(document: Row) -> str:
    cells = []
    for name, part in document["parts"].items():
        tests = [row for row in part["rows"] if "test" in row]
        counts = f"{len(tests)} tests" if tests else f"{sum('end' not in row for row in part['rows'])} rows"
        backends = {row["backend"] for row in part["rows"] if "backend" in row}
        why = part["why"] or (ALONE if name in REFUSED and backends == {"nvx"} else "")
        if why or part["state"] != "passed":
            cells.append([f"`{name}`", part["state"], counts, why[:110].replace("|", "/")])
    rest = len(document["parts"]) - len(cells)
    return f"{rest} parts passed without a remark. The others:\n\n" + table(["part", "state", "holds", "why"], cells)


def tables(document: Row) -> str:
    sections = (
        ("All-reduces in a graph", all_reduces),
        ("Predicted and measured", predictions),
        ("Costs of an operation", costs),
        ("Throughput of a block", throughput),
        ("The host's time", calls),
        ("The parts of the run", parts),
    )
    return "\n".join(f"### {title}\n\n{make(document)}" for title, make in sections)


def written(page: str, document: Row) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables(document) + END + rest.partition(END)[2]


def draw(document: Row, file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for ranks in (2, 4, 8):
        rows = [row for (n, _), row in sorted(chosen(document).items()) if n == ranks]
        axes.plot([row["bytes"] for row in rows], [row["graph_us"] for row in rows], "o-", label=f"{ranks} ranks")
    predicted = [predicted_us(row["algorithm"], row["bytes"], 8) for row in rows]
    axes.plot([row["bytes"] for row in rows], predicted, "k--", label="8 ranks, predicted for NVLink")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us", title="all_reduce in a graph, ranks on one H200")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110, metadata={"Software": None}, bbox_inches="tight")


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    PAGE.write_text(written(PAGE.read_text(), given))
    if "--plot" in sys.argv:
        draw(given, Path(sys.argv[1]).with_suffix(".png"))
