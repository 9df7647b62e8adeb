"""nvx: a torch.distributed backend.

`import torch` is enough to have it: torch calls `_autoload` through an entry point, and `init_process_group("nvx")`
works. Nothing here loads C++ or starts a thread before a group is made, and an error never breaks `import torch`.
"""

import copy
import importlib
import os
import sys
import warnings

from ._version import __version__

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Options",
    "explain",
    "monitored_barrier",
    "pool_stats",
    "sequence_number",
    "set_timeout",
    "__version__",
]


def _build_facts():
    """What the build wrote down: an object with TORCH, TORCH_FULL and CUDA, or None where nothing was built."""
    try:
        return importlib.import_module("nvx._built")
    except ImportError:
        return None


def obstacle():
    """One sentence that says why the C++ module cannot serve this torch, or None."""
    import torch

    built = _build_facts()
    if built is None:
        return (
            f"nvx {__version__} has no compiled module: build it with `pip install --no-build-isolation .`"
            " in its source directory."
        )
    if built.TORCH != ".".join(torch.__version__.split(".")[:2]):
        return (
            f"nvx {__version__} was built for torch {built.TORCH} and cannot serve torch {torch.__version__}:"
            " build it again with `pip install --no-build-isolation --force-reinstall --no-deps .`"
            " in its source directory."
        )
    return None


def _load():
    """The C++ module; loaded when the first group is made."""
    loaded = sys.modules.get("nvx._C")
    if loaded is not None:
        return loaded
    why_not = obstacle()
    if why_not is not None:
        raise RuntimeError(why_not)
    from . import _C

    return _C


def _check_timeout(timeout):
    """Zero is no timeout, and so is what torch makes of timedelta.max, which is far below zero."""
    import datetime

    if datetime.timedelta(days=-1_000_000) < timeout < datetime.timedelta(0):
        raise _load().ArgumentError(f"nvx: a timeout of {timeout.total_seconds():g} s is negative")


def _options(given, group):
    """The user's options, completed with what torch knows of the group; another backend's give their timeout."""
    options_class = _load().ProcessGroupNVX.Options
    if given is None:
        options = options_class(timeout=group.timeout)
    elif isinstance(given, options_class):
        options = copy.copy(given)  # the caller may make several groups with one object
        if options._timeout == options_class()._timeout:  # nobody has set it
            options._timeout = group.timeout
    else:
        timeout = getattr(given, "_timeout", None)
        used = "nothing" if timeout is None else "only the timeout"
        warnings.warn(
            f"nvx takes nvx.Options as pg_options; of {type(given).__name__} {used} is used.",
            stacklevel=4,
        )
        options = options_class(timeout=group.timeout if timeout is None else timeout)
    _check_timeout(options._timeout)
    options.group_name = group.group_id
    options.global_ranks_in_group = list(group.global_ranks_in_group)
    return options


def _create(group, pg_options):
    """What torch calls to make a group: `group` is a c10d DistributedBackendOptions."""
    options = _options(pg_options, group)
    wanted = (getattr(asked, "enable_reconfigure", False) for asked in (group, pg_options))  # from torch 2.15 on
    kind = _load().Reconfigurable if any(wanted) else _load().ProcessGroupNVX
    return kind(group.store, group.group_rank, group.group_size, options)


def _devices():
    """The types of device whose tensors nvx serves here. Asks nothing that would set CUDA up, which takes long and must
    not be done before a fork; with "cuda" where there is no GPU, torch would take it for what objects are sent on."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    has_gpu = any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/dxg"))
    return ["cpu", "cuda"] if torch.version.cuda and visible and has_gpu else ["cpu"]


def _register():
    """Makes "nvx" a name torch knows, and says whether it was new. Idempotent."""
    import torch.distributed as dist

    if not dist.is_available() or "NVX" in dist.Backend._plugins:
        return False
    dist.Backend.register_backend("nvx", _create, extended_api=True, devices=_devices())
    return True


def _autoload():
    """What torch calls at the end of `import torch`. Quick, idempotent, and never raises."""
    try:
        why_not = obstacle() if _register() else None
        if why_not is not None:
            warnings.warn(why_not, RuntimeWarning, stacklevel=2)
    except Exception as error:  # an exception here would break `import torch` for the whole environment
        warnings.warn(f"nvx could not register itself: {error}", RuntimeWarning, stacklevel=2)


def set_timeout(timeout, group=None):
    """Sets the timeout (a timedelta; zero: none) of the nvx part of `group`, or of the default group.

    torch's own `_set_pg_timeout` ignores backends it does not know the name of, up to 2.13.
    """
    import datetime

    import torch.distributed as dist

    if not isinstance(timeout, datetime.timedelta):
        raise TypeError(f"nvx.set_timeout: timeout must be a datetime.timedelta, not {type(timeout).__name__}")
    _check_timeout(timeout)
    _load().set_timeout(_backend(group if group is not None else dist.group.WORLD), timeout)


def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
    """`torch.distributed.monitored_barrier` for groups that are not named gloo, which torch refuses up to 2.13."""
    import torch.distributed as dist

    group = group if group is not None else dist.group.WORLD
    backend = _backend(group)
    group.monitored_barrier(timeout if timeout is not None else backend.options._timeout, wait_all_ranks)


def sequence_number(group=None):
    """How many collectives this rank has issued in `group`; torch up to 2.13 tells it of its own backends only."""
    import torch.distributed as dist

    return _backend(group if group is not None else dist.group.WORLD)._get_sequence_number_for_group()


def pool_stats(group=None):
    """What has become of the GPU memory that `allocate_tensor` and `mem_allocator` hand out, in `group`.

    A dict, or None where no kernels serve the group. `grown`: bytes of this rank's pool; `used`: those that torch has
    of it; `mapped`: bytes of each rank's pool that this one's kernels reach; `direct`: pieces that they have sent or
    got without staging.
    """
    import torch.distributed as dist

    return _load().pool_stats(_backend(group if group is not None else dist.group.WORLD))


def _backend(group):
    """The nvx part of a group, also where TORCH_DISTRIBUTED_DEBUG=DETAIL has put a wrapper round it."""
    import torch.distributed as dist

    if group is None:
        raise ValueError("nvx: there is no default group: call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("nvx: this rank is not in that group (torch's NON_GROUP_MEMBER), or it is none")
    backends = [group._get_backend(device) for device in group._device_types]
    backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]
    return next((backend for backend in backends if backend.name() == "nvx"), backends[0])


def explain(collective, nbytes, ranks, hosts=1):
    """What nvx would run for this many bytes a rank, on so many ranks spread evenly over so many hosts, and why."""
    return _load().explain(collective, nbytes, ranks, hosts)


def __getattr__(name):
    if name == "Options":
        return _load().ProcessGroupNVX.Options
    if name in ("ArgumentError", "ArgumentTypeError"):
        return getattr(_load(), name)
    raise AttributeError(f"module 'nvx' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})


# Registers where no entry point does: a source tree on PYTHONPATH, or TORCH_DEVICE_BACKEND_AUTOLOAD=0. It comes last,
# as importing torch from here runs the entry point against this half-made module.
_autoload()
