"""nvx.ProcessGroup without torch's registry, and the types that nvx declares."""

import concurrent.futures
import datetime
import inspect
import pathlib

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX

nvx = pytest.importorskip("nvx")
pytestmark = pytest.mark.skipif(not OVER_NVX, reason="it is nvx's own interface")


def test_a_group_of_one():
    options = nvx.Options(timeout=datetime.timedelta(seconds=7))
    group = nvx.ProcessGroup(dist.HashStore(), 0, 1, options)
    x = torch.arange(3.0)
    group.allreduce([x]).wait()
    assert (group.rank(), group.size(), group.name(), x.tolist()) == (0, 1, "nvx", [0.0, 1.0, 2.0])
    assert group.options.timeout.total_seconds() == 7
    assert isinstance(group, nvx.ProcessGroup) and isinstance(group, torch._C._distributed_c10d.Backend)
    group.shutdown()


@pytest.mark.parametrize("world", [2, 3])
def test_groups_over_one_store_behind_prefixes(world):
    store = dist.HashStore()

    def body(rank):
        totals = []
        for number in range(2):
            options = nvx.Options(timeout=datetime.timedelta(seconds=30))
            group = nvx.ProcessGroup(dist.PrefixStore(f"own/{number}", store), rank, world, options)
            x = torch.full((5,), float(rank))
            group.allreduce([x]).wait()
            totals.append(x.tolist())
            group.shutdown()
        return totals

    with concurrent.futures.ThreadPoolExecutor(world) as threads:
        for totals in threads.map(body, range(world)):
            assert totals == [[world * (world - 1) / 2] * 5] * 2


def test_the_options_of_other_groups_serve_again():
    store = dist.HashStore()

    def body(rank):
        options = nvx.Options(timeout=datetime.timedelta(seconds=30))
        options.group_name, options.global_ranks_in_group = "mine", [2 * rank, 2 * rank + 1, 7][: 2 + rank]
        group = nvx.ProcessGroup(store, rank, 2, options)
        x = torch.ones(5)
        group.allreduce([x]).wait()
        group.shutdown()
        return x.tolist(), group.options.group_name, group.options.global_ranks_in_group

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert list(threads.map(body, range(2))) == [([2.0] * 5, "mine", [])] * 2


def test_a_rank_that_has_another_world_size_is_named_by_those_that_wait():
    store, message = dist.HashStore(), r"\(pid \d+, host \S+\) was started with a world size of"
    nvx.ProcessGroup(store, 0, 1, _by_torch=True).shutdown()  # the group of the whole job
    short = nvx.Options(timeout=datetime.timedelta(seconds=0.3))
    with pytest.raises(dist.DistBackendError, match=f"rank 0 has not joined; rank 0 {message} 1; this is rank 1"):
        nvx.ProcessGroup(store, 1, 2, short)
    store = dist.HashStore()
    nvx.ProcessGroup(store, 0, 1, _by_torch=True).shutdown()
    with pytest.raises(dist.DistBackendError, match="rank 1 has not joined; this is rank 0"):
        nvx.ProcessGroup(store, 0, 2, short)  # it has joined a larger world since
    store = dist.HashStore()
    with pytest.raises(ValueError, match="cannot have rank 2 of 2"):
        nvx.ProcessGroup(store, 2, 2)
    with pytest.raises(dist.DistBackendError, match=f"rank 1 has not joined; rank 2 {message} 2; this is rank 0"):
        nvx.ProcessGroup(store, 0, 2, short)


def test_options_are_optional():
    group = nvx.ProcessGroup(dist.HashStore(), 0, 1)
    assert group.options.timeout.total_seconds() == 1800
    group.shutdown()


def test_the_stub_has_every_name_of_the_module():
    folder = pathlib.Path(nvx.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "_C.pyi").read_text()
    module = nvx._load()
    newer = {"Reconfigurable"}  # from torch 2.15 on
    names = [name for name in vars(module) if not name.startswith("_") and name not in newer]
    declared = [name for name in names if f"def {name}(" in stub or f"class {name}(" in stub or f"\n{name}: " in stub]
    internal = set(names) - set(declared)
    assert {"ProcessGroupNVX", "ArgumentError", "ArgumentTypeError", "explain", "set_timeout"} <= set(declared)
    assert internal <= {"gpu_topology", "network", "dma_bufs", "processor"}
    assert "def __getattr__(name: str) -> Any" in stub


def test_every_public_function_is_documented_and_typed():
    for name in nvx.__all__:
        value = getattr(nvx, name)
        if name == "__version__":
            continue
        if inspect.isfunction(value):
            assert value.__doc__ and value.__doc__.strip().endswith("."), name
            parameters = inspect.signature(value).parameters.values()
            assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters), name
