"""Processes in sessions of their own, which end with all that they have started, and in a time that is bounded."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
KILLED = 5.0  # seconds within which a process is gone that was killed, if it can be


def die_with(parent: int) -> None:
    """In a process that has just begun: it does not outlive the thread that began it, however that ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def with_me() -> Callable[[], None]:
    """For what this process begins, as its preexec_fn."""
    return functools.partial(die_with, os.getpid())


def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """It reads nothing, is in a session of its own and dies with this thread."""
    how = {"stdin": subprocess.DEVNULL} | how
    return subprocess.Popen(command, start_new_session=True, preexec_fn=with_me(), **how)


def answer(command: list[str], seconds: float, **how: Any) -> str:
    """What it says; nothing where it cannot be asked, fails, or is late."""
    try:
        process = start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **how)
    except OSError:
        return ""
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return ""
    finally:
        end(process)
    return said.decode(errors="replace").strip() if process.returncode == 0 else ""


def members(session: int) -> list[int]:
    """The processes of a session that have not ended, whichever group they are in."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def end(*processes: subprocess.Popen[bytes], grace: float = 0.0) -> None:
    """These and all of their sessions. grace: seconds to end in by themselves, once they are asked to. One that is
    stuck in the driver cannot be killed: it is left."""
    if grace:
        for process in processes:
            signal_group(process, signal.SIGTERM)
        last = time.monotonic() + grace
        while any(members(process.pid) for process in processes) and time.monotonic() < last:
            time.sleep(0.05)
    for process in processes:
        signal_group(process, signal.SIGKILL)
        for one in members(process.pid):  # in groups of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILLED)
