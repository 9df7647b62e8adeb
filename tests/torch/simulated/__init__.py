"""nvx's kernels without a GPU: the module of `NVX_SIMULATED`, on the fake accelerator, over the tests' libcuda.

    cmake -B build/simulated -DNVX_SIMULATED=ON -DNVX_OUTPUT_DIR=$PWD/build/simulated/nvx
    cmake --build build/simulated --target _C nvx_fake_cuda

`load()` replaces nvx's own module by it for the life of the process.
"""

import ctypes
import importlib.util
import os
import pathlib
import sys

import fake_device

BUILT = pathlib.Path(os.environ.get("NVX_SIMULATED_DIR", pathlib.Path(__file__).parents[3] / "build" / "simulated"))


def module():
    """The file of the module, or None if it was not built."""
    return next(iter((BUILT / "nvx").glob("_C.*.so")), None)


def load():
    """Replaces the module; call this before the first group is made."""
    fake_device.load()
    ctypes.CDLL(str(fake_device.build()), mode=ctypes.RTLD_GLOBAL)  # the kernels find its symbols by name
    ctypes.CDLL(str(BUILT / "libnvx_fake_cuda.so"))  # "libcuda.so.1" now resolves to this library
    spec = importlib.util.spec_from_file_location("nvx._C", module())
    sys.modules["nvx._C"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nvx._C"])
