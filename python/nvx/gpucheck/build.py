"""Builds from the sources what the parts run: nvx_gpucheck, and the torch module with its kernels and without them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from . import by_hand, screen
from .steps import BuildError, Steps

NAME = "nvx_gpu"
# What is built, and the target that makes it; a module lies in the folder of its name.
TARGETS = {"program": NAME, "kernels": "_C", "staged": "nvx_staged"}
TOOLKIT = Path("/usr/local/cuda")  # where it is if nothing says so
WITHOUT_NVCC = {"staged": "_C"}


@dataclasses.dataclass
class Built:
    """Where each thing is; of what is missing, why."""

    found: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    def add(self, what: str, folder: Path) -> None:
        file = place_of(what, folder)
        if file.exists():
            self.found[what] = str(file)
        else:
            self.missing.setdefault(what, f"there is no {file}")


def place_of(what: str, folder: Path) -> Path:
    return folder / NAME if what == "program" else folder / what / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def is_source(folder: Path) -> bool:
    return (folder / "tests" / "gpu" / "main.cc").is_file() and (folder / "csrc" / "kernel").is_dir()


def find_source(named: str | None) -> Path:
    """The source checkout: the one named, the one that this package lies in, or the working directory."""
    if named is not None:
        if is_source(Path(named)):
            return Path(named).resolve()
        raise BuildError(f"{named} is not a source checkout of nvx: it has no tests/gpu")
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
    for folder in (str(TOOLKIT / "bin"), *(f"{entry}/nvidia/cu13/bin" for entry in sys.path if entry)):
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
    for folder in (*named, nvcc.parent.parent, nvcc.resolve().parent.parent, TOOLKIT):
        if (folder / "include" / "cuda_runtime_api.h").exists():
            return folder.resolve()
    raise BuildError(f"{nvcc} has no cuda_runtime_api.h beside it: set CUDA_HOME to a whole CUDA toolkit")


def build(source: Path, folder: Path, computes: list[str], seconds: float) -> Built:
    """For GPUs of these compute capabilities; of what could not be built, why."""
    built = Built()
    nvcc: Path | None = None
    toolkit: Path | None = None
    try:
        nvcc = find_nvcc()
        toolkit = toolkit_of(nvcc)
    except (BuildError, OSError, subprocess.SubprocessError) as error:  # which costs no more than what needs it
        nvcc = None
        built.missing |= {"program": str(error), "kernels": str(error)}
    has_torch = importlib.util.find_spec("torch") is not None
    targets = {what: target for what, target in (TARGETS if nvcc else WITHOUT_NVCC).items()}
    if not has_torch:
        built.missing |= {"kernels": "there is no torch here", "staged": "there is no torch here"}
        targets = {what: target for what, target in targets.items() if what == "program"}
    if not targets:
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        steps = Steps(folder / "build.log", seconds)
    except OSError as error:
        why = f"{folder} cannot be written ({error.strerror}): name another folder with --build-dir"
        built.missing |= dict.fromkeys(targets, why)
        return built
    try:
        configured = configure(source, folder, toolkit, computes, has_torch, steps)
        made = by_cmake(folder, targets, steps) if configured else None
        if made is None:
            wanted = {what: place_of(what, folder) for what in targets}
            job = by_hand.Job(source, folder, nvcc, toolkit, computes, wanted, by_hand.find_ucx())
            made = by_hand.compile_all(job, steps)
    except BuildError as error:  # a compiler that is not there
        made = dict.fromkeys(targets, str(error))
    except BaseException:  # Ctrl-C among them
        steps.stop()
        raise
    built.missing |= made
    for what in targets:
        if what not in made:
            built.add(what, folder)
    return built


def configure(
    source: Path, folder: Path, toolkit: Path | None, computes: list[str], has_torch: bool, steps: Steps
) -> bool:
    """False where there is no CMake, or one that cannot."""
    if shutil.which("cmake") is None:
        return False
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "NVX_CUDA": "OFF",
        "NVX_GPU_TESTS": "OFF",
        "NVX_PYTHON": "ON" if has_torch else "OFF",
        "NVX_UCX": "AUTO",  # for what runs as ranks of several hosts
        "NVX_OUTPUT_DIR": str(folder / ("kernels" if toolkit else "staged")),
        "Python_EXECUTABLE": sys.executable,
    }
    if toolkit:
        kernels = {"NVX_CUDA": "ON", "NVX_GPU_TESTS": "ON", "CUDAToolkit_ROOT": str(toolkit)}
        options |= kernels | {"TORCH_CUDA_ARCH_LIST": " ".join(computes)}
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    command = ["cmake", "-S", str(source), "-B", str(folder), *generator, *definitions]
    try:
        steps.run(command, "configuring", surroundings())
    except BuildError as error:
        screen.say(f"  {error}; calling the compilers instead")
        return False
    return True


def surroundings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "NVX_CUDA"}


def by_cmake(folder: Path, targets: dict[str, str], steps: Steps) -> dict[str, str]:
    """What could not be built, and why."""
    jobs = str(len(os.sched_getaffinity(0)))
    command = ["cmake", "--build", str(folder), "--parallel", jobs, "--target"]
    on = ["--", "-k", "0"] if (folder / "build.ninja").exists() else ["--", "-k"]
    made = set()
    try:
        if "program" in targets:  # most parts need nothing more, should the time run out
            steps.run([*command, targets["program"]], "compiling", surroundings())
            made.add("program")
        steps.run([*command, *targets.values(), *on], "compiling", surroundings())
        return {}
    except BuildError as error:
        whole = error
    missing = {}
    if steps.over():
        return {what: str(whole) for what in targets if what not in made}
    for what, target in targets.items():  # what can be is built by now: which are those?
        try:
            steps.run([*command, target], f"building {target}", surroundings())
        except BuildError as error:
            missing[what] = str(whole if steps.over() else error)
    return missing
