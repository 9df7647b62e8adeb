"""bench/gpu_tables.py: docs/gpu-results.md holds the tables of the file that it names."""

import json
from pathlib import Path

import gpu_tables

FILE = Path(gpu_tables.__file__).parent / "results" / "gpu_h200.json"


def test_the_page_has_the_tables_of_its_file():
    page = gpu_tables.PAGE.read_text()
    assert page == gpu_tables.written(page, json.loads(FILE.read_text()))
    assert page.count("\n| ") > 40
