"""NVX_AS and `nvx.serve_as`: groups that a program asks for by another backend's name are nvx's.

On request nvx wraps torch's function with which init_process_group, new_group and device meshes make a group. Without a
request it only adds a handler to torch's c10d log (RefusalNamed). Code that makes a ProcessGroupGloo itself (RPC, the
helper of TORCH_DISTRIBUTED_DEBUG=DETAIL) gets gloo.
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
_NAMED = 20  # absent ranks that an error names
_ABSENT = b"-"
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
    asked = [name.strip().lower() for name in text.split(",") if name.strip()]
    others = [name for name in asked if name not in names()]
    reasons = {"nccl": "nccl (this torch is built without CUDA)"}
    return [name for name in asked if name in names()], [reasons.get(name, name) for name in others]


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
    if _groups == 1 and group.rank() == 0:
        these = " and ".join(sorted(_served))
        print(f"nvx serves the groups that are asked for as {these}; get_backend() still answers so", file=sys.stderr)


# --- ranks that differ in NVX_AS ----------------------------------------------------------------------------


def _meet(c10d, asked, given):
    """Waits for all ranks of the group, and raises if one of them uses gloo itself."""
    from torch.distributed import DistBackendError

    size, rank = given["group_size"], given["group_rank"]
    by_device = c10d.BackendConfig(asked).get_device_backend_map()
    device = next((device for device, name in by_device.items() if name == "gloo" and name in _served), None)
    reconfigured = given.get("enable_reconfigure")  # from torch 2.14 on: a group that has no ranks yet
    if device is None or reconfigured or rank is None or rank < 0 or size < 2:
        return
    timeout = _timeout(c10d, given)  # it loads nvx's module, which may raise: before others count on this rank
    store = c10d.PrefixStore(f"{device}/", c10d.PrefixStore(f"{given['group_name']}/", given["store"]))
    meeting = _Meeting(c10d, store, given["group_name"], rank, size)
    meeting.come()
    verdict = meeting.wait(timeout)
    if verdict != b"all":
        raise DistBackendError(
            f"nvx: NVX_AS differs between ranks: rank {verdict.decode()} of group {given['group_name']} uses gloo"
            f" itself, and this rank {rank} serves gloo by nvx. {_ADVICE}"
        )
    meeting.leave()


def _timeout(c10d, given):
    """The timeout that the group will have."""
    import nvx

    timeout = given.get("timeout")
    timeout = nvx._timeout(given.get("backend_options"), c10d.default_pg_timeout if timeout is None else timeout)
    faults = {name: fault for name, _, _, _, fault in nvx._load().config_table()}
    seconds = os.environ.get("NVX_TIMEOUT_S")
    if seconds and not faults["NVX_TIMEOUT_S"] and float(seconds) > 0:
        return datetime.timedelta(seconds=float(seconds))
    return timeout


class _Meeting:
    """One meeting of the ranks of a group. A store may see several: a group that is made again has the same name."""

    def __init__(self, c10d, store, name, rank, size):
        self.store, self.name, self.rank, self.size = store, name, rank, size
        self.gloos = c10d.PrefixStore("0", store)  # where gloo keeps its ranks' addresses
        self.ours = f"nvx/as/{rank}"  # counts this rank's arrivals and departures
        self.looks = True

    def come(self):
        # An address of an earlier group says that those of other ranks may be as old: they prove nothing.
        self.looks = not self.gloos.check([str(self.rank)])
        self.gloos.set(str(self.rank), _REFUSAL)
        moves = self.store.add(self.ours, 1)
        again = moves % 2 == 0  # this rank came to a meeting that failed: all still count it
        if again:
            moves = self.store.add(self.ours, -1)
        turn = moves // 2  # meetings that succeeded
        self.verdict = f"nvx/as/verdict/{turn}"
        if self.store.add("nvx/as/come", 0 if again else 1) >= (turn + 1) * self.size:
            self.store.set(self.verdict, "all")

    def wait(self, timeout):
        """The verdict: b"all", or a rank that uses gloo itself."""
        end = time.monotonic() + timeout.total_seconds() if timeout > datetime.timedelta(0) else float("inf")
        pause, longest = 0.001, min(1.0, max(0.02, self.size / 1000))
        others = [(self.rank + i) % self.size for i in range(1, self.size)] if self.looks else []
        while True:
            if self.store.check([self.verdict]):
                verdict = self.store.get(self.verdict)
                if verdict == b"all" or self.looks:
                    return verdict
            if time.monotonic() > end:
                raise self.absence(timeout)
            time.sleep(pause)
            pause = min(2 * pause, longest)
            if pause < longest:
                continue
            look, others = others[:_LOOKS], others[_LOOKS:]
            for other in look:
                address = self.address(other)
                if address == _ABSENT:
                    others.append(other)
                elif address != _REFUSAL:
                    self.store.set(self.verdict, str(other))

    def address(self, rank):
        """A rank's entry, or _ABSENT. It never waits: `get` would for a key that its owner deletes after a `check`."""
        with contextlib.suppress(RuntimeError):  # a store of the user's may lack compare_set
            return self.gloos.compare_set(str(rank), "-", "-")
        return _ABSENT

    def absence(self, timeout):
        from torch.distributed import DistBackendError

        absent = [other for other in range(self.size) if self.address(other) != _REFUSAL]
        more = f" and {len(absent) - _NAMED} more" if len(absent) > _NAMED else ""
        return DistBackendError(
            f"nvx: timed out after {timeout.total_seconds():g} s, waiting for the ranks of group {self.name}:"
            f" ranks {absent[:_NAMED]}{more} have not joined; this is rank {self.rank}"
        )

    def leave(self):
        self.store.add(self.ours, 1)
        with contextlib.suppress(Exception):  # the key has done its work
            self.gloos.delete_key(str(self.rank))


class RefusalNamed(logging.Handler):
    """A handler of torch's c10d log, which hears of an exception of init_process_group before the program does. On a
    rank that uses gloo itself, it puts the cause before gloo's words."""

    def emit(self, record):
        error = sys.exc_info()[1]
        by_init = isinstance(record.msg, dict) and record.msg.get("func_name") == "init_process_group"
        if error is None or not by_init or f" vs {_LENGTH}" not in str(error):
            return
        error.args = (
            "nvx: NVX_AS differs between ranks: on other ranks nvx replaces gloo, and this rank uses gloo itself."
            f" {_ADVICE} gloo says: {error}",
        )
        time.sleep(2)  # this process may serve the store, where the other ranks look for the cause


def listen():
    """Installs RefusalNamed. Idempotent."""
    from torch.distributed import c10d_logger

    if not any(isinstance(handler, RefusalNamed) for handler in c10d_logger._c10d_logger.handlers):
        c10d_logger._c10d_logger.addHandler(RefusalNamed())
