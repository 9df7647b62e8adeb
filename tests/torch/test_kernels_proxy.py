"""Collectives of device tensors over two hosts. Kernels reduce or distribute inside each host, or only copy a rank's
data. The bits equal those of CPU tensors, only a rank's part passes through host memory where data is reduced or
gathered, and no call blocks. The tests of `test_device_chunks.py` for large operations apply."""

import os
import re
import time
from datetime import timedelta

import pytest
import test_device_chunks
import test_device_uses
import torch
import torch.distributed as dist
from fake_device import counts, held, peek, reset_counts, set_delays, set_queue_depth
from ranks import BACKEND, on_proxied_gpus, only_nvx, stderr_lines, sync
from test_device_chunks import CHUNK, GPU, MODES, both, finish, values
from torch import nn
from training import WIDTH, assert_same_weights

pytestmark = only_nvx
CHUNKS = test_device_chunks
PART = 2 * 504 << 10  # of a rank in a slice between two hosts; the value in csrc/group/plan/plan.cc
BLOCK = 504 << 10  # of a block in a slice
ROUNDS, SLOTS = 7, 8  # the values in csrc/group/hierarchy/host_proxy.h

test_order_of_streams = on_proxied_gpus(4)(CHUNKS.test_the_order_of_the_callers_streams_is_kept.body)
test_several_at_once = on_proxied_gpus(4)(CHUNKS.test_several_at_once.body)
test_one_operation = MODES(on_proxied_gpus(4)(CHUNKS.test_it_is_one_operation.body))


def failure_of(call):
    """The host does not block: a later call raises the failure of the device or of the network."""
    with pytest.raises(dist.DistBackendError) as caught:
        work, end = call(), time.monotonic() + 30
        while time.monotonic() < end:
            work.wait() if work is not None else dist.barrier()
            time.sleep(0.01)
    return str(caught.value)


def rounds_of(slices, all_gathers):
    """One launch per round. With few slices all arrive before the first of them is copied back."""
    back = slices + (1 if all_gathers else 0)
    return ROUNDS + back if slices >= ROUNDS else slices + back


def launches_of(call):
    torch.accelerator.synchronize()
    reset_counts()
    finish(call())
    return counts()["launches"]


@MODES
@on_proxied_gpus(4, 5)
def test_the_bits_are_those_of_the_cpu(rank, world, asynchronous):
    """Three of five ranks are on one host and two on the other, so one rank has no peer between the hosts."""
    set_delays(rank, 300)

    def reduce_all(op):
        def call(tensor):
            finish(dist.all_reduce(tensor, op, async_op=asynchronous))
            return [tensor]

        return call

    for count in (1, 777, 20_001, 70_000, 3_333_333):
        both(reduce_all(dist.ReduceOp.SUM), values(rank, count))
        both(reduce_all(dist.ReduceOp.AVG), values(rank, count))
    both(reduce_all(dist.ReduceOp.AVG), values(rank, CHUNK, torch.bfloat16))
    both(reduce_all(dist.ReduceOp.MAX), values(rank, CHUNK, torch.int64))
    both(reduce_all(dist._make_nccl_premul_sum(0.3)), values(rank, CHUNK))
    both(reduce_all(dist.ReduceOp.BXOR), values(rank, CHUNK + 3, torch.int16) * 4)


