"""GPU tests by nvx's kernels and through host memory: `pytest -m gpu`. They are skipped without a GPU.

`NVX_TEST_MODULE` names another torch module of nvx; `NVX_TEST_FIGURES` names a file for the figures of the cases."""

import nvx
import pytest
import torch
import torch.distributed as dist
from gpu.parts import EXPANDABLE, PARTS, RELAY, STAGED, VISIBLE
from gpu.rank import Rank
from ranks import on_gpus, one_host, only_nvx

pytestmark = [one_host, only_nvx, pytest.mark.timeout(300)]


def with_kernels():
    return bool(nvx._load().build_info()["cuda"])


def run(case, kernels=True):
    """Returns the figures of the case. The test is void if another path served the group."""
    here = Rank(torch.device("cuda", torch.cuda.current_device()))
    if with_kernels() != kernels:
        return [{"left_out_part": "this build", "why": f"it has {'no ' if kernels else ''}kernels for CUDA tensors"}]
    case(here)
    here.synchronize()
    dist.all_reduce(torch.ones(1, device=here.device))
    assert (nvx.pool_stats() is not None) == kernels, "CUDA tensors went through host memory: NVX_DEBUG=info shows why"
    return here.reported


def of(cases):
    return pytest.mark.parametrize("name", cases)


def of_parts(ranks):
    found = [(part, name) for part, (world, cases) in PARTS.items() if world == ranks for name in cases]
    return pytest.mark.parametrize(("part", "name"), found)


@of_parts(2)
@on_gpus(2, limit=240)
def test_two_ranks(rank, world, part, name):
    return run(PARTS[part][1][name])


@of_parts(3)
@on_gpus(3, limit=120)
def test_three_ranks(rank, world, part, name):
    return run(PARTS[part][1][name])


@of_parts(4)
@on_gpus(4, limit=120)
def test_four_ranks(rank, world, part, name):
    return run(PARTS[part][1][name])


@of(EXPANDABLE)
@on_gpus(2, pool="gpus_expandable", limit=120)
def test_expandable_segments(rank, world, name):
    return run(EXPANDABLE[name])


@of(VISIBLE)
@on_gpus(2, pool="gpus_visible", limit=120)
def test_orders_of_visible_devices(rank, world, name):
    return run(VISIBLE[name])


@of(STAGED)
@on_gpus(2, limit=120)
def test_staged(rank, world, name):
    return run(STAGED[name], kernels=False)


@of(RELAY)
@on_gpus(4, pool="gpus_of_two_hosts", limit=120)
def test_between_hosts(rank, world, name):
    network = nvx._load().network()
    if not network["link"]:
        return [{"left_out_part": "between hosts", "why": network["none"]}]
    here = Rank(torch.device("cuda", torch.cuda.current_device()))
    RELAY[name](here)
    return here.reported
