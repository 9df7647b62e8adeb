"""torch's own tests that ask for CUDA, by ranks that share the devices: tests/conformance does it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from . import build, clock, processes

PASSES = ("nccl", "gpu")  # collectives, then DDP


@dataclasses.dataclass
class Ended:
    state: str
    why: str = ""
    tried: int = 0
    failed: int = 0


def run(arguments: argparse.Namespace, devices: int, say: Callable[..., None], *more: str) -> Ended:
    """more: arguments of tests.conformance, beside those that follow from ours."""
    try:
        source = build.find_source(arguments.source or None)
    except build.BuildError as error:
        return Ended("skipped", str(error))
    with tempfile.TemporaryDirectory(prefix="nvx-torch-tests-") as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "tests.conformance", "--quiet", "--json", str(results)]
        command += [word for name in PASSES for word in ("--pass", name)]
        command += ["--ranks", str(arguments.ranks), "--device", arguments.device, "--devices", str(max(devices, 1))]
        command += ["--seconds", f"{max(1.0, clock.left(clock.end_of(arguments)) - 15):.0f}", "--timeout", "20"]
        command += ["--module", arguments.module] if arguments.module else []
        path = os.pathsep.join([str(source / "python"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        surroundings = os.environ | {"PYTHONPATH": path}
        ended = subprocess.run(
            [*command, *more],
            cwd=source,
            env=surroundings,
            stdout=sys.stderr,
            check=False,
            preexec_fn=processes.with_me(),
        )
        if not results.exists():
            return Ended("failed", f"tests.conformance ended with code {ended.returncode} and no results", 1, 1)
        return judge(json.loads(results.read_text())["tests"], ended.returncode, say)


def judge(tests: list[dict[str, str]], code: int, say: Callable[..., None]) -> Ended:
    count = Counter(test["outcome"] for test in tests)
    skipped = Counter(test["text"].strip().partition("\n")[0] for test in tests if test["outcome"] == "skipped")
    say(passed=[test["test"] for test in tests if test["outcome"] == "passed"], skipped=dict(skipped))
    for test in tests:
        if test["outcome"] == "failed":
            say(failed=f"{test['one']}:{test['test']}", why=test["text"][-1500:])
    tried = count["passed"] + count["failed"]
    late = skipped["time ran out"]
    why = f"{late} of {len(tests)} were left out for want of time" if late else ""
    if code != 0 or count["failed"] or not count["passed"]:
        why = why or f"{count['failed']} failed, {count['passed']} passed"
        return Ended("failed", why, tried, max(1, count["failed"]))
    return Ended("passed", why, tried)
