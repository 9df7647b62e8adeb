"""Tuned values: the same bits for all of them on one host, and options that ranks must share."""

import copy
import importlib
import os
import pathlib
import tempfile

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, on_two_hosts, only_nvx


def nvx_options(**given):
    return importlib.import_module("nvx._C").ProcessGroupNVX.Options(**given)


LIMITED = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast")


def limits(size):
    return {f"{collective}.one_shot": size for collective in LIMITED}


ON_CPU = [
    {},
    limits(0) | {"lease": "256K"},
    limits("64K") | {"lease": "1M", "past_caches": 0},
    limits("4K") | {"lease": "8M", "past_caches": 1 << 40, "send.lease": "256K"},
]
ON_GPU = [
    {},
    {"kernels.one_shot": 0, "kernels.piece": 0, "kernels.blocks": 3, "kernels.chunk": "1K"},
    {"kernels.one_shot": 0, "kernels.two_shot": 0, "kernels.blocks": 2, "kernels.pad": "512K"},
    {"kernels.one_shot": "1G", "kernels.packets": 64, "kernels.blocks": 1, "kernels.chunk": "64K"},
]


def random(count, dtype, seed, device):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return values.to(dtype).to(device)


def results(group, count, dtype, device):
    """The bytes of every collective's result. The sums depend on the order of their terms."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = random(count * world, dtype, 10 * count + rank, device)
    summed, reduced, sent = mine.clone(), mine.clone(), mine.clone()
    part, parts = mine[:count].clone(), torch.empty_like(mine)
    dist.all_reduce(summed, group=group)
    dist.reduce(reduced, 0, group=group)
    dist.broadcast(sent, 1, group=group)
    dist.all_gather_into_tensor(parts, part, group=group)
    dist.reduce_scatter_tensor(part, mine, group=group)
    kept = [summed, sent, parts, part, *([reduced] if rank == 0 else [])]
    return [tensor.cpu().view(torch.uint8) for tensor in kept]


def same_bits(settings, counts, device):
    expected = {}
    for tune in settings:
        group = dist.new_group(pg_options=nvx_options(tune=tune))
        for count in counts:
            for dtype in (torch.float32, torch.bfloat16):
                found = results(group, count, dtype, device)
                for one, other in zip(found, expected.setdefault((count, dtype), found), strict=True):
                    assert torch.equal(one, other), (tune, count, dtype)
        dist.destroy_process_group(group)


@only_nvx
@on_ranks(2, 3)
def test_every_setting_gives_the_same_bits(rank, world):
    same_bits(ON_CPU, (1, 1000, 5000, 12345, 300_001), "cpu")


def settings_of_kernels_give_the_same_bits(rank, world):
    same_bits(ON_GPU, (1, 1000, 20_001), "fakegpu")
    group = dist.new_group(pg_options=nvx_options(tune=ON_GPU[2]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(8).to("fakegpu"), group=group)
    assert "nvx:by_kernels:reduce_chunks" in {event.name for event in profile.events()}


@only_nvx
@on_two_hosts(4)
def test_hosts_follow_it_too(rank, world):
    tune = {"slice": "64K", "all_reduce.fewest_steps": 0, "all_gather.packed": 0}
    group = dist.new_group(pg_options=nvx_options(tune=tune))
    for count in (2, 100_000):
        tensor = torch.full((count,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.full((count,), 6.0))
        parts = torch.empty(count * world)
        dist.all_gather_into_tensor(parts, torch.full((count,), float(rank)), group=group)
        assert torch.equal(parts, torch.arange(4.0).repeat_interleave(count))


@only_nvx
@on_ranks(2)
def test_options(rank, world):
    assert nvx_options().tune == ""
    options = nvx_options(tune={"lease": "1M", "all_reduce.one_shot": 8})
    assert options.tune == copy.copy(options).tune == "lease=1M,all_reduce.one_shot=8"
    assert repr(options).endswith("tune='lease=1M,all_reduce.one_shot=8')")
    for wrong, why in (
        ({"lease": "1K"}, r"tune=\.\.\.\): lease=1K is not a number from 262144 to 1073741824"),
        ("leese=1M", r'there is no key "leese" \(did you mean lease\?\). Next: `NVX_TUNE= nvx explain` lists the keys'),
        ("@/nowhere", "names /nowhere, which cannot be read"),
        ("@/dev/zero", "names /dev/zero, which cannot be read"),
    ):
        with pytest.raises(ValueError, match=why):
            options.tune = wrong
        with pytest.raises(ValueError, match=why):
            nvx_options(tune=wrong)
    for wrong, kind in ((5, "int"), (None, "NoneType"), (["lease=1M"], "list")):
        with pytest.raises(TypeError, match=rf"nvx\.Options\(tune=\.\.\.\) takes text or a dict, not {kind}$"):
            nvx_options(tune=wrong)
    assert options.tune == "lease=1M,all_reduce.one_shot=8"


@only_nvx
@on_ranks(2)
def test_files(rank, world):
    with tempfile.TemporaryDirectory() as folder:
        empty = pathlib.Path(folder, "empty.tune")
        empty.touch()
        assert nvx_options(tune=f"@{empty}").tune == f"@{empty}"
        with pytest.raises(ValueError, match="which cannot be read. Next: give the path of a file"):
            nvx_options(tune=f"@{folder}")
        os.truncate(empty, 2 << 20)
        with pytest.raises(ValueError, match="a file of at most 1 MiB"):
            nvx_options(tune=f"@{empty}")


@only_nvx
@on_ranks(2)
def test_ranks_must_agree(rank, world):
    spelled = ("lease=1M,slice=64K", {"slice": 65536, "lease": "1024K"})
    group = dist.new_group(pg_options=nvx_options(tune=spelled[rank]))
    dist.barrier(group)
    message = "differ in NVX_TUNE: rank 0 has lease=1048576, rank 1 has lease=2097152. Next: set the variable"
    with pytest.raises(dist.DistBackendError, match=message):
        dist.new_group(pg_options=nvx_options(tune={"lease": f"{rank + 1}M"}))
    with pytest.raises(dist.DistBackendError, match="differ in NVX_TUNE: rank 1 has slice=65536, rank 0 does not"):
        dist.new_group(pg_options=nvx_options(tune="slice=64K" if rank else ""))
