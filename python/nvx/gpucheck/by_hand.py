"""The build for a machine without CMake: what cmake/core.cmake, torch_module.cmake and gpucheck.cmake say, by calling
the compilers. Everything is compiled anew."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from pathlib import Path

from .steps import BuildError, Steps


@dataclasses.dataclass(frozen=True)
class Job:
    source: Path
    folder: Path
    nvcc: Path | None
    toolkit: Path | None
    computes: list[str]
    wanted: dict[str, Path]  # program, kernels, staged: the file that each becomes


@dataclasses.dataclass(frozen=True)
class Object:
    command: list[str]
    file: Path
    within: frozenset[str]  # what it is linked into


def compile_all(job: Job, steps: Steps) -> dict[str, str]:
    """Of what could not be built, why."""
    objects = [one for one in list_objects(job) if one.within & job.wanted.keys()]
    missing: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun = {pool.submit(steps.run, one.command, f"compiling {one.file.name}"): one for one in objects}
        try:
            for done in concurrent.futures.as_completed(begun):
                if error := done.exception():
                    if not isinstance(error, BuildError):
                        raise error
                    missing |= {what: str(error) for what in begun[done].within & job.wanted.keys()} | missing
                if missing.keys() >= job.wanted.keys():
                    steps.stop()
        except BaseException:
            steps.stop()
            raise
    for what, file in job.wanted.items():
        if what in missing:
            continue
        try:
            file.parent.mkdir(exist_ok=True)
            own = [str(one.file) for one in objects if what in one.within]
            command = [*linker(job, what), "-o", str(file), *own, *libraries(what)]
            steps.run(command, f"linking {file.name}")
        except BuildError as error:
            missing[what] = str(error)
    return missing


def find_compiler() -> str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("there is no C++ compiler here")
    return compiler


def linker(job: Job, what: str) -> list[str]:
    if what == "program":
        return [str(job.nvcc)]
    exports = job.source / "cmake" / "exports.map"
    if what == "kernels":  # nvcc adds the runtime
        return [str(job.nvcc), "-shared", "-Xlinker", f"--version-script={exports}"]
    return [find_compiler(), "-shared", f"-Wl,--version-script={exports}"]


def libraries(what: str) -> list[str]:
    """Behind the objects, or a linker that takes only what is asked for takes none of them."""
    torch = [] if what == "program" else ["c10", "torch_cpu", "torch_python"]
    return [*(str(torch_folder() / "lib" / f"lib{name}.so") for name in torch), "-lpthread", "-ldl", "-lrt"]


def torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("there is no torch here")
    return Path(found.origin).parent


def list_objects(job: Job) -> list[Object]:
    csrc, tests = job.source / "csrc", job.source / "tests"
    everything, modules = frozenset({"program", "kernels", "staged"}), frozenset({"kernels", "staged"})
    compiler = find_compiler()
    version = re.search(r'"(.+)"', (job.source / "python" / "nvx" / "_version.py").read_text())
    levels = {"base": "x86-64", "v3": "x86-64-v3", "v4": "x86-64-v4"}
    if platform.machine() not in ("x86_64", "AMD64"):
        levels = {"base": "armv8-a"}
    flags = [
        *("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
        *("-ffp-contract=off", "-pthread", f"-I{csrc}", f"-I{tests}"),
        f'-DNVX_VERSION="{version.group(1) if version else ""}"',
        *(f"-DNVX_LEVEL_{level.upper()}=1" for level in levels),
    ]
    if job.toolkit:
        flags += ["-isystem", str(job.toolkit / "include")]
    objects: list[Object] = []

    def add(tool: str, file: Path, name: str, within: frozenset[str], *more: str) -> None:
        into = job.folder / name
        objects.append(Object([tool, *more, "-c", str(file), "-o", str(into)], into, within))

    if job.nvcc:  # first, as they take longest
        codes = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in (c.replace(".", "") for c in job.computes)]
        device = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC"]
        device += [f"-I{csrc}", f"-I{tests}", *codes]
        kernels = csrc / "kernel" / "launch_cuda.cu"
        add(str(job.nvcc), kernels, "launch_cuda.cu.o", frozenset({"program", "kernels"}), *device)
        add(str(job.nvcc), tests / "gpucheck" / "control.cu", "control.cu.o", frozenset({"program"}), *device)
    if modules & job.wanted.keys():
        for cc in sorted((csrc / "torch").glob("*.cc")):
            add(compiler, cc, f"torch_{cc.stem}.o", modules, *flags, *torch_flags())
    for level, march in levels.items():
        more = ("-O3", f"-march={march}", f"-DNVX_LEVEL={level}")
        add(compiler, csrc / "kernel" / "levels" / "level.cc", f"level_{level}.o", everything, *flags, *more)
    rooms = {csrc / room: everything for room in ("base", "kernel", "memory")}
    rooms |= {csrc / room: modules for room in ("group", "net", "schedule")}
    for room, within in (rooms | {tests / "gpucheck": frozenset({"program"})}).items():
        for cc in sorted(room.glob("*.cc")):
            needs_ucx = room.name == "net" and cc.stem in ("ucx", "ucx_library", "ucx_worker")
            if not needs_ucx and not cc.stem.endswith("_test"):
                add(compiler, cc, f"{room.name}_{cc.stem}.o", within, *flags)
    add(compiler, tests / "support" / "plays.cc", "support_plays.o", frozenset({"program"}), *flags)
    add(compiler, csrc / "stubs" / "no_ucx.cc", "no_ucx.o", modules, *flags)
    add(compiler, csrc / "stubs" / "no_cuda.cc", "no_cuda.o", frozenset({"staged"}), *flags)
    return objects


def torch_flags() -> list[str]:
    include = torch_folder() / "include"
    return [
        *("-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")),
        *("-isystem", sysconfig.get_path("include"), "-D_GLIBCXX_USE_CXX11_ABI=1", "-DTORCH_EXTENSION_NAME=_C"),
        *("-DTORCH_API_INCLUDE_EXTENSION_H", "-DUSE_DISTRIBUTED"),
        *('-DNVX_BUILD_TYPE="Release"', '-DNVX_COMPILER="by hand"'),
    ]
