"""docs/torch.md has the counts of bench/results/conformance.json."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_counts_of_the_file():
    runs = json.loads((ROOT / "bench" / "results" / "conformance.json").read_text())["runs"]
    (sentence,) = re.findall(
        r"\(`make conformance`\): (.*?); none fails", (ROOT / "docs" / "torch.md").read_text(), re.DOTALL
    )
    named = {
        torch: int(passed) for passed, torch in re.findall(r"(\d+)[a-z\s]* with\s(?:torch\s)?([\d.]+\d)", sentence)
    }
    assert named == {run["torch"].partition("+")[0]: run["counts"]["passed"] for run in runs}
    assert all("failed" not in run["counts"] and len(run["passed"]) == run["counts"]["passed"] for run in runs)
