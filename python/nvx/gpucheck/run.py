"""One part as a process: its lines, its limit, and how it ended."""

from __future__ import annotations

import collections
import dataclasses
import re
import signal
import subprocess
import threading
import time
from typing import Any

from . import processes
from .lines import read

_MOST_LINES = 20_000
_TAIL = 60  # lines of other output that are kept
READ = 5.0  # seconds, at most, in which what a process has said is read once it has ended
_SUMMARY = re.compile(r"\b(ERROR|RACECHECK) SUMMARY\b")


@dataclasses.dataclass
class Outcome:
    state: str  # passed, failed, skipped, timed out, died, interrupted
    why: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    lines: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)  # the end of what was no JSON
    mps: bool = False  # its processes shared a GPU at once

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"seconds": round(self.seconds, 2), "limit": round(self.limit, 1)}


class _Reader(threading.Thread):
    """Takes lines as they come, so that nothing is lost when the process is killed."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.lines: list[dict[str, Any]] = []
        self.said: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self.start()

    def run(self) -> None:
        for raw in self.stream:
            text = raw.decode(errors="replace").rstrip("\n")
            found = read(text)
            if found is not None:
                if len(self.lines) < _MOST_LINES:
                    self.lines.append(found)
            elif text.strip():
                self.said.append(text[:400])


def run(command: list[str], seconds: float, environment: dict[str, str]) -> Outcome:
    """Runs a part to its end, or to its limit. KeyboardInterrupt ends it, and gives what there is as `interrupted`."""
    began = time.monotonic()
    try:
        process = processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    except OSError as error:
        return Outcome("failed", f"it could not be started: {error}", 0.0, seconds)
    reader = _Reader(process.stdout)
    state = why = ""
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        state, why = "timed out", f"it had not ended after {seconds:.0f} s"
    except KeyboardInterrupt as error:
        state, why = "interrupted", str(error) or "Ctrl-C"
    # What a part leaves behind would disturb the next one.
    processes.end(process)
    reader.join(timeout=READ)
    lines, said = list(reader.lines), list(reader.said)
    if not state:
        state, why = judge(process.returncode, lines, said)
    return Outcome(state, why, time.monotonic() - began, seconds, lines, said)


def signal_name(number: int) -> str:
    """With its name, if it has one: most of those for real time have none."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def judge(code: int, lines: list[dict[str, Any]], said: list[str]) -> tuple[str, str]:
    """How a part ended, and why."""
    end = next((line for line in reversed(lines) if "end" in line), None)
    last = said[-1] if said else ""
    if code < 0:
        return "died", f"of signal {signal_name(-code)}" + (f": {last}" if last else "")
    summary = next((text for text in reversed(said) if _SUMMARY.search(text)), "")
    if code == 9 and summary:  # compute-sanitizer's, as it was asked to
        return "failed", summary.strip("= ")
    if end is None:
        return "failed", f"it ended with code {code} and no verdict" + (f": {last}" if last else "")
    if end["end"] == "skipped" and code == 0:
        return "skipped", str(end.get("why", ""))
    if end["end"] == "passed" and code == 0:
        return "passed", str(end.get("why") or "")
    failures = [line for line in lines if "failed" in line and "end" not in line]
    why = str(end.get("why") or "")
    if failures:
        why = f"{failures[0].get('failed')}: {failures[0].get('why')}"
    return "failed", why or f"it ended with code {code}"
