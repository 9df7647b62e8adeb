"""NCCL without GPUs: a torch backend for `fake_device`, to which nvx delegates collectives (`NVX_DELEGATE`).

`load()` sets `NVX_DELEGATE` to `RULES` and replaces nvx's NCCL backend for the life of the process. Each process then
has a GPU of its own. `looking` changes the description of the GPU, `connecting` changes how ranks connect.
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import sysconfig

import fake_device

HERE = pathlib.Path(__file__).resolve().parent
RULES = "all_reduce:2K, broadcast, reduce:2K, all_gather:4K, reduce_scatter:4K, send_recv:2K"

made = []  # the backends of this process, the latest last
_connecting = "connect"


def build():
    python = ["-isystem", sysconfig.get_paths()["include"], "-DTORCH_EXTENSION_NAME=fake_nccl_backend"]
    return fake_device.shared_library("fake_nccl", HERE, python, ["-ltorch", "-ltorch_python"])


def _backend():
    spec = importlib.util.spec_from_file_location("fake_nccl_backend", build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load():
    # nvx reads them once, when the first group is made.
    os.environ.update({"NVX_DELEGATE": RULES, "NVX_DEBUG": "trace"})
    fake_device.load()
    ctypes.CDLL(str(fake_device.build()), mode=ctypes.RTLD_GLOBAL)
    fake = _backend()
    import nvx.delegate

    def make(store, rank, size, device):
        made.append(fake.FakeNccl(store, rank, size, _connecting))
        return made[-1]

    nvx.delegate.probe = lambda device: (f"of process {os.getpid()}", "")
    nvx.delegate.make = make


def calls():
    """Returns how often the latest backend was called, by name: collectives, connect, abort, shutdown."""
    return made[-1].calls()


@contextlib.contextmanager
def looking(gpu="", why_not=""):
    """Sets the description of this process's GPU inside the block."""
    import nvx.delegate

    before = nvx.delegate.probe
    nvx.delegate.probe = lambda device: (gpu, why_not)
    try:
        yield
    finally:
        nvx.delegate.probe = before


@contextlib.contextmanager
def connecting(how):
    """Sets how backends of this process connect inside the block: "hang", "wait" in the store, or the text of
    the error that it raises."""
    global _connecting
    _connecting = how
    try:
        yield
    finally:
        _connecting = "connect"
