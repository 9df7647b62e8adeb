"""MPS of our own, under which processes share a GPU at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import processes

STARTS, ENDS = 20.0, 10.0  # seconds, at most
CONTROL = "nvidia-cuda-mps-control"
# It comes with the driver: where containers get that as a folder of its own, PATH need not name the folder.
PLACES = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin")


def control() -> str | None:
    return shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(PLACES))


@contextlib.contextmanager
def running(seconds: float) -> Iterator[tuple[dict[str, str], str]]:
    """For as long as this lasts: the environment of its clients, or why there is none. It takes at most a third of the
    seconds to start, and as much to end."""
    tool = control()
    if tool is None:
        yield {}, f"{CONTROL} is not installed"
        return
    with tempfile.TemporaryDirectory(prefix="nvx-mps-", ignore_cleanup_errors=True) as folder:
        place = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            why = _ask([tool, "-d"], "", Path(folder), place, min(STARTS, seconds / 3))
            if not why:
                yield place, ""
        finally:  # whether or not it said that it had started: one that was late may be there by now
            _ask([tool], "quit\n", Path(folder), place, min(ENDS, seconds / 3))
        if why:
            yield {}, f"MPS could not be started: {why}"


def _ask(command: list[str], text: str, folder: Path, place: dict[str, str], seconds: float) -> str:
    """Empty, or what went wrong. It hears and speaks by files: the daemon that it leaves behind would keep a pipe open,
    and who reads from that would wait for its end."""
    asked, said = folder / "nvx-asked", folder / "nvx-said"
    try:
        asked.write_text(text)
        with asked.open() as into, said.open("w") as out:
            process = processes.start(command, stdin=into, stdout=out, stderr=subprocess.STDOUT, env=os.environ | place)
    except OSError as error:
        return str(error)
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        processes.end(process)
        return f"it timed out after {seconds:.0f} s"
    except BaseException:
        processes.end(process)
        raise
    return "" if code == 0 else said.read_text(errors="replace").strip()[-300:] or "it refused"
