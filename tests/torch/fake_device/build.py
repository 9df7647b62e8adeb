"""Compiles the fake accelerator for the running torch. The result is cached under `build/` by torch version and
sources."""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

import torch

HERE = pathlib.Path(__file__).resolve().parent
KEPT = HERE.parents[2] / "build" / "fake_device"
FLAGS = ["-std=c++20", "-O1", "-g1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def library():
    """Compiles the library of the fake accelerator, or finds it in the cache."""
    return shared_library("fake_device", HERE)


def shared_library(name, home, flags=(), libraries=()):
    """Links a folder's sources with torch's libraries. The first process compiles; all others wait for it."""
    flags = [*FLAGS, *flags]
    folder = KEPT / _key(home, flags)
    made = folder / f"{name}.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(home, flags, libraries, made)
    return made


def include_flags(torch_folder):
    """Compiler flags for torch's headers."""
    include = pathlib.Path(torch_folder) / "include"
    return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def sources(home=HERE):
    return sorted(home.glob("*.cc"))


def _key(home, flags):
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted([*sources(home), *home.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:12]}"


def _compile(home, flags, libraries, made):
    folder = made.parent
    compiler = [os.environ.get("CXX", "g++")]
    if shutil.which("ccache"):
        compiler.insert(0, "ccache")
    torch_folder = pathlib.Path(torch.__file__).parent
    # One translation unit: parsing torch's headers takes most of the time.
    together, compiled = folder / "together.cc", folder / "together.o"
    together.write_text("".join(f'#include "{source}"\n' for source in sources(home)))
    _run([*compiler, *flags, *include_flags(torch_folder), "-c", str(together), "-o", str(compiled)])
    paths = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    complete = [] if "-ltorch_python" in libraries else ["-Wl,--no-undefined"]  # symbols of Python stay undefined
    libraries = [*paths, "-lc10", "-ltorch_cpu", *libraries, "-lpthread"]
    unfinished = folder / f"unfinished-{os.getpid()}.so"
    _run([compiler[-1], "-shared", "-o", str(unfinished), str(compiled), *complete, *libraries])
    unfinished.rename(made)


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the fake accelerator does not compile: {' '.join(command)}\n{done.stdout}{done.stderr}")
