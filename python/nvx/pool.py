"""Tensors in GPU memory that the other ranks of the host can map, so that nvx's kernels need no staging for them.

torch's caching allocator splits the blocks that nvx allocates, and reuses them in stream order.
"""

import ctypes
import functools
import threading

import torch

_lock = threading.Lock()
_pools = {}  # by device
_use_lock = threading.Lock()  # torch refuses to let two threads use a pool at once


@functools.cache
def _pluggable(kind):
    import nvx

    memory = torch.get_device_module(kind).memory
    return memory.CUDAPluggableAllocator(nvx._load().__file__, "nvx_pool_malloc", "nvx_pool_free")


def allocator(kind="cuda"):
    """An allocator for `torch.cuda.MemPool`. Keep the pool alive as long as its tensors."""
    return _pluggable(kind).allocator()


def _pool_of(device):
    """The device's pool. It lives as long as the process."""
    with _lock:
        if device not in _pools:
            module = torch.get_device_module(device.type)
            with module.device(device):
                pool = module.MemPool(allocator(device.type))
            # Tensors may be alive when the interpreter exits, and the pool must outlive them.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
            _pools[device] = pool
        return _pools[device]


def empty(size, dtype, device):
    """A tensor of `size` elements. Called by the C++ core."""
    module = torch.get_device_module(device.type)
    pool = _pool_of(device)
    with _use_lock, module.use_mem_pool(pool, device):
        return torch.empty(size, dtype=dtype, device=device)
