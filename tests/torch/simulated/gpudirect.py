"""`simulated`, with a UCX that reports CUDA and RDMA: `ucp_with_cuda.c` before the UCX that nvx finds here."""

import ctypes
import importlib.util
import os
import pathlib
import subprocess

import simulated

LIBRARIES = [*pathlib.Path("/usr/lib").glob("*-linux-gnu"), pathlib.Path("/usr/lib64")]
MADE = simulated.BUILT / "ucp_with_cuda" / "libucp.so.0"


def build():
    """Compiles the library. False without UCX and its headers here."""
    package = importlib.util.find_spec("libucx")
    folders = [pathlib.Path(package.origin).parent / "lib"] if package else []
    found = (path for folder in [*folders, *LIBRARIES] if (path := folder / "libucp.so.0").exists())
    real, source = next(found, None), pathlib.Path(__file__).with_name("ucp_with_cuda.c")
    if real is None:
        return False
    unfinished = MADE.with_name(f"unfinished-{os.getpid()}")
    MADE.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-std=c11", "-shared", "-fPIC", f'-DREAL_UCP="{real}"', f"-I{real.parents[1]}/include"]
    command += [str(source), "-o", str(unfinished), "-Wl,--no-as-needed", str(real), f"-Wl,-rpath,{real.parent}"]
    if subprocess.run(command, check=False).returncode != 0:
        return False
    unfinished.rename(MADE)
    return True


def load():
    os.environ["NVX_LIBUCP"] = str(MADE)
    os.environ["NVX_KERNELS"] = "1"  # however slow the trial is on a busy processor
    simulated.load()


def counted():
    """Bytes of device memory that this process's UCX has sent and received since the last call, and how many of its
    sends it might have copied to buffers of its own."""
    library = ctypes.CDLL(str(MADE))
    counters = [getattr(library, f"fake_ucp_{name}") for name in ("sent", "received", "eager")]
    for counter in counters:
        counter.restype = ctypes.c_size_t
    return [counter() for counter in counters]
