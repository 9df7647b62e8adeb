"""Removes skip conditions of tests that are not about communication.

It replaces decorators in `common_distributed`, so it must run before the import of the test module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed as common

from tests.conformance.place import Place


def _keep(function):
    return function


def world_size() -> None:
    """Torch skips the subgroup tests below 8 ranks. They work with 4."""
    common.skip_if_small_worldsize = _keep


def needs_gpu(test: Callable) -> bool:
    """Whether the test had a skip condition that gpu() removed."""
    return getattr(test, "asked_for_gpu", False)


def _keep_and_note(function):
    function.asked_for_gpu = True  # decorators of the function copy this attribute
    return function


def gpu(place: Place) -> None:
    """Tests that request CUDA tensors run with tensors of `place`."""
    common.skip_if_no_gpu = _keep_and_note
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common, name, lambda *_args, **_kwargs: _keep_and_note)
    common.init_multigpu_helper = lambda world, _backend: {rank: [rank % place.count] for rank in range(world)}
    if place.kind == "cpu":
        common.init_multigpu_helper = lambda world, _backend: {rank: [rank] for rank in range(world)}
    torch.cuda.nccl.version = lambda: (2, 99, 0)  # torch's logger calls it if the backend's name is nccl
    _tensors(place)
    _modules(place)
    _streams(place)
    Elsewhere(place).__enter__()


def _tensors(place: Place) -> None:
    to = torch.Tensor.to

    def cuda(self, device=None, non_blocking=False, **_kwargs):
        if place.kind == "cpu":
            return self.clone()
        return to(self, place.here("cuda" if device is None else device), non_blocking=non_blocking)

    torch.Tensor.cuda = cuda


def _modules(place: Place) -> None:
    module_to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: module_to(self, *map(place.here, args), **kwargs)
    if place.kind == "cpu":
        torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    else:
        torch.nn.Module.cuda = lambda self, device="cuda": module_to(self, place.here(device))
    ddp = torch.nn.parallel.DistributedDataParallel
    init = ddp.__init__

    @functools.wraps(init)
    def init_here(self, *args, **kwargs):
        ids, output = kwargs.pop("device_ids", None), kwargs.pop("output_device", None)
        if place.kind == "cuda":  # DDP refuses device ids for a CPU module, and supports only CUDA's
            kwargs["device_ids"] = None if ids is None else [place.here(one) for one in ids]
            kwargs["output_device"] = place.here(output)
        init(self, *args, **kwargs)

    ddp.__init__ = init_here


def _streams(place: Place) -> None:
    if place.kind == "cpu":
        torch.cuda.set_device = torch.cuda.synchronize = lambda *_args, **_kwargs: None
        torch.cuda.current_device = lambda: 0
        torch.cuda.device = lambda *_args, **_kwargs: contextlib.nullcontext()
        return
    torch.cuda.set_device = lambda device: torch.accelerator.set_device_index(place.here(device))
    torch.cuda.synchronize = lambda device=None: torch.accelerator.synchronize(place.here(device))
    torch.cuda.current_device = torch.accelerator.current_device_index
    torch.cuda.device = lambda device: torch.accelerator.device_index(_index(place.here(device)))


def _index(device: torch.device) -> int:
    return torch.accelerator.current_device_index() if device.index is None else device.index


class Elsewhere(TorchFunctionMode):
    """Reads `device=0`, `device="cuda"` and `.to(0)` as `place`."""

    def __init__(self, place: Place):
        super().__init__()
        self.place = place

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = self.place.here(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], self.place.here(args[1]), *args[2:])
        return func(*args, **kwargs)
