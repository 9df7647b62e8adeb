"""`simulated`, with a driver whose GPUs are in one NVLink domain, on all hosts."""

import ctypes
import os
import pathlib
import subprocess

import simulated

MADE = simulated.BUILT / "libnvidia-ml.so.1"
SOURCE = pathlib.Path(__file__).parents[2] / "install" / "fake_nvml.c"
FABRIC = "7 2"


def build():
    unfinished = MADE.with_name(f"unfinished-{os.getpid()}")
    command = ["cc", "-shared", "-fPIC", str(SOURCE), "-o", str(unfinished), "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(command, check=True)
    unfinished.rename(MADE)


def load():
    os.environ["FAKE_FABRIC"] = FABRIC
    os.environ["FAKE_FIRST_BUS"] = "0a"  # where the tests' libcuda has its first GPU
    os.environ["NVX_KERNELS"] = "1"  # however slow the trial is on a busy processor
    os.environ["UCX_MODULES"] = "^cuda"  # with an NVML, UCX's module loads, and needs more than the tests' libcuda has
    ctypes.CDLL(str(MADE))  # "libnvidia-ml.so.1" now resolves to this library
    simulated.load()