@on_proxied_gpus(4)
def test_kernels_run_it(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    dist.all_reduce(tensor)
    slices = -(-4 * CHUNK // (2 * PART))
    assert launches_of(lambda: dist.all_reduce(tensor)) == rounds_of(slices, all_gathers=True)
    small = torch.ones(4, device=GPU)
    assert launches_of(lambda: dist.all_reduce(small)) == rounds_of(1, all_gathers=True)


@MODES
@on_proxied_gpus(2, 3)
def test_a_host_may_have_one_rank(rank, world, asynchronous):
    """No collective runs inside such a host. The traffic between hosts is the same, and the call does not block."""
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.3)):

        def reduce_all(tensor, op=op):
            finish(dist.all_reduce(tensor, op, async_op=asynchronous))
            return [tensor]

        both(reduce_all, values(rank, 3_333_333))
        both(scatter(op, asynchronous), values(rank, world * 1_333_333))
    both(gather(asynchronous), values(rank, 1_333_333))
    both(scatter(dist.ReduceOp.AVG, asynchronous), values(rank, world * CHUNK // 4, torch.bfloat16))
    tensor = torch.full((CHUNK,), rank + 1.0).to(GPU)
    assert launches_of(lambda: dist.all_reduce(tensor)) > 0


@on_proxied_gpus(2, 4)
def test_the_host_is_not_blocked(rank, world):
    """With a late peer, neither the call nor `wait()` blocks."""
    tensor = torch.full((CHUNK,), rank + 1.0).to(GPU)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    sync("all have opened their devices")
    if rank == world - 1:
        sync("the others go on")
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    if rank != world - 1:
        sync("the others go on")
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), world * (world + 1) / 2 * world**2))


@on_proxied_gpus(4)
def test_host_memory_holds_parts_only(rank, world):
    """The host waits for the device only by polling events."""
    tensor = torch.ones(16 << 20, device=GPU)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    dist.barrier()
    reset_counts()
    dist.all_reduce(tensor)
    seen = counts()
    assert seen["pinned_bytes"] <= SLOTS * (PART + 64) + 64, seen
    assert seen["stream_syncs"] == seen["event_syncs"] == seen["device_syncs"] == seen["device_allocations"] == 0
    assert torch.equal(tensor.cpu(), torch.full((16 << 20,), 16.0))


@MODES
@on_proxied_gpus(4)
def test_tensors_that_are_not_contiguous(rank, world, asynchronous):
    set_delays(rank, 2000)

    def call(like):
        tensor = values(rank, 2_400_000).to(like.device).view(-1, 2).t()
        finish(dist.all_reduce(tensor, async_op=asynchronous))
        return [tensor]

    both(call, torch.empty(0))


@on_proxied_gpus(4)
def test_the_caller_goes_on_at_once(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    dist.all_reduce(tensor)
    with held():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
    work.wait()
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), 16.0))


@on_proxied_gpus(4)
def test_calls_run_in_the_order_of_issue(rank, world):
    """All calls use the group's streams; each reads the result of the previous one."""
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


@on_proxied_gpus(4)
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
@on_proxied_gpus(4)
def test_a_mismatch_describes_the_whole_operation(rank, world, asynchronous):
    """The error comes before a kernel waits for a peer, which would never come."""
    count = [CHUNK, CHUNK, CHUNK, CHUNK + 1][rank]
    tensor = torch.full((count,), 7.0).to(GPU)
    text = failure_of(lambda: dist.all_reduce(tensor, async_op=asynchronous))
    assert re.search(r"all_reduce\(sum, f32, 419430[45] elements\).*, f32, 419430[45] elements", text), text
    torch.accelerator.synchronize()
    assert torch.equal(tensor.cpu(), torch.full((count,), 7.0))


