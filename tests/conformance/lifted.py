"""Takes away gates that a test has for another reason than what it communicates.

All of it works by replacing decorators in `common_distributed`, so it must run before the test
module is imported.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed as common


def _keep(function):
    return function


def _keep_whatever(*_args, **_kwargs):
    return _keep


def world_size() -> None:
    """Torch skips the subgroup tests below 8 ranks: a habit of its machines, 4 ranks do."""
    common.skip_if_small_worldsize = _keep


def gpu() -> None:
    """Tests that move data run on CPU tensors where they ask for CUDA ones."""
    common.skip_if_no_gpu = _keep
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, _keep_whatever)
    common.init_multigpu_helper = lambda world, _backend: {rank: [rank] for rank in range(world)}
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self.clone()
    torch.cuda.set_device = torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.nccl.version = lambda: (2, 99, 0)  # torch's logger asks where the name is nccl
    module_to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: module_to(self, *map(_here, args), **kwargs)
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    _ddp_without_devices()
    torch.cuda.device = lambda *_args, **_kwargs: contextlib.nullcontext()
    OnCpu().__enter__()


def _ddp_without_devices() -> None:
    """DDP refuses device ids for a module that lives on the CPU."""
    ddp = torch.nn.parallel.DistributedDataParallel
    init = ddp.__init__

    @functools.wraps(init)
    def on_cpu(self, *args, **kwargs):
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        init(self, *args, **kwargs)

    ddp.__init__ = on_cpu


def _here(device):
    """`device`, or the CPU where it is a GPU's number or name."""
    if isinstance(device, bool) or device is None:
        return device
    asks_gpu = isinstance(device, int) or (
        isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
    )
    return torch.device("cpu") if asks_gpu else device


class OnCpu(TorchFunctionMode):
    """Reads `device=0`, `device="cuda"` and `.to(0)` as the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _here(args[1]), *args[2:])
        return func(*args, **kwargs)
