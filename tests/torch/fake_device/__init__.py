"""An accelerator that is none: device "fakegpu", with streams, events, pinned memory and memory of its own.

It stands for CUDA wherever code asks for no more than torch's device-generic interface, and shows what a real device
shows only now and then: every stream is a thread that carries out its tasks in order, each after a random delay; freed
memory is poisoned in the order of the stream on which it was allocated; a host that touches device memory is killed.

Nothing happens at import. `load()` makes torch know the device, for the life of the process; as torch then takes it
for the process's accelerator, give tests of it processes of their own.
"""

import atexit
import contextlib

import torch

from . import build as _build
from . import device as _device

NAME = "fakegpu"
POISON = 0xA5  # every byte of memory that nobody has written since it was handed out or freed

_loaded = False


def build():
    """Compiles the library if need be, and gives its path. Worth a call before many processes load it at once."""
    return _build.library()


shared_library = _build.shared_library


def load():
    """Makes torch know the device. A second call does nothing."""
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
    """From now on each task of a stream waits before it runs for up to so many microseconds; 0 is none. Default: 50."""
    torch.ops.fake_device.set_delays(seed, most_us)


def set_copy_rate(bytes_per_second):
    """From now on a copy between host and device takes as long as a bus of this bandwidth would; 0: as memory has it.
    Both directions at once, as each stream's copies are its own."""
    torch.ops.fake_device.set_copy_rate(float(bytes_per_second))


def set_queue_depth(most):
    """From now on a stream takes no more tasks than this at a time: who gives it another one waits. 0: any number."""
    torch.ops.fake_device.set_queue_depth(most)


def renew():
    """The device is as fast again as load() leaves it."""
    set_delays(1, 50)
    set_copy_rate(0)
    set_queue_depth(0)


def slow_fill(tensor, value, ms):
    """Enqueues on the current stream: sleep so many milliseconds, then fill the tensor."""
    torch.ops.fake_device.slow_fill(tensor, value, ms)


def peek(tensor):
    """What is in the tensor's memory at this moment, as a CPU tensor: waits for nothing, counts as nothing."""
    return torch.ops.fake_device.peek(tensor)


def is_poison(tensor):
    """Whether all of the tensor is poison at this moment; of a CPU tensor, too."""
    now = tensor.detach() if tensor.device.type == "cpu" else peek(tensor.detach())
    return bool((now.contiguous().flatten().view(torch.uint8) == POISON).all())


@contextlib.contextmanager
def held(stream=None):
    """What is enqueued on the stream (default: the current one) inside the block runs after the block."""
    number = torch.ops.fake_device.hold(stream or torch.accelerator.current_stream())
    try:
        yield
    finally:
        torch.ops.fake_device.let_go(number)


@contextlib.contextmanager
def questions_fail():
    """Inside the block the device answers no questions for events, as one on which a kernel has failed."""
    torch.ops.fake_device.fail_questions(True)
    try:
        yield
    finally:
        torch.ops.fake_device.fail_questions(False)


RULES = ("event_waits", "recorded_use", "capture_mode", "current_stream")  # what each promises: rules.h


@contextlib.contextmanager
def broken(rule):
    """Inside the block the device does not keep this promise: a test of who relies on it must fail."""
    torch.ops.fake_device.break_rule(RULES.index(rule), True)
    try:
        yield
    finally:
        torch.ops.fake_device.break_rule(RULES.index(rule), False)


class Graph:
    """What was captured, to be replayed."""

    def __init__(self, number):
        self._number = number

    def replay(self, stream=None):
        """Enqueues all of it on the stream (default: the current one)."""
        torch.ops.fake_device.replay(self._number, stream or torch.accelerator.current_stream())


MODES = ("global", "thread_local", "relaxed")  # of captures and of threads, as CUDA has them


@contextlib.contextmanager
def capture(stream=None, mode="global"):
    """What the stream (default: a new one) is given inside the block, where it is the current one, runs at replays. The
    mode says which threads may not ask for events and streams meanwhile, nor wait for them."""
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
    """How strict captures of others are to this thread inside the block; it begins as "global"."""
    before = torch.ops.fake_device.exchange_capture_mode(MODES.index(mode))
    try:
        yield
    finally:
        torch.ops.fake_device.exchange_capture_mode(before)


def counts():
    """How often since the last reset: stream_syncs, event_syncs and device_syncs (the host waited), stream_waits (a
    stream was told to wait for an event), data_recorded (record_stream), device_allocations, pinned_allocations,
    pinned_bytes (allocated), fallbacks (operators that ran on the CPU, each with a stream_sync or more),
    capture_faults (what CUDA forbids while a graph is captured), unreused_frees (memory let go of in a capture that a
    recorded stream of it uses), and launches (of kernels that others play; in a capture once, whatever is replayed)."""
    return dict(torch.ops.fake_device.counts())


def reset_counts():
    torch.ops.fake_device.reset_counts()


def drain(most_ms=10_000):
    """Waits until no stream of any device has anything to do, poisoning included; whether that was so in time."""
    return torch.ops.fake_device.drain(most_ms)
