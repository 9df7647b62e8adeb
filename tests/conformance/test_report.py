"""The report of a run names the tests that it has lost."""

import json

import pytest

from tests.conformance.rank import PASSED, SKIPPED
from tests.conformance.report import Report


def test_a_test_that_passed_with_this_torch_and_is_skipped_now_is_lost(tmp_path):
    torch = pytest.importorskip("torch")
    from tests.conformance.host import Result

    version = torch.__version__.partition("+")[0]
    runs = [{"torch": version + "+other", "passed": ["one", "two", "three"]}, {"torch": "1.0", "passed": ["four"]}]
    (tmp_path / "runs.json").write_text(json.dumps({"runs": runs}))
    report = Report("nvx", 4, quiet=True)
    report.results = [Result("one", "gloo", SKIPPED), Result("one", "own", PASSED)]
    report.results += [Result("two", "gloo", SKIPPED), Result("four", "gloo", SKIPPED)]
    assert report.lost(tmp_path / "runs.json") == ["two"]
