"""Compiles the fake accelerator for the torch that runs this, once: kept under build/, by torch and by source."""

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
    """The compiled library; whoever comes first compiles it, all others wait."""
    folder = KEPT / _key()
    made = folder / "fake_device.so"
    if made.exists():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(folder, made)
    return made


def include_flags(torch_folder):
    """What a compiler needs to find torch's headers."""
    include = pathlib.Path(torch_folder) / "include"
    return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def sources():
    return sorted(HERE.glob("*.cc"))


def _key():
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*sources(), *HERE.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:12]}"


def _compile(folder, made):
    compiler = [os.environ.get("CXX", "g++")]
    if shutil.which("ccache"):
        compiler.insert(0, "ccache")
    torch_folder = pathlib.Path(torch.__file__).parent
    # As one file: torch's headers are what takes long.
    together, compiled = folder / "together.cc", folder / "together.o"
    together.write_text("".join(f'#include "{source}"\n' for source in sources()))
    _run([*compiler, *FLAGS, *include_flags(torch_folder), "-c", str(together), "-o", str(compiled)])
    libraries = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-lpthread"]
    unfinished = folder / f"unfinished-{os.getpid()}.so"
    _run([compiler[-1], "-shared", "-o", str(unfinished), str(compiled), "-Wl,--no-undefined", *libraries])
    unfinished.rename(made)


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the fake accelerator does not compile: {' '.join(command)}\n{done.stdout}{done.stderr}")
