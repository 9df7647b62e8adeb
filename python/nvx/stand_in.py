"""NVX_AS and `nvx.serve_as`: groups that a program asks for by another backend's name are nvx's.

This is the one place where nvx changes torch, and only on request: it wraps the function with which init_process_group,
new_group and device meshes make a group. Code that makes a ProcessGroupGloo itself (RPC, the helper of
TORCH_DISTRIBUTED_DEBUG=DETAIL) gets gloo.
"""

import contextlib
import datetime
import functools
import inspect
import logging
import os
import struct
import sys
import time

NAMES = ("gloo", "nccl")
_served: set[str] = set()  # a subset of NAMES
_groups = 0

# A rank that uses gloo itself would wait for the others in vain. So ranks that serve gloo by nvx put this where gloo
# looks for their addresses: well-formed, but with an address of a length that gloo refuses at once, in its words
# "... 136 vs 6988".
_LENGTH = 6988
_REFUSAL = struct.pack("=Q3sQ", 3, b"nvx", _LENGTH) + bytes(_LENGTH)
_LOOKS = 16  # ranks that one rank looks at between two pauses: together they look at all


def parse(text):
    """(names that nvx can serve, the others) of a list such as "gloo,nccl"."""
    asked = [name.strip().lower() for name in text.split(",") if name.strip()]
    return [name for name in asked if name in NAMES], [name for name in asked if name not in NAMES]


def serve(names):
    """From now on, groups that are asked for by these names are nvx's."""
    import torch.distributed.distributed_c10d as c10d

    _served.update(names)
    if _served and not hasattr(c10d._new_process_group_helper, "nvx_stand_in"):
        c10d._new_process_group_helper = _standing_in(c10d, c10d._new_process_group_helper)


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
    return ",".join(f"{device}:{'nvx' if name in _served else name}" for device, name in by_device.items())


def _standing_in(c10d, make):
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_group(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments["backend"]
        actual = translate(asked)
        if actual is None:
            return make(*args, **kwargs)
        _meet(c10d, asked, bound.arguments)
        bound.arguments["backend"] = actual
        group, store = make(*bound.args, **bound.kwargs)
        if isinstance(group, c10d.ProcessGroup) and c10d._world.pg_map[group][0] == actual:
            _name(c10d, group, asked, actual, store)
        return group, store

    make_group.nvx_stand_in = True
    return make_group


def _name(c10d, group, asked, actual, store):
    """Makes get_backend() and get_backend_config() answer with the name that was asked for."""
    global _groups
    c10d._world.pg_map[group] = (asked, store)
    c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(asked))
    if ":" in actual and all(pair.endswith(":nvx") for pair in actual.split(",")):
        group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)  # torch leaves it undefined
    _groups += 1
    if _groups == 1 and int(os.environ.get("RANK", group.rank())) == 0:
        names = " and ".join(sorted(_served))
        print(f"nvx serves the groups that are asked for as {names}; get_backend() still answers so", file=sys.stderr)


# --- ranks that differ in NVX_AS ----------------------------------------------------------------------------


def _meet(c10d, asked, given):
    """Waits for all ranks of the group, and raises if one of them uses gloo itself."""
    from torch.distributed import DistBackendError

    size, rank = given["group_size"], given["group_rank"]
    by_device = c10d.BackendConfig(asked).get_device_backend_map()
    device = next((device for device, name in by_device.items() if name == "gloo" and name in _served), None)
    reconfigured = given.get("enable_reconfigure")  # from torch 2.15 on: a group that has no ranks yet
    if device is None or reconfigured or rank is None or rank < 0 or size < 2:
        return
    name, timeout = given["group_name"], given.get("timeout") or c10d.default_pg_timeout
    store = c10d.PrefixStore(f"{device}/", c10d.PrefixStore(f"{name}/", given["store"]))
    gloos = c10d.PrefixStore("0", store)  # where gloo keeps its ranks' addresses
    gloos.set(str(rank), _REFUSAL)
    if store.add("nvx/as/come", 1) >= size:
        store.set("nvx/as/verdict", "all")
    others = [(rank + i) % size for i in range(1, size)]
    end = time.monotonic() + timeout.total_seconds() if timeout > datetime.timedelta(0) else float("inf")
    pause, longest = 0.001, min(1.0, max(0.02, size / 1000))
    while not store.check(["nvx/as/verdict"]):
        time.sleep(pause)
        pause = min(2 * pause, longest)
        if pause < longest:
            continue
        for other in others[:_LOOKS]:
            if gloos.check([str(other)]) and gloos.get(str(other)) != _REFUSAL:
                store.set("nvx/as/verdict", str(other))
        others = others[_LOOKS:] + others[:_LOOKS]
        if time.monotonic() > end:
            absent = [other for other in range(size) if not gloos.check([str(other)])]
            raise DistBackendError(
                f"nvx: the ranks of group {name} did not all come in {timeout.total_seconds():g} s:"
                f" {absent} are missing; this is rank {rank}"
            )
    verdict = store.get("nvx/as/verdict").decode()
    if verdict != "all":
        raise DistBackendError(
            f"nvx: NVX_AS differs between ranks: rank {verdict} of group {name} uses gloo itself, and this rank {rank}"
            " serves gloo by nvx. Set NVX_AS=gloo (or call nvx.serve_as) on all ranks, or on none."
        )
    with contextlib.suppress(Exception):  # the key has done its work
        gloos.delete_key(str(rank))


class RefusalNamed(logging.Handler):
    """A handler of torch's c10d log, which hears of an exception of init_process_group before the program does. On a
    rank that uses gloo itself, it puts the cause before gloo's words."""

    def emit(self, record):
        error = sys.exc_info()[1]
        if error is None or f" vs {_LENGTH}" not in str(error):
            return
        error.args = (
            "nvx: NVX_AS differs between ranks: other ranks serve gloo by nvx, and this rank uses gloo itself. Set"
            f" NVX_AS=gloo (or call nvx.serve_as) on all ranks, or on none. gloo says: {error}",
        )
        time.sleep(2)  # this process may serve the store, where the other ranks look for the cause


def listen():
    """Installs RefusalNamed. Idempotent."""
    from torch.distributed import c10d_logger

    if not any(isinstance(handler, RefusalNamed) for handler in c10d_logger._c10d_logger.handlers):
        c10d_logger._c10d_logger.addHandler(RefusalNamed())
