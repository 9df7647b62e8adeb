"""bench/reliability.py: docs/reliability.md holds the figures of its file, and every row's command can run."""

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import reliability
from reliability import ROOT, ROWS, Row, missed

from tests.torch import kills

DOCUMENT = json.loads(reliability.FILE.read_text())


def test_the_page_has_the_figures_of_its_file():
    page = reliability.PAGE.read_text()
    assert page == reliability.written(page, DOCUMENT)
    assert f"bench/results/{reliability.FILE.name}" in page


def test_every_figure_is_of_a_command_of_a_row():
    commands = {(row.name, command) for row in ROWS for command in row.commands}
    assert {(entry["row"], entry["command"]) for entry in DOCUMENT["rows"]} <= commands
    assert [row.name for row in ROWS] == [f"R{number}" for number in range(1, 39)]
    assert all(bool(row.commands) != bool(row.why) for row in ROWS)


@functools.cache
def cpp_tests():
    """The tests as ctest names them, such as Config.NamesUnknownVariables."""
    texts = [file.read_text() for file in (ROOT / "tests").rglob("*_test.cc")]
    tests = [test for text in texts for test in re.findall(r"^TEST(?:_[FP])?\((\w+), (\w+)\)", text, re.MULTILINE)]
    return [".".join(test) for test in tests]


@pytest.mark.parametrize("row", [row for row in ROWS if row.commands], ids=lambda row: row.name)
def test_tests_named_in_commands_exist(row):
    for command in row.commands:
        words = shlex.split(command)
        files = [ROOT / word for word in words if word.startswith("tests/")]
        assert all(file.exists() for file in files), command
        if "-k" in words:
            text = files[0].read_text()
            for part in words[words.index("-k") + 1].split(" or "):
                names = [line for line in text.splitlines() if line.startswith("def test") and part in line.lower()]
                assert names or part == "dev", f"{command}: no test is named {part}"
        if "-R" in words:
            for part in words[words.index("-R") + 1].split("|"):
                assert any(re.search(part, name) for name in cpp_tests()), f"{command}: no test is named {part}"


def kills_report(*worlds):
    """What kills.py prints of worlds with these seconds, `named` and `joined`."""
    plan = kills.Plan(1)
    return kills.report([kills.Outcome(plan, 0, 0, seconds, named, joined, []) for seconds, named, joined in worlds])


FIGURES = {
    "passed": (reliability.of_junit, '<r><testcase/><testcase><skipped/></testcase><testcase><failure/><properties>'
               '<property name="max_s" value="2"/></properties></testcase></r>',
               {"passed": 1, "failed": 1, "skipped": 1, "max_s": 2}),
    "kills": (reliability.of_kills, kills_report(*[(0.1, True, True)] * 9, (0.2, False, True)),
              {"worlds": 10, "p50_s": 0.1, "p99_s": 0.2, "max_s": 0.2, "unnamed": 1, "unseen": 0, "max_unseen_s": 0}),
    "kills, unseen": (reliability.of_kills, kills_report(*[(2.0, False, False)] * 2, (2.1, True, False),
                      *[(0.1, True, True)] * 9),
                      {"worlds": 9, "p50_s": 0.1, "p99_s": 0.1, "max_s": 0.1, "unnamed": 2, "unseen": 3,
                       "max_unseen_s": 2.1}),
    "kills, nothing": (reliability.of_kills, "", dict.fromkeys(("worlds", "p50_s", "p99_s", "max_s", "unnamed"), 0)),
    "nemesis": (reliability.of_nemesis, "5 worlds from seed 1 on 1 host(s) in 1.8 s: 0 failed\n"
                "5 worlds from seed 6 on 1 host(s) in 1.8 s: 2 failed", {"worlds": 10, "failed": 2, "hours": 0.001}),
    "ctest": (reliability.of_junit, '<r><testcase><properties><property name="cmake_labels" value="group"/>'
              "</properties></testcase></r>", {"passed": 1, "failed": 0, "skipped": 0}),
    "coverage": (reliability.of_coverage, " 91.5% of   20 lines  a.cc\n 90.5% of 120 decoder lines, by 3 seeds\n",
                 {"percent": 90.5}),
    "besieged": (reliability.of_besieged, "101,304 connections, 0 errors in 4,000 calls\n"
                 "median call 98 us alone, 99 us with clients (+0.5%)\n",
                 {"connections": 101304, "calls": 4000, "failed": 0, "passed": 1, "percent slower": 0.5}),
    "sides": (reliability.of_sides, "8 B on 1 host(s): +1.20 % in 300 turns; median 3.10 us before, 3.14 us now\n"
              "1 MiB on 2 host(s): -0.10 % in 300 turns; best", {"8 B on 1 host(s)": 1.2, "1 MiB on 2 host(s)": -0.1}),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_an_output(name):
    read, text, figures = FIGURES[name]
    assert read(text) == figures


def test_the_figures_of_a_drill():
    text = (Path(reliability.__file__).parent / "results" / "drill.json").read_text()
    figures = reliability.of_drill(text)
    assert figures["cells"] > figures["errors"] > figures["in calls"] > 0
    assert figures["own rank"] <= figures["in calls"]


def test_aims_are_judged():
    row = Row("R", "", ("a <= 1", "b = c", "d >= 2"), ("one", "two"))
    good = {"a": 1, "b": 3, "c": 3}
    assert missed(row, good, {}) == []
    assert missed(row, {"a": 1.5, "b": 3, "c": 4, "d": 1}, {}) == ["a <= 1", "b = c", "d >= 2"]
    entries = {("R", one): {"figures": figures} for one, figures in (("one", good), ("two", {"d": 2}))}
    assert missed(row, good, entries) == []
    entries["R", "two"] = {"figures": {}}
    assert missed(row, good, entries) == ["d >= 2 (no figure)"]
