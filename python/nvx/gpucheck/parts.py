"""What is run, in order of importance, and for how long at most."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    seconds: float  # the most
    asks: str
    kind: str = "program"  # program, sanitizer, worker
    arguments: tuple[str, ...] = ()
    together: bool = False  # its processes share a GPU: under MPS, where that can be started
    gpus: int = 1


PARTS = (
    Part("facts", 25, "the devices, and what the kernels ask of them"),
    Part("correct", 70, "every algorithm, collective, type and operator bit for bit; all ranks fused in a launch"),
    Part("streams", 40, "ranks on streams of their own"),
    Part("processes", 60, "ranks as processes, over memory that they share"),
    Part("absent", 30, "a rank that never comes"),
    Part("abort", 30, "the host calls off"),
    Part("killed", 40, "a process is killed with kernels in flight"),
    Part("graph", 30, "captured operations between eager ones"),
    Part("bench", 110, "kernel time by size, ranks and algorithm, beside flag rounds"),
    Part("copies", 20, "plain copies"),
    Part("memcheck", 60, "compute-sanitizer: memory", "sanitizer"),
    Part("racecheck", 45, "compute-sanitizer: hazards in shared memory (the kernels have none yet)", "sanitizer"),
    Part("synccheck", 45, "compute-sanitizer: synchronisation", "sanitizer"),
    Part("bench_processes", 60, "time of an operation, ranks as processes", together=True),
    Part("symm_mem", 70, "torch's symmetric-memory kernels, ranks as processes", "worker", together=True),
    Part("gloo", 40, "gloo on CUDA tensors", "worker"),
    Part("pairs", 40, "copies and flags between each two GPUs", gpus=2),
    Part("nccl", 50, "NCCL, a GPU a rank", "worker", gpus=2),
)
NAMES = tuple(part.name for part in PARTS)

# A sanitizer watches every access: a few of each case are enough.
_WATCHED = ("correct", "--lean", "--ranks", "2,3")


class Unavailable(Exception):
    """A part cannot be tried here, and why."""


def sanitizer() -> str | None:
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def command(part: Part, program: str, seconds: float, gpus: int, mps: bool) -> list[str]:
    """What runs the part; it is told to end a little before it is made to. Unavailable says why there is none."""
    if gpus < part.gpus:
        raise Unavailable(f"{gpus} GPU here, it needs {part.gpus}")
    told = ["--seconds", f"{max(1.0, seconds * 0.9 - 2):.0f}"]
    side_by_side = ["--together"] if part.together and mps else []
    if part.kind == "worker":
        module = [sys.executable, "-m", "nvx.gpucheck.workers", part.name, "--gpus", str(gpus)]
        return [*module, *told, *side_by_side, *part.arguments]
    if part.kind == "sanitizer":
        tool = sanitizer()
        if tool is None:
            raise Unavailable("compute-sanitizer is not installed")
        return [tool, "--tool", part.name, "--error-exitcode", "9", program, *_WATCHED, *told]
    return [program, part.name, *told, *side_by_side, *part.arguments]


@contextlib.contextmanager
def mps() -> Iterator[tuple[dict[str, str], str]]:
    """MPS of our own, for as long as this lasts: the environment of its clients, or why there is none."""
    tool = shutil.which("nvidia-cuda-mps-control")
    if tool is None:
        yield {}, "nvidia-cuda-mps-control is not installed"
        return
    with tempfile.TemporaryDirectory(prefix="nvx-mps-") as folder:
        place = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = os.environ | place
        try:
            started = subprocess.run(
                [tool, "-d"], env=environment, capture_output=True, text=True, timeout=20, check=False
            )
            why = "" if started.returncode == 0 else (started.stderr or started.stdout).strip()[-300:] or "it refused"
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        if why:
            yield {}, f"MPS could not be started: {why}"
            return
        try:
            yield place, ""
        finally:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [tool], input="quit\n", env=environment, capture_output=True, text=True, timeout=15, check=False
                )
