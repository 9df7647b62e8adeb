"""Kernels of ranks on two hosts, whose GPUs are in one NVLink domain: all ranks are one group of kernels. The tests of
`test_device.py` apply. A host is a name (`NVX_HOST_ID`), and memory passes between processes by fabric handles."""

import ctypes
import os
import signal
import time

import pytest
import simulated
import test_device
import torch
import torch.distributed as dist
from fake_device import held, set_delays
from ranks import on_domain_gpus, only_nvx, stderr_lines, sync, until_it_fails
from simulated import domain
from test_device import GPU, MODES, assert_all, on_gpu

pytestmark = only_nvx
DEVICE = test_device
LARGE = 1_000_001

test_every_collective = MODES(on_domain_gpus(2, 4)(DEVICE.test_every_collective.body))
test_messages = on_domain_gpus(3)(DEVICE.test_messages.body)
test_groups = on_domain_gpus(2)(DEVICE.test_groups_and_objects.body)
test_ddp = on_domain_gpus(2)(DEVICE.test_ddp.body)  # of two ranks the CPU has the same bits over two hosts


def routes(group=None):
    """The names of the calls in the profile of one all_reduce."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tensor = on_gpu(1)
        dist.all_reduce(tensor, group=group)
        assert_all(tensor, dist.get_world_size(group))
    return {event.name for event in profile.events() if event.name.startswith("nvx:")}


def raises_within(seconds, match, call):
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=match):
        until_it_fails(call, 3 * seconds)
    assert time.monotonic() - began < seconds


@on_domain_gpus(4)
def test_kernels_of_all_ranks_run_it(rank, world):
    assert "nvx:by_kernels:reduce_packets" in routes()
    tensor = on_gpu(rank + 1, LARGE)
    expected = torch.full((LARGE,), rank + 1.0)
    dist.all_reduce(tensor)
    dist.all_reduce(expected)
    assert torch.equal(tensor.cpu(), expected)


@on_domain_gpus(4)
def test_another_clique_is_another_domain(rank, world):
    os.environ["FAKE_FABRIC"] = "7 3" if rank == 2 else domain.FABRIC
    try:
        assert "nvx:host_proxy" in routes(dist.new_group())
    finally:
        os.environ["FAKE_FABRIC"] = domain.FABRIC
    assert "nvx:by_kernels:reduce_packets" in routes(dist.new_group())


@on_domain_gpus(4)
def test_a_rank_that_cannot_export_takes_all_back_to_host_memory(rank, world):
    """Its host has no kernels then either, so that no host has any."""
    driver = ctypes.CDLL(str(simulated.BUILT / "libnvx_fake_cuda.so"))
    driver.fake_refuse(b"export of a fabric handle" if rank == 1 else b"")
    try:
        with stderr_lines() as lines:
            taken = routes(dist.new_group())
        output = "\n".join(lines)
        assert "nvx:through_host_memory" in taken, taken
        assert rank > 1 or "go through host memory between hosts, though the GPUs are in one NVLink domain" in output, (
            output
        )
        assert rank > 1 or "rank 1: " in output, output
    finally:
        driver.fake_refuse(b"")
    assert "nvx:by_kernels:reduce_packets" in routes(dist.new_group())


@on_domain_gpus(4, op_timeout=60, dies={3})
def test_a_rank_of_another_host_that_dies_is_named(rank, world):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    sync("ready")
    if rank == 3:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    raises_within(10, "rank 3", work.wait)
    torch.accelerator.synchronize()  # waits for the end of the kernel


@on_domain_gpus(2, op_timeout=2)
def test_a_rank_of_another_host_that_does_not_come_is_named(rank, world):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    if rank == 1:
        time.sleep(4)
        return
    work = dist.all_reduce(tensor, async_op=True)
    raises_within(10, "rank 1", work.wait)


@on_domain_gpus(4, op_timeout=60)
def test_an_abort_ends_the_kernels_of_the_other_host(rank, world):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    work = dist.all_reduce(tensor, async_op=True) if rank != 0 else None
    sync("called")
    if rank == 0:
        dist.group.WORLD.abort()
    else:
        raises_within(10, "rank 0", work.wait)
        torch.accelerator.synchronize()
    sync("all have ended")


@on_domain_gpus(4, op_timeout=60, dies={1, 3})
def test_ranks_that_are_done_may_leave(rank, world):
    """The ranks of the other host have sent their parts and end, while the root waits for the last one."""
    parts = [torch.empty(100, device=GPU) for _ in range(world)] if rank == 0 else None
    dist.gather(on_gpu(rank, 100), parts)
    sync("ready")
    if rank == 2:
        time.sleep(3)
    dist.gather(on_gpu(rank, 100), parts)
    torch.accelerator.synchronize()
    if rank in (1, 3):
        dist.destroy_process_group()
        os._exit(0)
    if rank == 0:
        for peer, part in enumerate(parts):
            assert_all(part, peer)


@on_domain_gpus(2)
def test_the_host_runs_ahead(rank, world):
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor)
    set_delays(rank, 300)
    with held():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
    work.wait()
    assert_all(tensor, 6)
