"""Commands of a build, until a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path


class BuildError(Exception):
    """In a sentence, what is missing or went wrong."""


class Steps:
    """Runs commands until a deadline and keeps what they say. What is late is ended with all that it has started."""

    def __init__(self, log: Path, seconds: float) -> None:
        self.log = log
        self.end = time.monotonic() + seconds
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[bytes]] = set()
        self.stopped = False
        log.write_bytes(b"")

    def over(self) -> bool:
        return time.monotonic() >= self.end

    def run(self, command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
        """Several threads may each run one."""
        with self.lock:
            if self.stopped or self.over():
                raise BuildError("building took too long" if self.over() else "the build was stopped")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            self.running.add(process)
        late = False
        try:
            said, _ = process.communicate(timeout=max(0.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            _end(process)
            said, _ = process.communicate()
        except BaseException:
            _end(process)
            raise
        finally:
            with self.lock:
                self.running.discard(process)
        with self.lock, self.log.open("ab") as file:
            file.write(said)
        if late:
            raise BuildError(f"{what} was not done in time; the log is {self.log}")
        if process.returncode != 0:
            text = said.decode(errors="replace")
            hit = re.search(r"^.*(?:error|CMake Error)\b.*$", text, re.MULTILINE)
            raise BuildError(f"{what} failed: {hit.group(0).strip() if hit else text[-300:]}; the log is {self.log}")

    def stop(self) -> None:
        """Ends what runs, in whichever thread, and lets nothing more begin."""
        with self.lock:
            self.stopped = True
            for process in self.running:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all of its session: a compiler's driver leaves the compilers behind. Ninja gives each of its jobs
    a group of its own, and ends them when it is asked to."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
