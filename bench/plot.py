"""`bench/run.py plot results.json`: time (and bus bandwidth) over size, one line a backend, PNG and SVG
side by side."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from nvx.bench.sizes import short_size
from results_file import read

COLORS = {"nvx": "#0b6e4f", "gloo": "#c8553d", "null": "#8a8a8a", "deepspeed": "#3d5a98", "mpi": "#b8860b"}
MORE_COLORS = ("#6a4c93", "#2a9d8f", "#d1495b")


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/run.py plot", description=__doc__)
    parser.add_argument("results", help="a file written by nvx bench -J or bench/targets.py")
    parser.add_argument(
        "-o", "--output", metavar="NAME", help="PNG and SVG are named after it (default: the file's name)"
    )
    parser.add_argument("--ranks", type=int, help="of a file with several numbers of ranks (default: the smallest)")
    parser.add_argument("--only", help="collectives, separated by commas")
    return parser.parse_args(given)


def sweeps(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of every sweep in the file, in the variant of torch's usual call."""
    if document["what"] == "targets":
        parts = [part for part in document["parts"].values() if part["what"] == "sweep"]
    elif document["what"] == "sweep":
        parts = [document]
    else:
        raise ValueError(f"a file of '{document['what']}' has no sizes to plot: give it one of a sweep or of targets")
    seen: dict[tuple, dict[str, Any]] = {}
    for part in parts:
        for result in part["results"]:
            key = tuple(result[name] for name in ("collective", "ranks", "size", "type", "redop", "root", "backend"))
            seen.setdefault(key, result)
    return list(seen.values())


def lines(results: list[dict[str, Any]], collective: str) -> dict[str, list[dict[str, Any]]]:
    """Each backend's points of one collective, by size, for the first dtype, operation and root that were run."""
    chosen = [result for result in results if result["collective"] == collective and result["size"] > 0]
    found: dict[str, list[dict[str, Any]]] = {}
    for result in chosen:
        if all(result[key] == chosen[0][key] for key in ("type", "redop", "root")):
            found.setdefault(result["backend"], []).append(result)
    return {name: sorted(points, key=lambda point: point["size"]) for name, points in found.items()}


def _curve(axes: Any, points: list[dict[str, Any]], key: str, color: str, name: str) -> None:
    x = [point["size"] for point in points]
    axes.plot(x, [point[key] for point in points], marker="o", markersize=3, linewidth=1.6, color=color, label=name)
    if key == "time_us":
        low, high = (
            [min(point["blocks_us"]) for point in points],
            [max(point["blocks_us"]) for point in points],
        )
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _axes(axes: Any, title: str, label: str, sizes: list[int], log: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(label, fontsize=9)
    axes.grid(True, which="major", alpha=0.25)
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // 7)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_size(int(value))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw(document: dict[str, Any], results: list[dict[str, Any]], names: list[str], ranks: int) -> Any:
    """Draws the figure: one collective as time and bandwidth, several as a grid of times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    backends = list(dict.fromkeys(result["backend"] for result in results))
    others = [name for name in backends if name not in COLORS]
    colors = COLORS | {name: MORE_COLORS[i % len(MORE_COLORS)] for i, name in enumerate(others)}
    panels = [(name, "time_us") for name in names]
    if len(names) == 1:
        panels.append((names[0], "busbw"))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.3 * rows), squeeze=False)
    flat = [axes for row in grid for axes in row]
    for axes, (collective, key) in zip(flat, panels, strict=False):
        label = {"time_us": "time (us)", "busbw": "bus bandwidth (GB/s)"}[key]
        drawn = lines(results, collective)
        seen = sorted({point["size"] for points in drawn.values() for point in points})
        _axes(axes, f"{collective}, {ranks} ranks", label, seen, log=key == "time_us")
        for name, points in drawn.items():
            if key == "time_us" or name != "null":
                _curve(axes, points, key, colors[name], name)
    for axes in flat[len(panels) :]:
        axes.set_visible(False)
    figure.text(0.01, 0.005, caption(document), fontsize=7, color="#555555")
    handles = [pyplot.Line2D([], [], color=colors[name], marker="o", markersize=3) for name in backends]
    figure.legend(handles, backends, loc="upper center", ncols=len(backends), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.1 / rows, 1, 1 - 0.09 / rows))
    return figure


def caption(document: dict[str, Any]) -> str:
    """The description of the machine under every plot."""
    about, versions = document["machine"], document["versions"]
    kind = ", virtual" if about["virtual"] else ""
    return (
        f"{about['cpu']}, {about['cores']} cores{kind}, {about['kernel']}, torch {versions['torch']}, "
        f"{document['when'][:10]}; line: median of blocks, shade: all blocks"
    )


def main(given: list[str]) -> int:
    """Writes the two files and prints their names. The first word is the command's name."""
    arguments = parse(given[1:])
    try:
        document = read(arguments.results)
        results = sweeps(document)
        ranks = arguments.ranks or min((result["ranks"] for result in results), default=0)
        results = [result for result in results if result["ranks"] == ranks]
        names = list(dict.fromkeys(result["collective"] for result in results if result["size"] > 0))
        if arguments.only:
            names = [name for name in names if name in arguments.only.split(",")]
        if not names:
            raise ValueError(f"{arguments.results} has nothing to plot for {ranks} ranks")
        figure = draw(document, results, names, ranks)
    except (OSError, ValueError) as error:
        print(f"bench/run.py plot: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("bench/run.py plot: needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    stem = re.sub(r"\.(json|png|svg)$", "", arguments.output or arguments.results)
    for suffix in (".png", ".svg"):
        figure.savefig(f"{stem}{suffix}", dpi=150)
        print(f"{stem}{suffix}")
    return 0
