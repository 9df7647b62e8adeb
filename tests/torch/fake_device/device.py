"""`torch.fakegpu`: the device module that torch's generic code expects."""

import contextlib
import ctypes
import time
import types

import torch

Stream = torch.Stream
Event = torch.Event


def is_available():
    return True


def is_initialized():
    return True


def init():
    pass


def _lazy_init():
    pass


def _is_in_bad_fork():
    return False


def device_count():
    return torch.ops.fake_device.device_count()


def current_device():
    return torch.accelerator.current_device_index()


def set_device(device):
    torch.accelerator.set_device_index(device)


def current_stream(device=None):
    return torch.accelerator.current_stream(device)


def set_stream(stream):
    torch.accelerator.set_stream(stream)


def stream(stream):
    """A context in which the stream is the current one."""
    return stream


def synchronize(device=None):
    torch.accelerator.synchronize(device)


def device(device):
    """A context in which the device is the current one."""
    return torch.accelerator.device_index(device if isinstance(device, int) else torch.device(device).index)


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


# Random operators run on the CPU with the CPU's generator: the device has no random state.


def manual_seed(seed):
    pass


def manual_seed_all(seed):
    pass


def get_rng_state(device=None):
    return torch.empty(0, dtype=torch.uint8)


def set_rng_state(new_state, device=None):
    pass


# Memory from pluggable allocators, with the interface of `torch.cuda`.


class CUDAPluggableAllocator:
    def __init__(self, path_to_so_file, alloc_fn_name, free_fn_name):
        library = ctypes.CDLL(path_to_so_file)
        functions = (getattr(library, alloc_fn_name), getattr(library, free_fn_name))
        self._allocator = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]

    def allocator(self):
        return self._allocator


memory = types.SimpleNamespace(CUDAPluggableAllocator=CUDAPluggableAllocator)


class MemPool:
    """A pool on the current device."""

    def __init__(self, allocator):
        self.number = torch.ops.fake_device.new_pool(current_device(), *allocator)

    def empty(self):
        """Returns unused blocks, like `torch.cuda.empty_cache()` does for all pools."""
        torch.ops.fake_device.empty_pool(self.number)


_in_use = set()  # pools; torch's allocator lets one thread at a time record to a pool


@contextlib.contextmanager
def use_mem_pool(pool, device=None):
    if pool.number in _in_use:
        raise RuntimeError(f"already recording to mempool_id {pool.number}")
    _in_use.add(pool.number)
    before = torch.ops.fake_device.exchange_pool(pool.number)
    try:
        time.sleep(0.0005)  # lets other threads run, which is possible while torch allocates
        yield
    finally:
        torch.ops.fake_device.exchange_pool(before)
        _in_use.discard(pool.number)
