"""nvx: a torch.distributed backend.

`import torch` is enough to have it: torch calls `_autoload` through an entry point, and `init_process_group("nvx")`
works. Nothing here loads C++ or starts a thread before a group is made, and an error never breaks `import torch`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib.metadata
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from . import stand_in
from ._version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as _Group

    from ._C import ArgumentError, ArgumentTypeError
    from ._C import ProcessGroupNVX as ProcessGroup

    Options = ProcessGroup.Options

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Options",
    "ProcessGroup",
    "explain",
    "monitored_barrier",
    "pool_stats",
    "sequence_number",
    "serve_as",
    "set_timeout",
    "__version__",
]


class Unusable(RuntimeError):
    """The C++ module cannot serve this torch. The text states why, and what to do."""


def _build_facts():
    """The module `nvx._built`, which cmake/built.py.in describes, or None if nothing was built."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("nvx._built")
    return None


def obstacle() -> str | None:
    """Why the C++ module cannot serve this torch, in one sentence; None if it can."""
    import torch

    built = _build_facts()
    if built is None:
        how = "build it with `pip install --no-build-isolation .` in its source directory."
        return f"nvx {__version__} has no compiled module: {how}"
    here = ".".join(torch.__version__.split(".")[:2])
    if built.TORCH != here:
        how = "build it again with `pip install --no-build-isolation --force-reinstall --no-deps .`"
        why = f"nvx {__version__} was built for torch {built.TORCH} and cannot serve torch {torch.__version__}"
        return f"{why}: {how} in its source directory, or install the wheel for torch {here}."
    return None


def _load():
    """Loads the C++ module. The first group that is created calls this."""
    loaded = sys.modules.get("nvx._C")  # it is there before another thread has initialized it
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        return loaded
    why_not = obstacle()
    if why_not is not None:
        raise Unusable(why_not)
    try:
        from . import _C
    except ImportError as error:
        if isinstance(error.__cause__, (KeyboardInterrupt, SystemExit)):
            raise error.__cause__ from None
        advice = "build nvx again, with this Python and this torch"
        if "GLIBCXX" in str(error) or "CXXABI" in str(error):  # this environment's libstdc++ is older than the compiler
            advice = "`conda install -c conda-forge libstdcxx-ng`, or build nvx again with this environment's g++ (CXX)"
        if "Too many open files" in str(error) or "failed to map segment" in str(error):
            advice = "raise the limits of open files and of address space (ulimit -n, ulimit -v)"
        raise Unusable(f"nvx's C++ module does not load ({error}): {advice}") from error
    return _C


def _check_timeout(timeout):
    """Refuses negative timeouts. Zero means none; so does `timedelta.max`, which torch makes a huge negative."""
    if timedelta(days=-1_000_000) < timeout < timedelta(0):
        raise _load().ArgumentError(f"nvx: a timeout of {timeout.total_seconds():g} s is negative")


def _options(given, group):
    """Completes the user's options with the group's facts."""
    options_class = _load().ProcessGroupNVX.Options
    if isinstance(given, options_class):
        options = copy.copy(given)  # the caller may make several groups with one object
        if options._timeout == options_class()._timeout:  # the user did not set it
            options._timeout = group.timeout
    else:
        if given is not None:
            warnings.warn(f"nvx takes nvx.Options as pg_options; {type(given).__name__} is ignored.", stacklevel=4)
        options = options_class(timeout=group.timeout)
    _check_timeout(options._timeout)
    options.group_name = group.group_id
    options.global_ranks_in_group = list(group.global_ranks_in_group)
    replaced = stand_in.replaced.get(group.group_id, set())
    options._replaces_gloo, options._barrier_on_host = "gloo" in replaced, replaced == {"gloo"}
    return options


def _report_failure(store, rank, error):
    """Writes to the store why this rank does not join. The ranks that wait there read it: read_note(),
    csrc/group/setup."""
    place = f"nvx/{store.add(f'nvx/generation/{rank}', 1)}/failure"
    if store.add(place + "s", 1) == 1:
        store.set(place, f"rank {rank} (pid {os.getpid()}, host {os.uname().nodename}) cannot load nvx: {error}")
    time.sleep(1.5 if rank == 0 else 0)  # it may serve the store, which the others read once a second


def _create(group, pg_options):
    """Creates a group for torch. `group` is a c10d `DistributedBackendOptions`."""
    try:
        _load()
    except Unusable as error:
        with contextlib.suppress(Exception):  # of the store: the error to report is this one
            _report_failure(group.store, group.group_rank, error)
        raise
    wanted = (getattr(options, "enable_reconfigure", False) for options in (group, pg_options))  # from torch 2.14 on
    kind = _load().Reconfigurable if any(wanted) else _load().ProcessGroupNVX
    return kind(group.store, group.group_rank, group.group_size, _options(pg_options, group), _by_torch=True)


def _devices():
    """The device types that nvx serves on this machine.

    It does not initialize CUDA, which forbids forks. "cuda" must be absent without a GPU: torch sends objects on it.
    """
    import torch

    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")[: 2 if torch.version.hip else 1]
    hidden = any(os.environ.get(name) in ("", "-1") for name in hiding)
    nodes = ("/dev/nvidiactl", "/dev/dxg") if torch.version.cuda else ("/dev/kfd",) if torch.version.hip else ()
    return ["cpu", "cuda"] if not hidden and any(map(os.path.exists, nodes)) else ["cpu"]


