"""A fake accelerator: device "fakegpu", with its own streams, events, pinned memory and device memory.

It replaces CUDA for code that uses only torch's device-generic interface, and exposes races that a real device shows
rarely: every stream is a thread that runs its tasks in order, each after a random delay; freed memory is poisoned in
the order of the stream that allocated it; a host access to device memory raises SIGSEGV.

The import has no effect. `load()` registers the device with torch for the life of the process. torch then takes it for
the process's accelerator, so its tests need processes of their own.
"""

import atexit
import contextlib
import ctypes

import torch

from . import build as _build
from . import device as _device

NAME = "fakegpu"
POISON = 0xA5  # every byte of memory that was not written since its allocation or free

_loaded = False


def build():
    """Compiles the library unless it is cached, and returns its path. Call it before many processes load the library at
    once."""
    return _build.library()


shared_library = _build.shared_library


def load():
    """Registers the device with torch. A second call does nothing."""
    global _loaded
    if _loaded:
        return
    torch.ops.load_library(str(build()))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device)
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(drain, 2000)
    _loaded = True


def set_delays(seed, most_us):
    """Delays each task of a stream by up to `most_us` microseconds; 0: no delay. Default: 50."""
    torch.ops.fake_device.set_delays(seed, most_us)


def set_copy_rate(bytes_per_second):
    """Limits copies between host and device to this bandwidth; 0: no limit. Each stream has the full bandwidth, so
    copies in both directions overlap."""
    torch.ops.fake_device.set_copy_rate(float(bytes_per_second))


def set_queue_depth(most):
    """Limits the pending tasks of a stream: a launch blocks while the stream is full. 0: no limit."""
    torch.ops.fake_device.set_queue_depth(most)


def renew():
    """Restores the speed and the queue depth that `load()` sets."""
    set_delays(1, 50)
    set_copy_rate(0)
    set_queue_depth(0)


def slow_fill(tensor, value, ms):
    """Enqueues on the current stream: sleep for `ms` milliseconds, then fill the tensor."""
    torch.ops.fake_device.slow_fill(tensor, value, ms)


def peek(tensor):
    """Returns the current contents of the tensor's memory as a CPU tensor. Waits for nothing and changes no counter."""
    return torch.ops.fake_device.peek(tensor)


def is_poison(tensor):
    """Whether the whole tensor, of the device or of the CPU, is poison now."""
    now = tensor.detach() if tensor.device.type == "cpu" else peek(tensor.detach())
    return bool((now.contiguous().flatten().view(torch.uint8) == POISON).all())


@contextlib.contextmanager
def held(stream=None):
    """Holds back work enqueued on the stream (default: the current one) until the end of the block."""
    number = torch.ops.fake_device.hold(stream or torch.accelerator.current_stream())
    try:
        yield
    finally:
        torch.ops.fake_device.release(number)


@contextlib.contextmanager
def launches_block(block=True):
    """Inside the block, a launch returns when its kernel has ended, as with CUDA_LAUNCH_BLOCKING."""
    blocks = ctypes.c_int.in_dll(ctypes.CDLL(str(build())), "fake_device_launches_block")
    blocks.value = block
    try:
        yield
    finally:
        blocks.value = False


@contextlib.contextmanager
def _on(switch):
    """Calls switch(True), and switch(False) at the end of the block."""
    switch(True)
    try:
        yield
    finally:
        switch(False)


def queries_fail():
    """Makes event queries fail inside the block, like on a device on which a kernel has failed."""
    return _on(torch.ops.fake_device.fail_queries)


def records_fail():
    """Makes torch's records of events fail inside the block."""
    return _on(torch.ops.fake_device.fail_records)


RULES = ("event_waits", "recorded_use", "capture_mode", "current_stream")  # `rules.h` describes each


def broken(rule):
    """Breaks this guarantee of the device inside the block: a test of code that relies on it must fail."""
    return _on(lambda on: torch.ops.fake_device.break_rule(RULES.index(rule), on))


class Graph:
    """A captured graph."""

    def __init__(self, number):
        self._number = number

    def replay(self, stream=None):
        """Enqueues the graph on the stream (default: the current one)."""
        torch.ops.fake_device.replay(self._number, stream or torch.accelerator.current_stream())

    def nodes(self):
        """The nodes of each captured stream, in order: "work", and "wait" and "record" for events outside the graph."""
        return torch.ops.fake_device.graph_nodes(self._number)


MODES = ("global", "thread_local", "relaxed")  # of captures and of threads, with CUDA's meaning


@contextlib.contextmanager
def capture(stream=None, mode="global"):
    """Captures the work that the stream (default: a new one) receives inside the block, and makes it the current stream
    there. The mode selects the threads that may not query events and streams, nor wait for them, during the capture."""
    stream = stream or torch.Stream(NAME)
    with stream:
        number = torch.ops.fake_device.begin_capture(stream, MODES.index(mode))
        try:
            yield Graph(number)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                torch.ops.fake_device.end_capture(number, stream)
            raise
        torch.ops.fake_device.end_capture(number, stream)


@contextlib.contextmanager
def thread_mode(mode):
    """Sets the capture mode of this thread inside the block; it is "global" at first."""
    before = torch.ops.fake_device.exchange_capture_mode(MODES.index(mode))
    try:
        yield
    finally:
        torch.ops.fake_device.exchange_capture_mode(before)


def counts():
    """Returns the counters since the last reset: stream_syncs, event_syncs and device_syncs (the host waited),
    stream_waits (a stream was made to wait for an event), data_recorded (record_stream), device_allocations,
    pinned_allocations, pinned_bytes (allocated), fallbacks (operators that ran on the CPU, each with a stream_sync or
    more), capture_faults (calls that CUDA forbids during a capture), unreused_frees (blocks freed in a capture while a
    recorded stream of it uses them), launches (of kernels that other libraries simulate; a capture counts once, its
    replays do not count), events_made, event_records (on streams), and devices_chosen (by guards, a bit each)."""
    return dict(torch.ops.fake_device.counts())


def reset_counts():
    torch.ops.fake_device.reset_counts()


def drain(most_ms=10_000):
    """Waits until all streams of all devices are idle, poisoning included. Returns false on a timeout."""
    return torch.ops.fake_device.drain(most_ms)
