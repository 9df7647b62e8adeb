"""The order of nvx's kernels on several streams, and what it costs: threads simulate them on `fake_device`."""

import ctypes
import threading
import time

import fake_nccl
import nvx
import pytest
import simulated
import torch
import torch.distributed as dist
from fake_device import counts, records_fail, reset_counts, set_delays, slow_fill
from ranks import make_backend, on_fake_gpus, on_proxied_gpus, on_simulated_gpus, sync, until_it_fails
from test_device import GPU, assert_all, finish, on_gpu


@on_simulated_gpus(2)
def test_no_event_without_need(rank, world):
    """Each launch has an event behind it. An asynchronous call has two more: where it begins, and where it ends."""
    tensor, side = on_gpu(rank + 1), torch.Stream(GPU)

    def on_side():
        with side:
            dist.all_reduce(tensor)

    calls = {  # by call: launches, events made, records and waits of streams
        lambda: dist.all_reduce(tensor): [1, 0, 1, 0],
        lambda: dist.all_reduce(tensor, async_op=True): [1, 0, 3, 1],
        lambda: dist.all_reduce(tensor, async_op=True).wait(): [1, 0, 3, 2],
        on_side: [1, 0, 1, 0],
    }
    for call, wanted in calls.items():
        call()
        torch.accelerator.synchronize()
        reset_counts()
        for _ in range(5):
            call()
        seen = [counts()[what] / 5 for what in ("launches", "events_made", "event_records", "stream_waits")]
        assert seen == wanted


@on_proxied_gpus(4)
def test_a_host_without_kernels_costs_the_others_no_context_on_another_device(rank, world):
    driver = ctypes.CDLL(str(simulated.BUILT / "libnvx_fake_cuda.so"))
    driver.fake_refuse(b"cuMemcpyAsync" if rank % 2 else b"")  # the odd ranks are on one host
    try:
        with torch.accelerator.device_index(1):
            reset_counts()
            tensor = on_gpu(rank + 1)
            dist.all_reduce(tensor, group=dist.new_group(backend=f"{GPU}:nvx"))
            assert_all(tensor, 10)
            assert counts()["devices_chosen"] == 1 << 1
    finally:
        driver.fake_refuse(b"")


@on_simulated_gpus(2)
def test_a_thread_without_a_device_may_call(rank, world):
    """CUDA would create a context on the first device."""
    with torch.accelerator.device_index(1):
        tensor, got = on_gpu(rank + 1), on_gpu(0)
        dist.all_reduce(tensor)
        torch.accelerator.synchronize()

    def calls():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        for work in (dist.isend(tensor, 1 - rank), dist.irecv(got, 1 - rank)):
            work.wait()

    reset_counts()
    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert counts()["stray_calls"] == 0
    with torch.accelerator.device_index(1):
        torch.accelerator.synchronize()
        assert_all(got, 12)


@on_simulated_gpus(2)
def test_calls_on_several_streams_keep_their_order(rank, world):
    set_delays(9, 1000)
    streams = [torch.Stream(GPU) for _ in range(3)]
    tensors = [on_gpu(rank + i) for i in range(6)]
    torch.accelerator.synchronize()
    for i, tensor in enumerate(tensors):
        with streams[i % 3]:
            finish(dist.all_reduce(tensor, async_op=i % 2 == 0), i % 2 == 0)
    torch.accelerator.synchronize()
    for i, tensor in enumerate(tensors):
        assert_all(tensor, 2 * i + 1)


@on_simulated_gpus(2)
def test_a_stream_waits_for_no_kernel_of_another_group(rank, world):
    """Rank 0's side stream waits for the first group's last kernel, and not for the second group's kernel, which rank 1
    calls only afterwards."""
    one, two, side = dist.new_group(), dist.new_group(), torch.Stream(GPU)
    first, second, other = on_gpu(rank + 1), on_gpu(rank + 1), on_gpu(rank + 1)
    dist.all_reduce(other, group=one)
    dist.all_reduce(other, group=two)
    torch.accelerator.synchronize()
    dist.all_reduce(first, group=one)
    if rank == 0:
        dist.all_reduce(other, group=two)
    with side:
        dist.all_reduce(second, group=one)
    if rank == 1:
        torch.accelerator.current_stream().wait_stream(side)
        dist.all_reduce(other, group=two)
    torch.accelerator.synchronize()
    assert_all(first, 3)
    assert_all(second, 3)
    assert_all(other, 12)


@on_simulated_gpus(2)
def test_destroying_a_group_does_not_wait_for_later_work(rank, world):
    group, tensor = dist.new_group(), on_gpu(rank + 1)
    dist.all_reduce(tensor, group=group)
    assert_all(tensor, 3)
    slow_fill(tensor, 1, 1500)
    began = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - began < 1.2


@on_fake_gpus(2, pool="simulated_nccl_gpus")
def test_several_groups_run_beside_each_other_and_beside_nccl(rank, world):
    """Each group has a stream, on which kernels serve its small calls and NCCL its large ones."""
    set_delays(5, 500)
    groups = [dist.new_group() for _ in range(3)]
    streams = [torch.Stream(GPU) for _ in groups]
    tensors = [(on_gpu(rank + 1, 10), on_gpu(rank + 1, 5000)) for _ in groups]
    torch.accelerator.synchronize()
    nccl_before = len(fake_nccl.made)
    for turn in range(4):
        for group, stream, both in zip(groups, streams, tensors, strict=True):
            with stream:
                for tensor in both[:: 1 if turn % 2 else -1]:
                    finish(dist.all_reduce(tensor, group=group, async_op=turn > 1), turn > 1)
    torch.accelerator.synchronize()
    for both in tensors:
        for tensor in both:
            assert_all(tensor, 3 * 2**3)
    assert [nccl.calls()["allreduce"] for nccl in fake_nccl.made[nccl_before:]] == [4, 4, 4]
    assert all(nvx.pool_stats(group) is not None for group in groups), "kernels serve the small calls"


@pytest.mark.parametrize("timed", [False, True])
@on_simulated_gpus(2)
def test_a_postponed_call_fails_if_its_end_cannot_be_recorded(rank, world, timed):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    if timed:
        dist.group.WORLD._enable_collectives_timing()
    if rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device(GPU))
        backend._start_coalescing()
        work = backend.allreduce([tensor], dist.AllreduceOptions())
        with records_fail():
            backend._end_coalescing()
        with pytest.raises(dist.DistBackendError, match="an illegal memory access"):
            work.wait()
        assert not timed or work._get_duration() > 0
    with pytest.raises(dist.DistBackendError, match="an illegal memory access"):
        until_it_fails(lambda: dist.all_reduce(tensor))


@on_simulated_gpus(2)
def test_a_dropped_group_leaves_with_a_window_open(rank, world):
    group = make_backend(dist.PrefixStore("bare", dist.distributed_c10d._get_default_store()), rank, world)
    group.allreduce([on_gpu(1)], dist.AllreduceOptions()).wait()
    torch.accelerator.synchronize()
    sync("both have")
    if rank == 0:
        group._start_coalescing()
        group.allreduce([on_gpu(1)], dist.AllreduceOptions())
        del group
    else:
        with pytest.raises(dist.DistBackendError, match="left"):
            until_it_fails(lambda: group.allreduce([torch.ones(4)], dist.AllreduceOptions()).wait(), 10)
    sync("rank 0 has left")
