"""A group made with `device_id` opens that device at once: kernels are simulated on it."""

import ctypes
import time
from datetime import timedelta

import fake_device
import nvx
import pytest
import simulated
import torch
import torch.distributed as dist
from fake_device import counts, reset_counts
from ranks import on_simulated_gpus, stderr_lines
from test_device import GPU, assert_all, on_gpu
from test_device_groups import test_a_handler_that_calls_into_the_set_up_of_a_device_gets_an_error as handler_test

test_a_handler_that_calls_into_the_set_up_of_kernels_gets_an_error = on_simulated_gpus(2)(handler_test.body)


def device_groups(rank, which, index=0, **more):
    """A group of which some ranks receive the device."""
    device = torch.device(GPU, index) if rank in which else None
    return dist.new_group(backend=f"{GPU}:nvx", device_id=device, **more)


@on_simulated_gpus(2)
def test_a_device_id_opens_the_device_when_the_group_is_made(rank, world):
    group = device_groups(rank, (0, 1))
    assert nvx.pool_stats(group) is not None, "kernels serve it before anything is called"
    tensor = on_gpu(rank + 1)
    reset_counts()
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    found = counts()
    assert found["device_allocations"] == found["pinned_allocations"] == 0, found
    assert_all(tensor, 3)
    without = dist.new_group(backend=f"{GPU}:nvx")
    assert nvx.pool_stats(without) is None


@on_simulated_gpus(2, op_timeout=8)
def test_a_device_id_on_some_ranks_only_blocks_no_rank(rank, world):
    group = device_groups(rank, (0,), timeout=timedelta(seconds=8))
    assert nvx.pool_stats(group) is None
    host = torch.full((4,), rank + 1.0)
    dist.all_reduce(host)
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor, group=group)
    assert_all(tensor, 3)
    assert nvx.pool_stats(group) is not None


@on_simulated_gpus(2, op_timeout=8)
def test_late_rank_opens_the_device_as_the_others_do(rank, world):
    group = device_groups(rank, (), timeout=timedelta(seconds=8))
    device = torch.device(GPU, 0)
    if rank == 1:
        time.sleep(3)  # the other ranks wait a quarter of the timeout
    began = time.monotonic()
    group._get_backend(device).eager_connect_single_device(device)
    assert rank == 0 or time.monotonic() - began < 1
    dist.barrier()
    assert nvx.pool_stats(group) is None
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor, group=group)
    assert_all(tensor, 3)


@on_simulated_gpus(2)
def test_an_invalid_device_id_is_an_error_on_all_ranks_when_the_group_is_made(rank, world):
    message = "device_id is .*99, and this process sees" if rank == 0 else "rank 0 .*failed: device_id is .*99"
    with pytest.raises(nvx.ArgumentError if rank == 0 else dist.DistBackendError, match=message):
        device_groups(rank, (0, 1), index=99 if rank == 0 else 0)


@on_simulated_gpus(2)
def test_the_first_operation_may_be_captured(rank, world):
    """A graph waits for the group's last launch, of which there is none."""
    group = device_groups(rank, (0, 1))
    tensor = on_gpu(rank + 1)
    with fake_device.capture() as graph:
        dist.all_reduce(tensor, group=group)
    for total in (3, 6):
        graph.replay()
        assert_all(tensor, total)


@on_simulated_gpus(2, fresh=True)
def test_a_driver_that_pins_no_memory_is_one_warning(rank, world):
    """As where a GPU computes confidentially: nvx's route through host memory needs no such memory. Processes keep what
    they have pinned, so these are new ones."""
    driver = ctypes.CDLL(str(simulated.BUILT / "libnvx_fake_cuda.so"))
    driver.fake_refuse(b"cuMemHostRegister")
    try:
        with stderr_lines() as lines:
            for _ in range(2):
                group = dist.new_group(backend=f"{GPU}:nvx")
                tensor = on_gpu(rank + 1)
                dist.all_reduce(tensor, group=group)
                assert_all(tensor, 3)
                assert nvx.pool_stats(group) is None
        warnings = [line for line in lines if "go through host memory" in line]
        assert len(warnings) == (rank == 0), lines
        assert all("cuMemHostRegister on GPU 0" in line for line in warnings), lines
    finally:
        driver.fake_refuse(b"")


@on_simulated_gpus(2)
def test_kernels_slower_than_a_millisecond_on_one_rank_are_used_only_if_forced(rank, world):
    """As where processes take turns on a GPU."""
    takes = ctypes.c_int.in_dll(ctypes.CDLL(str(fake_device.build())), "fake_device_trials_take_ms")
    takes.value = 3 if rank == 1 else 0
    try:
        for kernels, served in (("auto", False), ("1", True)):
            with stderr_lines() as lines:
                group = dist.new_group(backend=f"{GPU}:nvx", pg_options=nvx.Options(kernels=kernels))
                tensor = on_gpu(rank + 1)
                dist.all_reduce(tensor, group=group)
                assert_all(tensor, 3)
                assert (nvx.pool_stats(group) is not None) == served
            warnings = [line for line in lines if "a small operation by nvx's kernels takes" in line]
            assert len(warnings) == (rank == 0 and not served), lines
            assert all("go through host memory" in line and "NVX_KERNELS=1" in line for line in warnings), lines
    finally:
        takes.value = 0