def _register():
    """Registers the name "nvx" with torch. Returns whether it was new. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or "NVX" in dist.Backend._plugins:
        return False
    dist.Backend.register_backend("nvx", _create, extended_api=True, devices=_devices())
    stand_in.install_handler()
    return True


def _warn(text):
    """Warns without raising, also where warnings are errors."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            print(f"nvx[{os.getpid()}] {text}", file=sys.stderr)


def _autoload():
    """torch calls this at the end of `import torch`. It is quick, idempotent, and never raises."""
    try:
        if not _register():
            return
        if (why_not := obstacle()) is not None:
            _warn(why_not)
        names, strange = stand_in.parse(os.environ.get("NVX_AS", ""))
        if strange:
            text = f"NVX_AS: nvx can replace {' and '.join(stand_in.names())}, not {', '.join(strange)}"
            print(f"nvx[{os.getpid()}] {text}. Groups of that name use torch's own backend", file=sys.stderr)
        stand_in.serve(names)
    except Exception as error:  # an exception here would break `import torch` for the whole environment
        _warn(f"nvx could not register itself: {error}")


def serve_as(*names: str) -> None:
    """Makes nvx replace "gloo" or "nccl" in groups that are made from now on.

    NVX_AS=gloo does the same without a change of the program. `get_backend` keeps answering with the name that was
    requested. All ranks must call it alike, before the group is made. A name that nvx cannot replace, such as "nccl"
    with a torch without CUDA, raises ValueError.
    """
    known, strange = stand_in.parse(",".join(names))
    if strange or not known:
        can = " and ".join(stand_in.names())
        raise ValueError(f"nvx.serve_as: nvx can replace {can}, not {', '.join(map(repr, strange)) or 'no name'}")
    _register()
    stand_in.serve(known)


def set_timeout(timeout: timedelta, group: _Group | None = None) -> None:
    """Sets the timeout (a timedelta; zero means none) of the nvx backend of `group`, or of the default group.

    Up to torch 2.13, `_set_pg_timeout` ignores every backend that is not built into torch.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"nvx.set_timeout: timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    _check_timeout(timeout)
    _load().set_timeout(_backend(group), timeout)


def monitored_barrier(
    group: _Group | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """`torch.distributed.monitored_barrier` for nvx groups. Up to 2.13, torch allows it for gloo groups only."""
    import torch.distributed as dist

    _backend(group)  # raises on a rank that is not in the group
    own = timedelta(milliseconds=-1)  # unset: that of the group
    _check_timeout(timedelta(0) if timeout in (None, own) else timeout)
    (group or dist.group.WORLD).monitored_barrier(own if timeout is None else timeout, wait_all_ranks)


def sequence_number(group: _Group | None = None) -> int:
    """The number of collectives that this rank has issued in `group`. torch up to 2.13 hides it for other backends."""
    return _backend(group)._get_sequence_number_for_group()


def pool_stats(group: _Group | None = None) -> dict[str, Any] | None:
    """Statistics of the GPU memory that `allocate_tensor` and `mem_allocator` allocate, in `group`.

    Returns a dict, or None if no kernels serve the group. `grown`: bytes in this rank's pool. `used`: bytes of it that
    torch holds. `mapped`: for each rank, bytes of its pool that this rank's kernels can reach. `direct`: pieces that
    were sent or received without staging.
    """
    return _load().pool_stats(_backend(group))


def _backend(group):
    """The nvx backend of a group, of the default group if None; also under the wrapper that
    TORCH_DISTRIBUTED_DEBUG=DETAIL adds."""
    import torch.distributed as dist

    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("nvx: there is no default group: call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("nvx: this rank is not in that group (torch's NON_GROUP_MEMBER), or it is not a group")
    backends = [group._get_backend(device) for device in group._device_types]
    backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]
    return next((backend for backend in backends if backend.name() == "nvx"), backends[0])


def explain(collective: str, nbytes: int, ranks: int, hosts: int = 1) -> str:
    """Describes which algorithm nvx would choose for `nbytes` per rank, and why. Ranks are spread evenly over hosts."""
    return _load().explain(collective, nbytes, ranks, hosts)


def __getattr__(name: str) -> Any:
    if name == "ProcessGroup":
        return _load().ProcessGroupNVX
    if name == "Options":
        return _load().ProcessGroupNVX.Options
    if name in ("ArgumentError", "ArgumentTypeError"):
        return getattr(_load(), name)
    if name == "torchft":
        return importlib.import_module("nvx.torchft")
    raise AttributeError(f"module 'nvx' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


def _torch_calls():
    """Whether this process is a command of nvx, and `import torch`, if it comes to that, will call `_autoload`."""
    on = "torch" not in sys.modules and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    on = on and os.path.basename((sys.argv or [""])[0]) in ("nvx", "-m")  # "-m": python -m nvx
    return on and any(one.value == "nvx:_autoload" for one in importlib.metadata.entry_points(group="torch.backends"))


atexit.register(lambda: getattr(sys.modules.get("nvx._C"), "_stop", int)())  # after the handlers of the program

# Registers the backend, also without an entry point, as in a source tree on PYTHONPATH. Commands without torch start
# at once. Last, because importing torch here may run an entry point against this incomplete module.
if not _torch_calls():
    _autoload()
