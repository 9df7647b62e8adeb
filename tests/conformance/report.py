"""Reports results: a line a test, a table at the end, JSON and JUnit XML on request."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.rank import FAILED, PASSED, SKIPPED

_MARK = {PASSED: "ok  ", SKIPPED: "skip", FAILED: "FAIL"}
_RANK = {SKIPPED: 0, PASSED: 1, FAILED: 2}


class Report:
    def __init__(self, backend: str, world_size: int, quiet: bool):
        self.backend, self.world_size, self.quiet = backend, world_size, quiet
        self.results: list = []
        self.at = self.total = 0

    def begin(self, one, total: int) -> None:
        self.at, self.total = 0, total
        believed = f"tests believe {one.believes!r}, " if one.believes else ""
        print(f"\npass {one.name}: {one.purpose} ({believed}{total} tests)", flush=True)

    def add(self, result) -> None:
        self.at += 1
        self.results.append(result)
        if result.outcome == SKIPPED and self.quiet:
            return
        why = f"  ({_first_line(result.text)})" if result.outcome == SKIPPED else ""
        head = f"[{self.at:3}/{self.total}] {_MARK[result.outcome]} {result.seconds:6.2f}s"
        print(f"{head}  {result.test}{why}", flush=True)
        if result.outcome == FAILED:
            print(_indent(_shorten(result.text)), flush=True)

    def ran(self) -> set:
        return {r.test for r in self.results if r.outcome != SKIPPED}

    def final(self) -> list:
        """One result a test: a failed pass if there is one, else a passed one, else the first reason for the skip."""
        best: dict = {}
        for result in self.results:
            held = best.setdefault(result.test, result)
            if _RANK[result.outcome] > _RANK[held.outcome]:
                best[result.test] = result
        return sorted(best.values(), key=lambda r: r.test)

    def failed(self) -> list:
        return [r for r in self.results if r.outcome == FAILED]

    def print_summary(self, seconds: float) -> None:
        final = self.final()
        reasons = defaultdict(list)
        for result in final:
            if result.outcome == SKIPPED:
                reasons[_first_line(result.text)].append(result.test)
        print(f"\nskipped, by reason ({sum(map(len, reasons.values()))}):")
        for why, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
            named = f": {', '.join(tests)}" if len(tests) <= 3 else ""
            print(f"  {len(tests):4}  {why}{named}")
        print("\npass        passed  failed  skipped  seconds")
        for name in dict.fromkeys(r.one for r in self.results):
            mine = [r for r in self.results if r.one == name]
            print(f"{name:10} {_columns(mine)}  {sum(r.seconds for r in mine):7.1f}")
        print(f"{'together':10} {_columns(final)}  {seconds:7.1f}")
        if groups := sum(result.groups for result in self.results):
            print(f"groups that nvx served by another name, on rank 0: {groups}")
        for result in self.failed():
            print(f"FAILED {result.one}:{result.test}")

    def write_json(self, path: str, seconds: float) -> None:
        import torch

        document = {
            "backend": self.backend,
            "world_size": self.world_size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": sys.argv,
            "seconds": round(seconds, 1),
            "counts": dict(Counter(r.outcome for r in self.final())),
            "tests": [asdict(r) for r in self.results],
        }
        Path(path).write_text(json.dumps(document, indent=1) + "\n")

    def lost(self, path: str) -> list:
        """The tests that are skipped, and passed with this torch in a file of runs."""
        import torch

        def version(text: str) -> str:
            return text.partition("+")[0]

        runs = json.loads(Path(path).read_text())["runs"]
        known = {test for run in runs if version(run["torch"]) == version(torch.__version__) for test in run["passed"]}
        return [r.test for r in self.final() if r.outcome == SKIPPED and r.test in known]

    def record(self, path: str, seconds: float) -> None:
        """Puts this run into a file of runs, in the place of an earlier one with the same torch."""
        import torch

        document = json.loads(Path(path).read_text())
        final = self.final()
        run = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": f"python -m tests.conformance --record {path}",
            "seconds": round(seconds, 1),
            "counts": dict(Counter(r.outcome for r in final)),
            "passed": [r.test for r in final if r.outcome == PASSED],
            "skipped": dict(Counter(_first_line(r.text) for r in self.results if r.outcome == SKIPPED).most_common()),
        }
        runs = [one for one in document["runs"] if one["torch"] != run["torch"]] + [run]
        document["runs"] = sorted(runs, key=lambda one: one["torch"])
        Path(path).write_text(json.dumps(document, indent=1) + "\n")

    def write_junit(self, path: str, seconds: float) -> None:
        count = Counter(r.outcome for r in self.results)
        suite = ElementTree.Element(
            "testsuite",
            name=f"DistributedTest over {self.backend}",
            tests=str(len(self.results)),
            failures=str(count[FAILED]),
            skipped=str(count[SKIPPED]),
            time=f"{seconds:.1f}",
        )
        for r in self.results:
            case = ElementTree.SubElement(suite, "testcase", classname=r.one, name=r.test, time=f"{r.seconds:.3f}")
            if r.outcome == SKIPPED:
                ElementTree.SubElement(case, "skipped", message=_first_line(r.text))
            elif r.outcome == FAILED:
                ElementTree.SubElement(case, "failure", message=_first_line(r.text)).text = r.text
        ElementTree.ElementTree(suite).write(path, encoding="unicode", xml_declaration=True)


def _columns(results) -> str:
    count = Counter(r.outcome for r in results)
    return f"{count[PASSED]:7} {count[FAILED]:7} {count[SKIPPED]:8}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _indent(text: str) -> str:
    return "\n".join("      " + line for line in text.splitlines())


def _shorten(text: str, lines: int = 80) -> str:
    all_lines = text.splitlines()
    if len(all_lines) <= lines:
        return text
    half = lines // 2
    return "\n".join([*all_lines[:half], f"... {len(all_lines) - lines} lines ...", *all_lines[-half:]])
