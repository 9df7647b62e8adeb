"""`torch.distributed._symmetric_memory` over nvx on a device: memory of its pool, signals by a kernel."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from fake_device import counts, launches_block, reset_counts
from ranks import on_simulated_gpus, sync

GPU = "fakegpu"


def shared(count, dtype=torch.float32):
    tensor = symm_mem.empty(count, dtype=dtype, device=GPU)
    return tensor, symm_mem.rendezvous(tensor, dist.group.WORLD)


@on_simulated_gpus(2, 3)
def test_ranks_read_each_others_buffers_behind_a_barrier(rank, world):
    assert symm_mem.get_backend(GPU) == "NVX"
    for turn in range(3):
        tensor, handle = shared(1000)
        assert (handle.rank, handle.world_size, handle.multicast_ptr) == (rank, world, 0)
        assert handle.buffer_ptrs[rank] == tensor.data_ptr()
        tensor.fill_(10 * turn + rank)
        handle.barrier()
        for peer in range(world):
            theirs = handle.get_buffer(peer, (1000,), torch.float32)
            assert torch.equal(theirs.cpu(), torch.full((1000,), 10.0 * turn + peer))
        handle.barrier(channel=1)
        assert not handle.get_signal_pad(rank, dtype=torch.int32).cpu().any()


@on_simulated_gpus(2)
def test_the_stream_waits_for_a_signal_and_the_host_does_not(rank, world):
    """Rank 1 puts only after rank 0's call has returned."""
    tensor, handle = shared(100)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        handle.wait_signal(1)
        store.set("returned", "")
        assert torch.equal(tensor.cpu(), torch.full((100,), 5.0))
    else:
        store.wait(["returned"])
        handle.get_buffer(0, (100,), torch.float32).fill_(5)
        handle.put_signal(0)
    handle.barrier()


@on_simulated_gpus(2)
def test_signals_are_watched_and_memory_returns_on_their_device(rank, world):
    """A thread of nvx watches the signals, and any thread may drop the memory. On a thread without a device, CUDA would
    create a context on the first one."""
    with torch.accelerator.device_index(1):
        held = [*shared(100)]
        reset_counts()
        if rank == 0:
            time.sleep(0.3)
        held[1].barrier()
        torch.accelerator.synchronize()
    time.sleep(0.3)
    drops = threading.Thread(target=held.clear)
    drops.start()
    drops.join()
    seen = counts()
    assert seen["device_syncs"] == 2 and seen["stray_calls"] == 0, seen


@on_simulated_gpus(1)
def test_a_rank_alone_signals_itself(rank, world):
    """On two streams, which do not wait for each other: the put comes behind the wait."""
    tensor, handle = shared(100)
    side, two = torch.Stream(GPU), torch.full((100,), 2.0, device=GPU)
    torch.accelerator.synchronize()
    with side:
        handle.wait_signal(0, channel=3)
        tensor.copy_(two)
    tensor.fill_(1)
    handle.put_signal(0, channel=3)
    torch.accelerator.synchronize()
    assert torch.equal(tensor.cpu(), two.cpu())
    handle.barrier()


@on_simulated_gpus(2)
def test_channels_on_several_streams_are_independent(rank, world):
    """Each rank first waits on one stream, and then puts on another one."""
    _, handle = shared(1)
    side = torch.Stream(GPU)
    torch.accelerator.synchronize()
    for channel in range(5):
        with side:
            handle.wait_signal(1 - rank, channel=channel)
        handle.put_signal(1 - rank, channel=channel)
    torch.accelerator.synchronize()
    assert not handle.get_signal_pad(rank, dtype=torch.int32).cpu().any()


@on_simulated_gpus(2)
def test_a_signal_that_does_not_come_fails_the_group(rank, world):
    _, handle = shared(1)
    with pytest.raises(dist.DistBackendError, match="timed out in a symm_mem barrier or signal|rank 0"):
        if rank == 0:
            handle.wait_signal(1, timeout_ms=300)
        for _ in range(400):
            time.sleep(0.05)
            dist.all_reduce(torch.ones(1, device=GPU))


@pytest.mark.parametrize("block", [False, True], ids=["", "CUDA_LAUNCH_BLOCKING"])
@on_simulated_gpus(3, op_timeout=60, dies=[1])
def test_a_rank_that_dies_ends_the_waits_of_the_others(rank, world, block):
    _, handle = shared(1)
    handle.barrier()
    torch.accelerator.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)  # until nobody watches the first barrier
    began = time.monotonic()
    with launches_block(block), pytest.raises(dist.DistBackendError, match="rank 1"):
        handle.barrier()
        torch.accelerator.synchronize()
        handle.barrier()
    assert time.monotonic() - began < 20


@on_simulated_gpus(3, op_timeout=60, dies=[1])
def test_a_death_is_noticed_while_another_group_launches(rank, world):
    """Behind a signal that waits, the launch blocks, and the driver answers no query."""
    group, x = dist.new_group([0, 2]), torch.ones(1, device=GPU)
    if rank != 1:
        dist.all_reduce(x, group=group)
    _, handle = shared(1)
    handle.barrier()
    torch.accelerator.synchronize()
    sync("ready")
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    handle.barrier()
    began = time.monotonic()
    with launches_block():
        dist.all_reduce(x, group=group)
    assert time.monotonic() - began < 20
    assert x.item() == 4


@on_simulated_gpus(2)
def test_memory_returns_and_is_used_again(rank, world):
    places = set()
    for _ in range(8):
        tensor, handle = shared(200_000)
        places.add(tensor.data_ptr())
        handle.barrier()
        del tensor, handle
        dist.barrier()
    assert len(places) < 8
