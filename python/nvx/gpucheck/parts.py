"""What is run, in order of importance, and for how long at most."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    seconds: float  # the most
    asks: str
    kind: str = "program"  # program, sanitizer, worker, torch
    arguments: tuple[str, ...] = ()
    together: bool = False  # its processes share a GPU: under MPS, where that can be started
    gpus: int = 1
    shares: bool = False  # its processes share memory of a kind that can be chosen

    @property
    def needs(self) -> str:
        """Of what is built; empty: nothing."""
        if self.kind == "torch":
            return "staged" if self.name == "staging" else "kernels"
        return "" if self.kind == "worker" else "program"


# First what only a device can tell: that waits end, that a context outlives a peer, that captured and eager calls mix.
PARTS = (
    Part("facts", 15, "the devices, and what the kernels ask of them"),
    Part("correct", 45, "every algorithm, collective, type and operator bit for bit; all ranks fused in a launch"),
    Part("streams", 20, "ranks on streams of their own"),
    Part("absent", 25, "a rank that never comes"),
    Part("abort", 20, "the host calls off"),
    Part("killed", 30, "a process is killed with kernels in flight", shares=True),
    Part("processes", 45, "ranks as processes, over memory that they share", shares=True),
    Part("graph", 15, "captured operations between eager ones"),
    Part("ddp", 40, "torch's DDP", "torch"),
    Part("replay", 30, "collectives captured into graphs and replayed", "torch"),
    Part("profile", 25, "what torch's profiler sees of a call: no wait, no allocation", "torch"),
    Part("host_time", 20, "the host's time of a call", "torch"),
    Part("bench", 65, "kernel time by size, ranks and algorithm, beside flag rounds"),
    Part("memcheck", 40, "compute-sanitizer: memory", "sanitizer"),
    Part("synccheck", 35, "compute-sanitizer: synchronisation", "sanitizer"),
    # It watches shared memory, of which the kernels use none: it has nothing to find until one does.
    Part("racecheck", 25, "compute-sanitizer: races in shared memory", "sanitizer"),
    Part("symm_mem", 70, "torch's symmetric-memory kernels, ranks as processes", "worker", together=True),
    Part("bench_processes", 60, "time of an operation, ranks as processes", together=True, shares=True),
    Part("replay_time", 40, "time of an all-reduce in a replayed graph", "torch", together=True),
    Part("copies", 20, "plain copies"),
    Part("gloo", 40, "gloo on CUDA tensors", "worker"),
    Part("fsdp2", 40, "torch's fully_shard", "torch", ("--ranks", "4")),
    Part("pools", 40, "tensors in memory that the other ranks map, beside ordinary ones", "torch"),
    Part("training", 40, "a step of DDP beside gloo's", "torch", together=True),
    Part("dtensor", 40, "DTensor and tensor parallel layers", "torch", ("--ranks", "4")),
    Part("pipeline", 30, "torch's pipelines", "torch", ("--ranks", "3")),
    Part("fsdp1", 30, "FullyShardedDataParallel", "torch"),
    Part("compile", 75, "torch.compile with functional collectives", "torch"),
    Part("expandable", 40, "the same with expandable segments", "torch"),
    Part("visible", 30, "ranks that see the devices in orders of their own", "torch"),
    Part("staging", 45, "some of that through host memory, by a module without kernels", "torch"),
    Part("relay", 40, "collectives over two hosts, both of them this one", "torch", ("--ranks", "4")),
    Part("torch_tests", 80, "torch's own tests that ask for CUDA", "torch", ("--ranks", "4")),
    Part("pairs", 40, "copies and flags between each two GPUs", gpus=2),
    Part("nccl", 50, "NCCL, a GPU a rank", "worker", gpus=2),
)
DEVICE = "cuda"  # of the tensors of torch's parts
KINDS = ("fabric", "fd", "ipc", "host")  # of memory that processes share, as nvx_gpucheck calls them
NAMES = tuple(part.name for part in PARTS)

# All parts in calls that keep to nine minutes though every part takes all of its time; the build goes with the first.
GROUPS = {
    "device": (
        "facts", "correct", "streams", "absent", "abort", "killed", "graph", "replay", "memcheck", "synccheck",
        "racecheck",
    ),
    "targets": (
        "processes", "profile", "host_time", "bench", "symm_mem", "bench_processes", "replay_time", "copies", "gloo",
        "training", "pairs", "nccl",
    ),
    "uses": (
        "ddp", "fsdp2", "pools", "dtensor", "pipeline", "fsdp1", "compile", "expandable", "visible", "staging",
        "relay", "torch_tests",
    ),
}  # fmt: skip


def expand(words: list[str]) -> list[str]:
    """The parts that are named, by themselves or by their group; each once. Raises ValueError for what is neither."""
    names = [name for word in words for name in GROUPS.get(word, (word,))]
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no part '{name}': there are {', '.join((*NAMES, *GROUPS))}")
    return list(dict.fromkeys(names))


# A sanitizer watches every access: a few of each case are enough.
_WATCHED = ("correct", "--lean", "--ranks", "2,3")


class Unavailable(Exception):
    """A part cannot be tried here, and why."""


class Missing(Exception):
    """A part cannot be tried because something was not built, and why."""


def sanitizer() -> str | None:
    beside = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a run has for its parts."""

    built: dict[str, str]  # program, kernels, staged: the files
    missing: dict[str, str]  # why one of them is not there
    gpus: int
    source: str = ""
    kind: str = ""  # of memory that processes share; empty: the best there is
    device: str = "cuda"  # of tensors


def check_needs(part: Part, scene: Scene) -> None:
    """Unavailable says what the machine lacks; Missing, what should have been built."""
    if scene.gpus < part.gpus:
        raise Unavailable(f"{scene.gpus} GPU here, it needs {part.gpus}")
    if part.kind == "sanitizer" and sanitizer() is None:
        raise Unavailable("compute-sanitizer is not installed")
    if part.needs and part.needs not in scene.built:
        raise Missing(scene.missing.get(part.needs, f"{part.needs} was not built"))


def command(part: Part, scene: Scene, seconds: float, mps: bool) -> list[str]:
    """What runs the part, if it is started now; it is told to end a little before it is made to."""
    left = max(1.0, seconds * 0.9 - 2)
    told = ["--seconds", f"{left:.0f}"]
    until = ["--until", f"{time.monotonic() + left:.3f}"]  # torch may take long to import
    side_by_side = ["--together"] if part.together and mps else []
    kind = ["--kind", scene.kind] if part.shares and scene.kind else []
    if part.kind == "worker":
        module = [sys.executable, "-m", "nvx.gpucheck.workers", part.name, "--gpus", str(scene.gpus)]
        return [*module, *until, *side_by_side, *part.arguments]
    if part.kind == "torch":
        module = [sys.executable, "-m", "nvx.gpucheck.uses", part.name, "--module", scene.built[part.needs]]
        place = ["--device", scene.device, "--gpus", str(scene.gpus), "--source", scene.source]
        expected = ["--kernels"] if part.needs == "kernels" and scene.device == "cuda" else []
        return [*module, *place, *expected, *until, *side_by_side, *part.arguments]
    program = scene.built["program"]
    if part.kind == "sanitizer":
        return [str(sanitizer()), "--tool", part.name, "--error-exitcode", "9", program, *_WATCHED, *told]
    return [program, part.name, *told, *side_by_side, *kind, *part.arguments]
