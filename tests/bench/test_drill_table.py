"""bench/drill_table.py: docs/reliability.md holds the table of the file that it names."""

import json
from pathlib import Path

import drill_table
from nvx.commands import drill

FILE = Path(drill_table.__file__).parent / "results" / "drill.json"


def test_the_page_has_the_table_of_its_file():
    page, document = drill_table.PAGE.read_text(), json.loads(FILE.read_text())
    assert page == drill_table.written(page, document)
    assert f"bench/results/{FILE.name}" in page
    cells = {(row["fault"], row["phase"]) for row in document["rows"] if row["backend"] == "nvx"}
    assert cells == {(fault, phase) for fault, (_, _, phases) in drill.FAULTS.items() for phase in phases}
