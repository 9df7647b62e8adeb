"""Lets the tests use one backend's name and get another.

`init_process_group` and `new_group` map the name on the way in, and `get_backend` maps it back. The layers below do
not change: the process group is of type CUSTOM as for any plugin, and the parts that torch itself builds from gloo
(such as the wrapper of the DETAIL debug level) stay gloo."""

from __future__ import annotations

import contextlib
import functools
import inspect

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# The name is the subject of these tests, so it is not aliased.
TRUTHFUL = {
    "test_ddp_logging_data_cpu": "where the name is gloo it reads the thread count of gloo itself",
}


class Alias:
    """The tests use the name `believed` and get `real`, for that name and for the names in `also`."""

    def __init__(self, believed: str, real: str, also: tuple[str, ...] = (), served: bool = False):
        self.believed, self.real = believed, real
        self.names = {believed, *also}
        self.served = served
        self.lying = believed != real and not served  # nvx maps a name that it serves itself

    @property
    def title(self) -> str:
        """The backend's name in the profiler's event names."""
        return self.real

    def inward(self, name):
        if not isinstance(name, str) or not self.lying:
            return name
        return ",".join(map(self._inward_one, name.lower().split(",")))

    def _inward_one(self, name: str) -> str:
        device, colon, backend = name.rpartition(":")
        return device + colon + (self.real if backend in self.names else backend)

    def outward(self, name):
        return dist.Backend(self.believed) if self.lying and name == self.real else name

    @contextlib.contextmanager
    def unaliased_in(self, test: str):
        was, self.lying = self.lying, self.lying and test not in TRUTHFUL
        try:
            yield
        finally:
            self.lying = was


def install(alias: Alias) -> None:
    """Patches this process's torch. Call it before the import of the test module."""
    for name in ("init_process_group", "new_group"):
        _export(name, _mapping_backend(getattr(c10d, name), alias))
    get_backend = c10d.get_backend

    @functools.wraps(get_backend)
    def backend_name(group=None):
        return alias.outward(get_backend(group))

    _export("get_backend", backend_name)
    if not alias.served:
        _name_plugin_in_ddp_log(alias)


def install_in(tests, alias: Alias) -> None:
    """Patches the imported test module: profiler titles carry the backend's real name."""
    find = tests.get_profiling_event

    @functools.wraps(find)
    def find_real(event_name, *args, **kwargs):
        head, colon, rest = event_name.partition(":")
        if not colon or head != alias.believed:
            return find(event_name, *args, **kwargs)
        events = find(f"{alias.title}:{rest}", *args, **kwargs)
        for event in events:  # some tests compare the name again
            event.name = event_name
        return events

    tests.get_profiling_event = find_real
    for supported in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(tests, supported).append(alias.real)


def _export(name, value) -> None:
    setattr(c10d, name, value)
    setattr(dist, name, value)


def _mapping_backend(function, alias: Alias):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def mapped(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        if "backend" in bound.arguments:
            bound.arguments["backend"] = alias.inward(bound.arguments["backend"])
        return function(*bound.args, **bound.kwargs)

    return mapped


def _name_plugin_in_ddp_log(alias: Alias) -> None:
    """DDP's log calls every plugin "custom", and the tests compare that with `get_backend`."""
    ddp = torch.nn.parallel.DistributedDataParallel
    read = ddp._get_ddp_logging_data

    @functools.wraps(read)
    def named(self):
        data = read(self)
        if data.get("backend_name") == "custom":
            data["backend_name"] = str(c10d.get_backend(self.process_group))
        return data

    ddp._get_ddp_logging_data = named
