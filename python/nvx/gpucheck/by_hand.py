"""The build for a machine without CMake: what cmake/core.cmake, torch_module.cmake, gpucheck.cmake and ucx.cmake say,
by calling the compilers. Everything is compiled anew, but for what a ccache knows."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterable
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
    ucx: Path | None = None  # the folder of its headers; without it the modules serve one host


@dataclasses.dataclass(frozen=True)
class Object:
    command: list[str]
    file: Path
    within: frozenset[str]  # what it is linked into


def compile_all(job: Job, steps: Steps, at_once: int = 0) -> dict[str, str]:
    """Of what could not be built, why. at_once: compilers; 0: as many as there are cores. Each thing is linked once its
    own objects are there, and what the first one needs is compiled first: should time run out, that much is there."""
    order = list(job.wanted)
    objects = [one for one in list_objects(job) if one.within & job.wanted.keys()]
    objects.sort(key=lambda one: min(order.index(what) for what in one.within & job.wanted.keys()))
    awaited = {what: {one.file for one in objects if what in one.within} for what in order}
    missing: dict[str, str] = {}
    ccache, environment = shutil.which("ccache"), os.environ | {"CCACHE_BASEDIR": str(job.source)}
    launcher = [ccache] if ccache else []
    with concurrent.futures.ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0))) as pool:
        begun = {
            pool.submit(steps.run, [*launcher, *one.command], f"compiling {one.file.name}", environment): one
            for one in objects
        }
        try:
            for done in concurrent.futures.as_completed(begun):
                within = begun[done].within & job.wanted.keys()
                if error := done.exception():
                    if not isinstance(error, BuildError):
                        raise error
                    missing |= dict.fromkeys(within, str(error)) | missing
                if missing.keys() >= job.wanted.keys():
                    steps.stop()
                for what in within - missing.keys():
                    awaited[what].discard(begun[done].file)
                    if not awaited[what] and (why := link(job, what, objects, steps)):
                        missing[what] = why
        except BaseException:
            steps.stop()
            raise
    return missing


def link(job: Job, what: str, objects: list[Object], steps: Steps) -> str:
    """Empty, or why it could not be linked."""
    file = job.wanted[what]
    try:
        file.parent.mkdir(exist_ok=True)
        own = [str(one.file) for one in objects if what in one.within]
        steps.run([*linker(job, what), "-o", str(file), *own, *libraries(what)], f"linking {file.name}")
    except BuildError as error:
        return str(error)
    return ""


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


UCX = ("ucx", "ucx_library", "ucx_worker")  # the files of csrc/net that need its headers
UCX_LEAST = (1, 13)
TOGETHER, TOGETHER_OF_TORCH = 8, 6  # files of a room at most, as core.cmake and torch_module.cmake have it


def find_ucx() -> Path | None:
    """The folder that holds ucp/api/ucp.h of a UCX that is new enough."""
    roots = [Path(root) / "include" for name in ("UCX_HOME", "HPCX_UCX_DIR") if (root := os.environ.get(name))]
    package = importlib.util.find_spec("libucx")
    if package and package.submodule_search_locations:
        roots.append(Path(next(iter(package.submodule_search_locations))) / "include")
    for folder in (*roots, Path("/usr/local/include"), Path("/usr/include")):
        told = folder / "ucp" / "api" / "ucp_version.h"
        if told.is_file():
            version = re.findall(r"define UCP_API_M(?:AJOR|INOR)\s+(\d+)", told.read_text())
            if tuple(map(int, version)) >= UCX_LEAST:
                return folder
    return None


def together(files: Iterable[Path], root: Path, most: int) -> list[tuple[Path, list[str]]]:
    """Batches of a room's files: the one that is compiled, and the options by which it reads the others, as
    cmake/unity.cmake has it and for its reason."""
    listed = sorted(files)
    batches = -(-len(listed) // most)
    bounds = [number * len(listed) // batches for number in range(batches + 1)]
    found = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        *ahead, last = listed[begin:end]
        found.append((last, [f"--include={one.relative_to(root).as_posix()}" for one in ahead]))
    return found


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
    for headers in filter(None, (job.toolkit and job.toolkit / "include", job.ucx)):
        flags += ["-isystem", str(headers)] if headers != Path("/usr/include") else []
    objects: list[Object] = []

    def add(tool: str, file: Path, name: str, within: frozenset[str], *more: str) -> None:
        into = job.folder / name
        objects.append(Object([tool, *more, "-c", str(file), "-o", str(into)], into, within))

    def add_room(room: str, within: frozenset[str], most: int, *more: str) -> None:
        found = (cc for cc in (csrc / room).glob("*.cc") if room != "net" or job.ucx or cc.stem not in UCX)
        for cc, ahead in together(found, csrc, most):
            add(compiler, cc, f"{room}_{cc.stem}.o", within, *flags, *more, *ahead)

    if job.nvcc:  # first, as they take longest
        codes = [f"-gencode=arch=compute_{c},code=sm_{c}" for c in (c.replace(".", "") for c in job.computes)]
        device = ["-std=c++20", "-O3", "--fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC"]
        device += [f"-I{csrc}", f"-I{tests}", *codes]
        kernels = csrc / "kernel" / "launch_cuda.cu"
        add(str(job.nvcc), kernels, "launch_cuda.cu.o", frozenset({"program", "kernels"}), *device)
        add(str(job.nvcc), tests / "gpu" / "control.cu", "control.cu.o", frozenset({"program"}), *device)
    if modules & job.wanted.keys():
        add_room("torch", modules, TOGETHER_OF_TORCH, *torch_flags())
    for level, march in levels.items():
        more = ("-O3", f"-march={march}", f"-DNVX_LEVEL={level}")
        add(compiler, csrc / "kernel" / "levels" / "level.cc", f"level_{level}.o", everything, *flags, *more)
    for room in ("base", "kernel", "memory"):
        add_room(room, everything, TOGETHER)
    for room in ("group", "net", "schedule"):
        add_room(room, modules, TOGETHER)
    for cc in sorted((tests / "gpu").glob("*.cc")):
        if not cc.stem.endswith("_test"):
            add(compiler, cc, f"gpucheck_{cc.stem}.o", frozenset({"program"}), *flags)
    add(compiler, tests / "support" / "plays.cc", "support_plays.o", frozenset({"program"}), *flags)
    if not job.ucx:
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
