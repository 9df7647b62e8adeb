"""Builds nvx_gpucheck from the sources: with CMake where it is, else by calling the compilers."""

from __future__ import annotations

import concurrent.futures
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAME = "nvx_gpucheck"


class BuildError(Exception):
    """In a sentence, what is missing or went wrong."""


def is_source(folder: Path) -> bool:
    return (folder / "tests" / "gpucheck" / "main.cc").is_file() and (folder / "csrc" / "kernel").is_dir()


def find_source(named: str | None) -> Path:
    """The source checkout: the one named, the one that this package lies in, or the working directory."""
    if named is not None:
        if is_source(Path(named)):
            return Path(named).resolve()
        raise BuildError(f"{named} is not a source checkout of nvx: it has no tests/gpucheck")
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if is_source(folder):
            return folder
    raise BuildError(
        "nvx gpucheck builds its program from nvx's sources, and this nvx was installed without them:"
        " run it in a checkout, or name one with --source DIR"
    )


def find_nvcc() -> Path:
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = next((Path(c) / "bin" / "nvcc" for c in candidates if c and (Path(c) / "bin" / "nvcc").exists()), None)
    found = nvcc or shutil.which("nvcc")
    for folder in ("/usr/local/cuda/bin", *(f"{entry}/nvidia/cu13/bin" for entry in sys.path if entry)):
        found = found or shutil.which("nvcc", path=folder)
    if found is None:
        raise BuildError("there is no nvcc here: set CUDA_HOME to a CUDA toolkit")
    return Path(found)


def toolkit_of(nvcc: Path) -> Path:
    """The folder of the toolkit that an nvcc belongs to, though it be called through a link or a script."""
    asks = [str(nvcc), "--dryrun", "-E", "-x", "cu", "/dev/null"]
    told = subprocess.run(asks, capture_output=True, text=True, timeout=60, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", told.stderr + told.stdout, re.MULTILINE)
    named = [Path(top.group(1).strip())] if top else []
    for folder in (*named, nvcc.parent.parent, nvcc.resolve().parent.parent, Path("/usr/local/cuda")):
        if (folder / "include" / "cuda_runtime_api.h").exists():
            return folder.resolve()
    raise BuildError(f"{nvcc} has no cuda_runtime_api.h beside it: set CUDA_HOME to a whole CUDA toolkit")


class Steps:
    """Runs commands until a deadline, keeps what they say, and shows how far they are."""

    def __init__(self, log: Path, seconds: float) -> None:
        self.log = log
        self.end = time.monotonic() + seconds
        log.write_bytes(b"")

    def run(self, command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
        left = self.end - time.monotonic()
        if left <= 0:
            raise BuildError("building took too long")
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise BuildError(f"{what} was not done in time; the log is {self.log}") from None
        with self.log.open("ab") as file:
            file.write(done.stdout)
        if done.returncode != 0:
            text = done.stdout.decode(errors="replace")
            hit = re.search(r"^.*(?:error|CMake Error)\b.*$", text, re.MULTILINE)
            raise BuildError(f"{what} failed: {hit.group(0).strip() if hit else text[-300:]}; the log is {self.log}")


def build(source: Path, folder: Path, computes: list[str], seconds: float) -> Path:
    """The program, for GPUs of these compute capabilities. Raises BuildError."""
    nvcc = find_nvcc()
    folder.mkdir(parents=True, exist_ok=True)
    steps = Steps(folder / "build.log", seconds)
    if shutil.which("cmake") is None:
        return by_hand(source, folder, nvcc, computes, steps)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CUDAToolkit_ROOT": str(toolkit_of(nvcc)),
        "TORCH_CUDA_ARCH_LIST": " ".join(computes),
        "NVX_CUDA": "ON",
        "NVX_GPUCHECK": "ON",
        "NVX_PYTHON": "OFF",
        "NVX_UCX": "OFF",
    }
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    environment = {name: value for name, value in os.environ.items() if name != "NVX_CUDA"}
    try:
        steps.run(["cmake", "-S", str(source), "-B", str(folder), *generator, *definitions], "configuring", environment)
    except BuildError as error:
        print(f"  {error}; calling the compilers instead", flush=True)
        return by_hand(source, folder, nvcc, computes, steps)
    jobs = str(len(os.sched_getaffinity(0)))
    steps.run(["cmake", "--build", str(folder), "--parallel", jobs, "--target", NAME], "compiling", environment)
    return folder / NAME


def by_hand(source: Path, folder: Path, nvcc: Path, computes: list[str], steps: Steps) -> Path:
    """What cmake/gpucheck.cmake does, for a machine without CMake. Everything is compiled anew."""
    csrc, tests = source / "csrc", source / "tests"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("there is no C++ compiler here")
    version = re.search(r'"(.+)"', (source / "python" / "nvx" / "_version.py").read_text())
    levels = {"base": "x86-64", "v3": "x86-64-v3", "v4": "x86-64-v4"}
    if platform.machine() not in ("x86_64", "AMD64"):
        levels = {"base": "armv8-a"}
    include = [f"-I{csrc}", f"-I{tests}"]
    flags = [
        *("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-ffp-contract=off", "-pthread", *include),
        *("-isystem", str(toolkit_of(nvcc) / "include"), f'-DNVX_VERSION="{version.group(1) if version else ""}"'),
        *(f"-DNVX_LEVEL_{level.upper()}=1" for level in levels),
    ]
    chosen = [c.replace(".", "") for c in computes]
    codes = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in chosen]
    device_flags = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC", *include]
    jobs: list[tuple[list[str], str]] = []

    def add(tool: str, source_file: Path, name: str, *more: str) -> None:
        jobs.append(([tool, *more, "-c", str(source_file), "-o", str(folder / name)], name))

    for cu in (csrc / "kernel" / "launch_cuda.cu", tests / "gpucheck" / "control.cu"):
        add(str(nvcc), cu, f"{cu.stem}.cu.o", *device_flags, *codes)
    for level, march in levels.items():
        more = ("-O3", f"-march={march}", f"-DNVX_LEVEL={level}")
        add(compiler, csrc / "kernel" / "levels" / "level.cc", f"level_{level}.o", *flags, *more)
    for room in (csrc / "base", csrc / "kernel", csrc / "memory", tests / "gpucheck"):
        for cc in sorted(room.glob("*.cc")):
            if not cc.stem.endswith("_test"):
                add(compiler, cc, f"{room.name}_{cc.stem}.o", *flags)
    add(compiler, tests / "support" / "plays.cc", "support_plays.o", *flags)
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for done in [pool.submit(steps.run, line, f"compiling {name}") for line, name in jobs]:
            done.result()
    objects = [str(folder / name) for _, name in jobs]
    steps.run([str(nvcc), "-o", str(folder / NAME), *objects, "-lpthread", "-ldl", "-lrt"], "linking")
    return folder / NAME
