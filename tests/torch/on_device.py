"""Runs tests of CPU tensors on an accelerator: the bodies are unchanged and use another `torch.distributed`.

Each call copies the storages of its tensors to the accelerator. Tensors keep their offsets, strides and shared
storages. After the call the results are copied back to the CPU.
"""

import functools
import sys
from unittest import mock

import torch
import torch.distributed as dist

GPU = "fakegpu"


class Stay:
    """The storages of one call, on the CPU and on the device."""

    moved_ever = 0  # counts all moves of this process

    def __init__(self):
        self.pairs = {}

    def moved(self, thing):
        if isinstance(thing, (list, tuple)):
            return type(thing)(self.moved(one) for one in thing)
        return self.view(thing) if isinstance(thing, torch.Tensor) and thing.is_cpu else thing

    def view(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.pairs:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.pairs[storage.data_ptr()] = here, here.to(GPU)
            Stay.moved_ever += 1
        _, there = self.pairs[storage.data_ptr()]
        return there.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def bring_back(self):
        for here, there in self.pairs.values():
            here.copy_(there)


class Works:
    """The handle of an asynchronous call; `wait()` copies the results to the CPU."""

    def __init__(self, work, stay):
        self.work, self.stay = work, stay

    def wait(self, *given):
        done = self.work.wait(*given)
        self.stay.bring_back()
        return done


class Distributed:
    """`torch.distributed` with collectives on an accelerator."""

    CALLS = (
        *("all_reduce", "reduce", "broadcast", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "scatter", "all_to_all"),
        *("all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced"),
    )
    OTHERS = (
        *("ReduceOp", "DebugLevel", "set_debug_level", "new_group", "destroy_process_group", "barrier"),
        *("_make_nccl_premul_sum", "isend", "irecv", "monitored_barrier"),
    )

    def __getattr__(self, name):
        assert name in (*self.CALLS, *self.OTHERS), f"is dist.{name} a call that has tensors?"
        call = getattr(dist, name)
        return functools.partial(self.there, call) if name in self.CALLS else call

    @staticmethod
    def there(call, *given, **named):
        stay = Stay()
        work = call(*stay.moved(given), **{name: stay.moved(value) for name, value in named.items()})
        if work is not None:
            return Works(work, stay)
        stay.bring_back()
        return None


def there(test, module, name):
    """The body of a test of CPU tensors, for `on_fake_gpus` and similar, as `name` of another module."""
    body = test.body
    home = sys.modules[body.__module__]

    def run(rank, world):
        before = Stay.moved_ever
        with mock.patch.object(home, "dist", Distributed()):
            body(rank, world)
        assert Stay.moved_ever > before, "the accelerator was not used"

    run.__name__, run.__qualname__, run.__module__, run.__doc__ = name, name, module, body.__doc__
    return run


def most_ranks(test):
    """Three, or the number of ranks that the test supports."""
    (worlds,) = [mark.args[1] for mark in test.pytestmark if mark.args[:1] == ("world",)]
    each = (world.values[0] if hasattr(world, "values") else world for world in worlds)  # pytest.param(), or a number
    return max(world for world in each if world <= 3)


def ask_all(tests, module, on):
    """The tests for a module's namespace: "test_moves_every_dtype" is `test_every_dtype` of the module `test_moves`.
    `on`: `on_fake_gpus` or similar."""
    found = {}
    for test in tests:
        name = f"{test.body.__module__}_{test.body.__name__.removeprefix('test_')}"
        made = on(most_ranks(test), limit=120)(there(test, module, name))
        made.pytestmark += [mark for mark in test.pytestmark if mark.name != "parametrize"]
        found[name] = made
    return found
