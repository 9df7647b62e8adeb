"""The table of docs/reliability.md, from a file of `nvx drill --vs gloo -J FILE`: `bench/drill_table.py FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nvx.commands.drill import FAULTS, PHASES, verdict

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- made by bench/drill_table.py -->\n", "<!-- end of the table -->\n"


def table(document: dict[str, Any]) -> str:
    rows = {(row["fault"], row["phase"], row["backend"]): row for row in document["rows"]}
    backends = list(dict.fromkeys(row["backend"] for row in document["rows"]))
    lines = [f"| fault of one rank | in | {' | '.join(backends)} |", "|---|---|" + "---|" * len(backends)]
    for fault, (_, text, _) in FAULTS.items():
        name = f"`{fault}`: {text}"
        for phase in PHASES:
            if found := [rows[fault, phase, one] for one in backends if (fault, phase, one) in rows]:
                lines.append(f"| {name} | {phase} | {' | '.join(map(verdict, found))} |")
                name = ""
    return "\n".join(lines) + "\n"


def summary(document: dict[str, Any]) -> str:
    machine, versions = document["machine"], document["versions"]
    lines = [f"`{document['command']}` on {machine['cores']} cores ({machine['cpu']}), torch {versions['torch']}."]
    for backend in dict.fromkeys(row["backend"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["backend"] == backend]
        short = [f"`{row['fault']}` in {row['phase']}" for row in rows if row["short"]]
        failed = f"; not {', '.join(short)}" if 0 < len(short) < 4 else ""
        lines.append(f"{backend}: {len(rows) - len(short)} of {len(rows)} cases passed{failed}.")
    return "\n".join(lines) + "\n"


def written(page: str, document: dict[str, Any]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + summary(document) + "\n" + table(document) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(Path(sys.argv[1]).read_text())))
