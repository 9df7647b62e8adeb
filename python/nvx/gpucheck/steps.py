"""Commands of a build, until a deadline."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path

from . import processes

# Ninja gives each of its jobs a group of its own and ends them when it is asked to; cmake, which called it, is gone at
# once, and a compiler's driver leaves the compilers behind. So it is the session that is waited for, as long as this.
GRACE = 2.0  # seconds


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
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise BuildError(f"{what} could not begin: {error}") from None
            self.running.add(process)
        late = False
        try:
            said, _ = process.communicate(timeout=max(0.0, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            processes.end(process, grace=GRACE)
            said = _rest(process)
        except BaseException:
            processes.end(process, grace=GRACE)
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
            processes.end(*self.running, grace=GRACE)


def _rest(process: subprocess.Popen[bytes]) -> bytes:
    """What it had said, but for one that could not be ended and keeps the pipe open."""
    try:
        return process.communicate(timeout=processes.KILLED)[0]
    except subprocess.TimeoutExpired as error:
        return error.stdout or b""
