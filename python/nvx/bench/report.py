"""The printed table: nccl-tests' header and columns, then p50 and p99, then every peer's time and its ratio to ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOT_APPLICABLE = "N/A"
_FIXED = (("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 8), ("redop", "", 6), ("root", "", 6))
_TIMED = (("time", "(us)", 7), ("algbw", "(GB/s)", 6), ("busbw", "(GB/s)", 6), ("#wrong", "", 6))
_PERCENTILES = (("p50", "(us)", 7), ("p99", "(us)", 7))
_PER_CALL = (("i_min", "(us)", 7), ("i_max", "(us)", 7), ("i_p99", "(us)", 7), ("i_cv%", "(%)", 7))
_FIELDS = {  # of a result; others have the name of their column
    "time": "time_us", "#wrong": "wrong", "p50": "p50_us", "p99": "p99_us", "i_min": "min_us", "i_max": "max_us",
    "i_p99": "p99_us", "i_cv%": "cv_percent",
}  # fmt: skip


def number(value: float | None, width: int) -> str:
    """Formats with as many decimals as fit, as nccl-tests does."""
    if value is None:
        return NOT_APPLICABLE.rjust(width)
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


class Table:
    """Prints rows as they are measured. Variants that torch does not have, and #wrong where no result is checked, have
    no columns."""

    def __init__(self, main: str, peers: list[str], variants: Sequence[str], checked: bool, per_call: bool) -> None:
        self.main, self.peers, self.variants = main, peers, variants
        columns = (*_TIMED, *_PERCENTILES, *(_PER_CALL if per_call else ()))
        self.columns = [column for column in columns if checked or column[0] != "#wrong"]

    def _join(self, cells: list[tuple[str, int]]) -> str:
        return "  ".join(text.rjust(width) for text, width in cells)

    def header(self) -> str:
        group = sum(width + 2 for *_, width in self.columns) - 2
        lead = sum(width + 2 for *_, width in _FIXED)
        top = " " * lead + "  ".join(name.center(group) for name in self.variants)
        top += "".join(f"  | {peer:>9}  {'x ' + self.main:>8}" for peer in self.peers)
        lines = [top]
        for line in (0, 1):
            cells = [(column[line], column[2]) for column in (*_FIXED, *self.columns * len(self.variants))]
            text = self._join(cells)
            text += "".join(f"  | {('time', '(us)')[line]:>9}  {'':>8}" for _ in self.peers)
            lines.append(text)
        return "\n".join("#" + text[1:].rstrip() for text in lines)

    def row(self, shared: dict[str, Any], results: dict[tuple[str, str], dict[str, Any]]) -> str:
        """One line; ``results`` by (contender, variant). Peers are compared in the first variant measured."""
        fixed = (shared["size"], shared["count"], shared["type"], shared["redop"], shared["root"])
        text = self._join([(str(value), column[2]) for value, column in zip(fixed, _FIXED, strict=True)])
        for variant in self.variants:
            text += "  " + self._figures(results.get((self.main, variant)))
        first = next((variant for name, variant in results if name == self.main), self.variants[0])
        ours = results.get((self.main, first))
        for peer in self.peers:
            text += self._peer(ours, results.get((peer, first)))
        return text

    def _figures(self, result: dict[str, Any] | None) -> str:
        cells = []
        for name, _, width in self.columns:
            value = result[_FIELDS.get(name, name)] if result else None
            cells.append((f"{value:g}" if name == "#wrong" and value is not None else number(value, width), width))
        return self._join(cells)

    def _peer(self, ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
        if theirs is None:
            return f"  | {NOT_APPLICABLE:>9}  {'':>8}"
        wrong = "!" if theirs["wrong"] else " "
        times = f"{theirs['time_us'] / ours['time_us']:.3g}" if ours and ours["time_us"] else ""
        return f"  | {number(theirs['time_us'], 8)}{wrong}  {times:>8}"


def opening(command: str, document: dict[str, Any], effort: str, contenders: list[str]) -> str:
    """The context of the figures, printed before them."""
    machine, versions = document["machine"], document["versions"]
    cores = f"{machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
    where = [machine["cpu"], cores, *(["virtual"] if machine["virtual"] else []), machine["kernel"]]
    lines = (
        command,
        "machine: " + ", ".join(where),
        "versions: " + ", ".join(f"{key} {value}" for key, value in versions.items() if isinstance(value, str)),
        effort,
        "contenders: " + ", ".join(contenders),
    )
    return "\n".join(f"# {line}" for line in lines)


def state(round_trip: float | None) -> str:
    """The present latency between the cores, which limits small messages."""
    if round_trip is None:
        return "# flag round between ranks 0 and 1: not measured (they share no memory, or nvx's C++ part is not built)"
    return f"# flag round between ranks 0 and 1: {round_trip:.3f} us"


def closing(what: str, wrong: int, failed: bool, checked: bool, busbw: list[float]) -> str:
    """nccl-tests' last lines."""
    verdict = "FAILED" if wrong or failed else "OK" if checked else "not checked"
    mean = sum(busbw) / len(busbw) if busbw else 0.0
    return (
        f"# {'Out of bounds values':<20} : {wrong} {verdict}\n# {'Avg bus bandwidth':<20} : {mean:g}\n"
        f"#\n# Collective test concluded: {what}"
    )
