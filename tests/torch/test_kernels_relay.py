"""Large all-reduces of a device's tensors over two hosts, where kernels sum inside each: the bits are those of the CPU,
only a rank's part passes through host memory, and what test_device_chunks.py asks of large operations holds."""

import os
import time

import pytest
import test_device_chunks
import torch
import torch.distributed as dist
from fake_device import counts, held, peek, reset_counts, set_copy_rate, set_delays
from ranks import BACKEND, meet, on_relayed_gpus, only_nvx
from test_device_chunks import CHUNK, GPU, MODES, both, finish, values

pytestmark = only_nvx
CHUNKS = test_device_chunks
PART = 2 * 504 << 10  # of a rank in a slice, between two hosts, as csrc/group/plan.cc has it
SLOTS = 7  # as csrc/group/relay.h has it

test_order_of_streams = on_relayed_gpus(4)(CHUNKS.test_the_order_of_the_callers_streams_is_kept.body)
test_several_at_once = on_relayed_gpus(4)(CHUNKS.test_several_at_once.body)
test_one_operation = MODES(on_relayed_gpus(4)(CHUNKS.test_it_is_one_operation.body))


def launches_of(call):
    torch.accelerator.synchronize()
    reset_counts()
    finish(call())
    return counts()["launches"]


@MODES
@on_relayed_gpus(4, 5)
def test_the_bits_are_those_of_the_cpu(rank, world, asynchronous):
    """Five ranks: three on one host, two on the other, and so a rank that carries nothing between hosts."""
    set_delays(rank, 300)

    def reduce_all(op):
        def call(tensor):
            finish(dist.all_reduce(tensor, op, async_op=asynchronous))
            return [tensor]

        return call

    for count in (CHUNK // 4 + 1, 3_333_333):
        both(reduce_all(dist.ReduceOp.SUM), values(rank, count))
    both(reduce_all(dist.ReduceOp.AVG), values(rank, CHUNK, torch.bfloat16))
    both(reduce_all(dist.ReduceOp.MAX), values(rank, CHUNK, torch.int64))
    both(reduce_all(dist._make_nccl_premul_sum(0.3)), values(rank, CHUNK))
    both(reduce_all(dist.ReduceOp.BXOR), values(rank, CHUNK + 3, torch.int16) * 4)


@on_relayed_gpus(4)
def test_kernels_do_it(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    dist.all_reduce(tensor)
    slices = -(-4 * CHUNK // (2 * PART))
    assert launches_of(lambda: dist.all_reduce(tensor)) == 2 * slices
    small = torch.ones(CHUNK // 4, device=GPU)
    assert launches_of(lambda: dist.all_reduce(small)) == 0


@on_relayed_gpus(3)
def test_a_host_with_one_rank_has_no_use_for_them(rank, world):
    tensor = torch.full((CHUNK,), rank + 1.0).to(GPU)
    assert launches_of(lambda: dist.all_reduce(tensor)) == 0
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), 6.0))


@on_relayed_gpus(4)
def test_host_memory_holds_parts_only(rank, world):
    """And nobody waits for the device but by looking at events."""
    tensor = torch.ones(16 << 20, device=GPU)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    dist.barrier()
    reset_counts()
    dist.all_reduce(tensor)
    seen = counts()
    assert seen["pinned_bytes"] <= SLOTS * (PART + 64), seen
    assert seen["stream_syncs"] == seen["event_syncs"] == seen["device_syncs"] == seen["device_allocations"] == 0
    assert torch.equal(tensor.cpu(), torch.full((16 << 20,), 16.0))


@MODES
@on_relayed_gpus(4)
def test_tensors_that_are_not_contiguous(rank, world, asynchronous):
    set_delays(rank, 2000)

    def call(like):
        tensor = values(rank, 2_400_000).to(like.device).view(-1, 2).t()
        finish(dist.all_reduce(tensor, async_op=asynchronous))
        return [tensor]

    both(call, torch.empty(0))


@on_relayed_gpus(4)
def test_the_caller_goes_on_at_once(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    dist.all_reduce(tensor)
    with held():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
    work.wait()
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), 16.0))


@on_relayed_gpus(4)
def test_it_keeps_its_turn_among_others(rank, world):
    """All of them on the group's streams; what comes next reads what this one wrote."""
    set_delays(rank, 500)
    tensor, whole = torch.full((CHUNK,), rank + 1.0).to(GPU), torch.empty(4 * CHUNK, device=GPU)
    works = [
        dist.all_reduce(tensor, async_op=True),
        dist.all_gather_into_tensor(whole, tensor, async_op=True),
        dist.all_reduce(whole, async_op=True),
        dist.broadcast(tensor, 1, async_op=True),
    ]
    for work in works:
        work.wait()
    assert torch.equal(whole.cpu(), torch.full((4 * CHUNK,), 40.0))
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), 10.0))


@on_relayed_gpus(4)
def test_two_groups_at_once(rank, world):
    set_delays(rank, 300)
    other = dist.new_group(backend=f"cpu:{BACKEND},fakegpu:{BACKEND}")
    mine, theirs = values(rank, CHUNK).to(GPU), values(rank + 9, CHUNK).to(GPU)
    want = [mine.cpu(), theirs.cpu()]
    for tensor in want:
        dist.all_reduce(tensor)
    works = [dist.all_reduce(mine, async_op=True), dist.all_reduce(theirs, group=other, async_op=True)]
    for work in works:
        work.wait()
    assert torch.equal(mine.cpu(), want[0]) and torch.equal(theirs.cpu(), want[1])
    dist.destroy_process_group(other)


@MODES
@on_relayed_gpus(4)
def test_a_mismatch_is_told_of_the_whole(rank, world, asynchronous):
    """Before any kernel has begun: a kernel would wait for ranks that never come."""
    count = [CHUNK, CHUNK, CHUNK, CHUNK + 1][rank]
    tensor = torch.full((count,), 7.0).to(GPU)
    both_calls = r"all_reduce\(sum, f32, 419430[45] elements\).*, f32, 419430[45] elements"
    with pytest.raises(dist.DistBackendError, match=both_calls):
        finish(dist.all_reduce(tensor, async_op=asynchronous))
    assert torch.equal(tensor.cpu(), torch.full((count,), 7.0))


@on_relayed_gpus(4, op_timeout=2)
def test_a_rank_that_does_not_come_is_named(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    dist.all_reduce(tensor)
    if rank == 3:
        time.sleep(4)
        return
    with pytest.raises(dist.DistBackendError, match="rank 3"):
        dist.all_reduce(tensor)


@on_relayed_gpus(4, op_timeout=20, dies={3})
def test_a_rank_that_dies_in_the_middle_is_named(rank, world):
    tensor = torch.ones(16 * CHUNK // 4, device=GPU)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    meet("ready")
    set_copy_rate(CHUNK / 0.3)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 3:
        while peek(tensor)[0] == 4:
            time.sleep(0.01)
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 3"):
        work.wait()
    assert time.monotonic() - began < 10


@on_relayed_gpus(4)
def test_the_profiler_says_so(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(tensor)
    names = {event.name for event in seen.events()}
    assert "nvx:by_kernels_and_host_memory" in names, names
