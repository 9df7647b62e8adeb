"""NVX_AS and `nvx.serve_as`: groups that a program requests by another backend's name are nvx's.

On request nvx wraps torch's function with which init_process_group, new_group and device meshes make a group. Without a
request it only replaces the handler of torch's c10d log (RefusalHandler). Code that makes a ProcessGroupGloo itself
(RPC, the helper of TORCH_DISTRIBUTED_DEBUG=DETAIL) gets gloo.
"""

import functools
import inspect
import logging
import os
import sys
import time

NAMES = ("gloo", "nccl")
_served: set[str] = set()  # a subset of NAMES
_groups = 0

replaced: dict[str, set[str]] = {}  # the groups that are being made, and the names of which nvx serves a part of them

_LENGTH = 6988  # of an address that gloo refuses, see csrc/torch/call/gloo_ranks.cc
_ADVICE = (
    "Set NVX_AS=gloo (or call nvx.serve_as) on all ranks, or on none. If it is set everywhere, nvx is not loaded on the"
    " ranks that use gloo: install it there and unset TORCH_DEVICE_BACKEND_AUTOLOAD."
)


def names():
    """The names that nvx can serve. A group named nccl takes CUDA tensors only."""
    import torch

    return NAMES if torch.version.cuda else NAMES[:1]


def parse(text):
    """(names that nvx can serve, the others, with a reason where it is not obvious) of a list such as "gloo,nccl"."""
    requested = [name.strip().lower() for name in text.split(",") if name.strip()]
    others = [name for name in requested if name not in names()]
    reasons = {"nccl": "nccl (this torch is built without CUDA)"}
    return [name for name in requested if name in names()], [reasons.get(name, name) for name in others]


def serve(names):
    """From now on, groups that are requested by these names are nvx's."""
    import torch.distributed.distributed_c10d as c10d

    _served.update(names)
    if _served and not hasattr(c10d._new_process_group_helper, "nvx_stand_in"):
        c10d._new_process_group_helper = _wrapped(c10d, c10d._new_process_group_helper)


def serve_none():
    """From now on all groups, also those of child processes, have the backend that is requested."""
    _served.clear()
    os.environ.pop("NVX_AS", None)


def served():
    """(the names that nvx serves besides its own, the number of groups that it has served by them)."""
    return sorted(_served), _groups


def translate(backend):
    """The backend string with nvx in place of the names that it serves; None if it has none of them."""
    import torch.distributed.distributed_c10d as c10d

    if backend in _served:
        return "nvx" if backend == "gloo" else "cuda:nvx"
    if ":" not in backend and backend != c10d.Backend.UNDEFINED:
        return None
    by_device = c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map()
    if not _served.intersection(by_device.values()):
        return None
    # One backend for all devices gets the store of the first, which must be where gloo itself would keep its addresses.
    pairs = sorted(by_device.items(), key=lambda pair: pair[1] != "gloo")
    return ",".join(f"{device}:{'nvx' if name in _served else name}" for device, name in pairs)


def _wrapped(c10d, make):
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_group(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        requested = bound.arguments["backend"]
        actual = translate(requested)
        if actual is None:
            return make(*args, **kwargs)
        bound.arguments["backend"] = actual
        name = bound.arguments["group_name"]
        by_device = c10d.BackendConfig(requested).get_device_backend_map()
        replaced[name] = (_served | {"nvx"}).intersection(by_device.values())
        try:
            group, store = make(*bound.args, **bound.kwargs)
        finally:
            replaced.pop(name, None)  # another thread may make its rank's group of this name
        if isinstance(group, c10d.ProcessGroup) and c10d._world.pg_map[group][0] == actual:
            _set_backend_name(c10d, group, requested, actual, store)
        return group, store

    make_group.nvx_stand_in = True
    return make_group


def _set_backend_name(c10d, group, requested, actual, store):
    """Makes get_backend(), get_backend_config() and, for gloo, the group itself answer with the requested name."""
    global _groups
    c10d._world.pg_map[group] = (requested, store)
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(requested))
    if ":" in actual and all(pair.endswith(":nvx") for pair in actual.split(",")):
        group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)  # torch leaves it undefined
    if requested == "gloo":
        gloo = c10d.ProcessGroup.BackendType.GLOO
        for device in group._device_types:
            group._register_backend(device, gloo, group._get_backend(device))
        group._set_default_backend(gloo)
    _groups += 1
    if _groups == 1 and group.rank() == 0:
        these = " and ".join(sorted(_served))
        print(f"nvx replaces {these} in this job; get_backend() still returns that name", file=sys.stderr)


class RefusalHandler(logging.NullHandler):
    """Replaces the NullHandler of torch's c10d log, and gets an exception of init_process_group before the program
    does. On a rank that uses gloo itself, it prepends the cause to gloo's message."""

    def handle(self, record):
        self.emit(record)

    def emit(self, record):
        error = sys.exc_info()[1]
        by_init = isinstance(record.msg, dict) and record.msg.get("func_name") == "init_process_group"
        if error is None or not by_init or f" vs {_LENGTH}" not in str(error):
            return
        error.args = (
            "nvx: NVX_AS differs between ranks: on other ranks nvx replaces gloo, and this rank uses gloo itself."
            f" {_ADVICE} gloo says: {error}",
        )
        time.sleep(2)  # this process may serve the store, where the other ranks read the cause


def install_handler():
    """Installs RefusalHandler. Idempotent."""
    from torch.distributed import c10d_logger

    handlers = c10d_logger._c10d_logger.handlers
    handlers[:] = [*(one for one in handlers if not isinstance(one, logging.NullHandler)), RefusalHandler()]