@on_proxied_gpus(4, op_timeout=2)
def test_a_rank_that_does_not_come_is_named(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    dist.all_reduce(tensor)
    if rank == 3:
        time.sleep(4)
        return
    text = failure_of(lambda: dist.all_reduce(tensor))
    assert "rank 3" in text, text


@on_proxied_gpus(4, op_timeout=20, dies={3})
def test_a_rank_that_dies_in_the_middle_is_named(rank, world):
    tensor = torch.ones(16 * CHUNK // 4, device=GPU)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    sync("ready")
    set_delays(rank, 400_000)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 3:
        while peek(tensor)[0] == 4:
            time.sleep(0.01)
        os._exit(1)
    began = time.monotonic()
    text = failure_of(lambda: work)
    assert "rank 3" in text, text
    assert time.monotonic() - began < 10


@on_proxied_gpus(4)
def test_the_profiler_shows_the_route(rank, world):
    tensor = torch.ones(CHUNK, device=GPU)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(tensor)
    names = {event.name for event in seen.events()}
    assert "nvx:host_proxy" in names, names


def scatter(op, asynchronous=False):
    def call(tensor):
        part = torch.empty(tensor.numel() // dist.get_world_size(), dtype=tensor.dtype, device=tensor.device)
        finish(dist.reduce_scatter_tensor(part, tensor, op, async_op=asynchronous))
        return [part]

    return call


def gather(asynchronous=False):
    def call(tensor):
        whole = torch.empty(tensor.numel() * dist.get_world_size(), dtype=tensor.dtype, device=tensor.device)
        finish(dist.all_gather_into_tensor(whole, tensor, async_op=asynchronous))
        return [whole]

    return call


@MODES
@on_proxied_gpus(4, 5)
def test_the_bits_of_blocks_are_those_of_the_cpu(rank, world, asynchronous):
    """Five ranks are on hosts of three and two: their data goes through host memory."""
    set_delays(rank, 300)
    for count in (1, 333, 20_001, 1_333_333):
        both(scatter(dist.ReduceOp.SUM, asynchronous), values(rank, world * count))
        both(gather(asynchronous), values(rank, count))
    both(scatter(dist.ReduceOp.AVG, asynchronous), values(rank, world * CHUNK // 4, torch.bfloat16))
    both(scatter(dist.ReduceOp.MAX, asynchronous), values(rank, world * CHUNK // 4, torch.int64))
    both(scatter(dist._make_nccl_premul_sum(0.3), asynchronous), values(rank, world * CHUNK // 4))


# Without complex types, because the fake accelerator does not support their views:
# `tests/group/hierarchy/host_proxy_test.cc` covers them.
TYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
TYPES += ["bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("name", TYPES)
@on_proxied_gpus(4)
def test_every_type(rank, world, name):
    kind = getattr(torch, name)
    count = CHUNK // 4 // torch.empty(0, dtype=kind).element_size() + 4
    made = values(rank, world * count).clamp(-3, 3)
    tensor = (made > 1) if kind is torch.bool else (made * 10).abs().to(kind)

    def bits(call):
        return lambda tensor: [made.view(torch.uint8) for made in call(tensor)]

    assert launches_of(lambda: gather()(tensor[:count].to(GPU)) and None) > 0
    both(bits(gather()), tensor[:count])
    both(bits(scatter(dist.ReduceOp.SUM)), tensor)
    if kind is not torch.bool:
        both(bits(scatter(dist.ReduceOp.AVG)), tensor)


@on_proxied_gpus(4)
def test_averages_fit_where_sums_do_not(rank, world):
    tensor = torch.full((CHUNK,), 40_000.0, dtype=torch.float16).to(GPU)
    for call in (scatter(dist.ReduceOp.AVG), lambda tensor: [dist.all_reduce(tensor, dist.ReduceOp.AVG), tensor][1:]):
        (result,) = call(tensor)
        assert torch.equal(result.cpu(), torch.full((result.numel(),), 40_000.0, dtype=torch.float16))


@MODES
@on_proxied_gpus(4)
def test_lists_of_blocks_of_any_size(rank, world, asynchronous):
    set_delays(rank, 300)
    sizes = [10, 2_000_003, 0, 500_000]

    def gather_list(mine, *outputs):
        finish(dist.all_gather(list(outputs), mine, async_op=asynchronous))
        return outputs

    def scatter_list(mine, *inputs):
        finish(dist.reduce_scatter(mine, list(inputs), async_op=asynchronous))
        return [mine]

    both(gather_list, values(rank, sizes[rank]), *[torch.empty(size) for size in sizes])
    both(scatter_list, torch.empty(sizes[rank]), *[values(rank, size) for size in sizes])


@on_proxied_gpus(4)
def test_kernels_run_blocks(rank, world):
    """One launch per round for any number of hosts."""
    whole, part = torch.full((CHUNK,), rank + 1.0).to(GPU), torch.empty(CHUNK // world, device=GPU)
    dist.reduce_scatter_tensor(part, whole)
    slices = -(-CHUNK * 4 // world // BLOCK)
    assert launches_of(lambda: dist.reduce_scatter_tensor(part, whole)) == rounds_of(slices, all_gathers=False)
    assert launches_of(lambda: dist.all_gather_into_tensor(whole, part)) == rounds_of(slices, all_gathers=True)
    assert torch.equal(whole.cpu(), torch.full((CHUNK,), 10.0))
    small = torch.ones(world, device=GPU)
    assert launches_of(lambda: dist.reduce_scatter_tensor(small[:1], small)) == rounds_of(1, all_gathers=False)


@MODES
@on_proxied_gpus(4, 5)
def test_collectives_of_the_host_proxy_alone(rank, world, asynchronous):
    """Kernels only copy a rank's own data. Five ranks on hosts of three and two use this path for blocks, too."""
    set_delays(rank, 300)

    def reduce_to(tensor):
        finish(dist.reduce(tensor, 1, dist.ReduceOp.AVG, async_op=asynchronous))
        return [tensor] if rank == 1 else []

    def broadcast_(tensor):
        finish(dist.broadcast(tensor, world - 1, async_op=asynchronous))
        return [tensor]

    def exchange(tensor):
        out = torch.empty_like(tensor)
        finish(dist.all_to_all_single(out, tensor, async_op=asynchronous))
        return [out]

    def exchange_lists(tensor):
        sizes = [(rank + 2 * p) % 4 * 1000 for p in range(world)], [(p + 2 * rank) % 4 * 1000 for p in range(world)]
        out = [torch.empty(size, device=tensor.device) for size in sizes[1]]
        finish(dist.all_to_all(out, list(tensor[: sum(sizes[0])].split(sizes[0])), async_op=asynchronous))
        return out

    def collect(tensor):
        into = [torch.empty_like(tensor) for _ in range(world)] if rank == 2 else None
        finish(dist.gather(tensor, into, 2, async_op=asynchronous))
        return into or []

    def deal(tensor):
        out = torch.empty(tensor.numel() // world, device=tensor.device)
        finish(dist.scatter(out, list(tensor.chunk(world)) if rank == 1 else None, 1, async_op=asynchronous))
        return [out]

    for count in (1, 1000, 333_333, CHUNK // 2):
        whole = values(rank, world * count)
        for call in (reduce_to, broadcast_, exchange, collect, deal):
            both(call, whole)
        both(scatter(dist.ReduceOp.SUM, asynchronous), whole)
        both(gather(asynchronous), values(rank, count))
    both(exchange_lists, values(rank, world * 4000))
    tensor = values(rank, 4000).to(GPU)[::2]
    assert launches_of(lambda: dist.broadcast(tensor, 0)) == 2
    assert launches_of(lambda: dist.all_reduce(tensor[:0])) == 2


@on_proxied_gpus(2, 4)
def test_a_stream_may_hold_less_than_one_operation(rank, world):
    """The host lets the stream run before all launches of the operation are enqueued."""
    part, whole = torch.full((90 * BLOCK // 4,), rank + 1.0).to(GPU), torch.empty(world * 90 * BLOCK // 4, device=GPU)
    dist.all_gather_into_tensor(whole[: world * 100], part[:100])
    torch.accelerator.synchronize()
    set_queue_depth(130)  # a launch of a proxy takes up to two entries
    try:
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole, async_op=True).wait()
        torch.accelerator.synchronize()
    finally:
        set_queue_depth(0)
    assert torch.equal(part.cpu()[::1000], torch.full((len(part[::1000]),), world * (rank + 1.0)))


@on_proxied_gpus(4)
def test_a_group_that_is_destroyed_ends_what_was_called(rank, world):
    set_delays(rank, 3000)
    tensor = torch.full((CHUNK,), rank + 1.0).to(GPU)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_reduce(tensor, async_op=True).wait()
    dist.destroy_process_group()
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), 40.0))


@on_proxied_gpus(2)
def test_destroy_reports_an_unseen_failure(rank, world):
    """The destroy reports an unseen failure once; it does not repeat a failure that a call raised."""
    for seen in (False, True):
        group = dist.new_group(backend=f"cpu:{BACKEND},fakegpu:{BACKEND}", timeout=timedelta(seconds=1))
        tensor = torch.ones(1000, device=GPU)
        dist.all_reduce(tensor, group=group)
        torch.accelerator.synchronize()
        if rank == 0:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            torch.accelerator.synchronize()
            if seen:
                with pytest.raises(dist.DistBackendError, match="rank 1"):
                    work.wait()
            with stderr_lines() as lines:
                dist.destroy_process_group(group)
            assert any("do not use the results" in line for line in lines) != seen, lines
        sync(f"rank 0 has given up, {seen}")


@MODES
@on_proxied_gpus(4)
def test_several_in_one_call(rank, world, asynchronous):
    parts = [torch.full((count,), rank + count % 7.0).to(GPU) for count in (5, 700, CHUNK // 4, 70_001)]
    wholes = [torch.empty(world * len(part), device=GPU) for part in parts]

    def gather_all():
        with dist._coalescing_manager(device=torch.device(GPU), async_ops=asynchronous) as window:
            for part, whole in zip(parts, wholes, strict=True):
                dist.all_gather_into_tensor(whole, part)
        if asynchronous:
            window.wait()

    def reduce_all():
        with dist._coalescing_manager(device=torch.device(GPU), async_ops=asynchronous) as window:
            for whole in wholes:
                dist.all_reduce(whole)
        if asynchronous:
            window.wait()

    for call in (gather_all, reduce_all):
        assert launches_of(lambda call=call: call() or None) > 0
    for part, whole in zip(parts, wholes, strict=True):
        want = torch.cat([torch.full((len(part),), world * (r + len(part) % 7.0)) for r in range(world)])
        assert torch.equal(whole.cpu(), want)


@on_proxied_gpus(4)
def test_no_collective_blocks_the_host(rank, world):
    tensors = [torch.full((1000 * world,), rank + 1.0).to(GPU) for _ in range(4)]
    part = torch.empty(1000, device=GPU)
    dist.broadcast(tensors[0], 0)
    torch.accelerator.synchronize()
    sync("all have opened their devices")
    if rank == 0:
        sync("the others go on")
    dist.broadcast(tensors[0], 1)
    dist.reduce(tensors[1], 0)
    dist.all_to_all_single(torch.empty_like(tensors[2]), tensors[2], async_op=True).wait()
    dist.gather(part, [torch.empty_like(part) for _ in range(world)] if rank == 1 else None, 1)
    if rank != 0:
        sync("the others go on")
    assert tensors[0].cpu().mean() == 1
    if rank == 0:
        assert tensors[1].cpu().mean() == 10


@on_proxied_gpus(4)
def test_host_memory_holds_blocks_of_a_local_rank_only(rank, world):
    whole, part = torch.ones(16 << 20, device=GPU), torch.empty(4 << 20, device=GPU)
    dist.reduce_scatter_tensor(part, whole)
    for call, blocks in (
        (lambda: dist.reduce_scatter_tensor(part, whole), 3),  # a sum for each host, and the result
        (lambda: dist.all_gather_into_tensor(whole, part), 2),
    ):
        torch.accelerator.synchronize()
        dist.barrier()
        reset_counts()
        call()
        seen = counts()
        assert seen["pinned_bytes"] <= SLOTS * (blocks * BLOCK + 64) + 64, seen
        assert seen["stream_syncs"] == seen["event_syncs"] == seen["device_syncs"] == 0
    assert torch.equal(whole.cpu(), torch.full((16 << 20,), 4.0))


@MODES
@on_proxied_gpus(4)
def test_blocks_in_place(rank, world, asynchronous):
    set_delays(rank, 300)
    count = CHUNK // 4
    whole = torch.zeros(world * count).to(GPU)
    mine = whole[count * rank : count * (rank + 1)].fill_(rank + 1)
    finish(dist.all_gather_into_tensor(whole, mine, async_op=asynchronous))
    assert torch.equal(whole.cpu().view(world, count)[:, ::1000].mean(1), torch.arange(1.0, 5.0))
    finish(dist.reduce_scatter_tensor(mine, whole, async_op=asynchronous))
    assert torch.equal(mine.cpu(), torch.full((count,), 4.0 * (rank + 1)))


@on_proxied_gpus(4)
def test_calls_of_blocks_run_in_the_order_of_issue(rank, world):
    """Each call reads the result of the previous one."""
    set_delays(rank, 500)
    part, whole = torch.full((CHUNK // 2,), rank + 1.0).to(GPU), torch.empty(2 * CHUNK, device=GPU)
    works = [
        dist.all_gather_into_tensor(whole, part, async_op=True),
        dist.reduce_scatter_tensor(part, whole, async_op=True),
        dist.all_gather_into_tensor(whole, part, async_op=True),
        dist.all_reduce(whole, async_op=True),
        dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, async_op=True),
    ]
    for work in works:
        work.wait()
    assert torch.equal(part.cpu(), torch.full((CHUNK // 2,), 16.0 * (rank + 1)))


@MODES
@on_proxied_gpus(4)
def test_a_mismatch_of_blocks_describes_the_whole_operation(rank, world, asynchronous):
    count = [CHUNK, CHUNK, CHUNK, CHUNK + 4][rank]
    whole, part = torch.ones(count, device=GPU), torch.full((count // world,), 7.0).to(GPU)
    text = failure_of(lambda: dist.reduce_scatter_tensor(part, whole, async_op=asynchronous))
    assert re.search(r"reduce_scatter\(sum, f32, 419430[48] elements\).*, f32, 419430[48] elements", text), text
    torch.accelerator.synchronize()
    assert torch.equal(part.cpu(), torch.full((count // world,), 7.0))


@pytest.mark.parametrize("gathers", [False, True])
@on_proxied_gpus(4, op_timeout=20, dies={3})
def test_a_rank_that_dies_in_the_middle_of_blocks_is_named(rank, world, gathers):
    whole, part = torch.ones(16 * CHUNK // 4, device=GPU), torch.zeros(4 * CHUNK // 4, device=GPU)
    dist.reduce_scatter_tensor(part, whole)
    torch.accelerator.synchronize()
    sync("ready")
    set_delays(rank, 400_000)
    if gathers:
        work, result, begun = dist.all_gather_into_tensor(whole, part, async_op=True), whole, 4
    else:
        part.zero_()
        work, result, begun = dist.reduce_scatter_tensor(part, whole, async_op=True), part, 4
    if rank == 3:
        while peek(result)[0] != begun:
            time.sleep(0.01)
        os._exit(1)
    began = time.monotonic()
    text = failure_of(lambda: work)
    assert "rank 3" in text, text
    assert time.monotonic() - began < 10


class Wide(test_device_uses.Net):
    """Parameters so large that their gathers and scatters need several slices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 50_000), nn.Linear(50_000, 19)


@on_proxied_gpus(4)
def test_fsdp2(rank, world):
    set_delays(rank, 200)
    trained = {}
    for device in (GPU, "cpu"):
        model = test_device_uses.sharded(Wide().to(device))
        x, y = (torch.randn(6, n, generator=torch.Generator().manual_seed(rank)).to(device) for n in (WIDTH, 5))
        torch.accelerator.synchronize()
        reset_counts()
        (model(x) - y).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert (counts()["launches"] > 0) == (device == GPU)
        trained[device] = [p.detach().to_local().cpu() for p in model.parameters()]
    assert_same_weights(trained[GPU], trained["cpu"], "on the CPU")


@on_proxied_gpus(2)
def test_groups_on_more_streams_than_hardware_queues_are_one_warning(rank, world):
    """As on one host: a proxy's stream counts."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    try:
        with stderr_lines() as lines:
            groups = [dist.new_group() for _ in range(3)]
            for group in groups:
                tensor = torch.full((10,), float(rank + 1), device=f"{GPU}:1")
                dist.all_reduce(tensor, group=group)
                assert tensor.tolist() == [3.0] * 10
        warnings = [line for line in lines if "hardware queues" in line]
        assert len(warnings) == 1, lines
        assert "GPU 1: 2 groups of this process use 2 of its streams, more than the 1 hardware queues" in warnings[0]
    finally:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
