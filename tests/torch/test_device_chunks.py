"""Large collectives of device tensors go through host memory in chunks and remain one operation: bits, memory use and
error texts."""

import time

import nvx
import pytest
import torch
import torch.distributed as dist
from fake_device import counts, held, peek, reset_counts, set_copy_rate, set_delays, slow_fill
from ranks import on_fake_gpus, only_nvx
from torch.profiler import ProfilerActivity, profile

GPU = "fakegpu"
CHUNK = 4 << 20  # the value in csrc/group/plan/chunks.h
SLOTS = 3  # the value in csrc/torch/streams/chunk_pipeline.h
SIZES = [CHUNK // 4, CHUNK // 4 + 1, 3_333_333]  # of float32: one chunk (not split), two, four

MODES = pytest.mark.parametrize("asynchronous", [False, True])
pytestmark = only_nvx


def values(rank, count, dtype=torch.float32):
    """Values whose sums in another order have other bits."""
    made = torch.randn(count, generator=torch.Generator().manual_seed(rank * 1000 + count % 97))
    return made.to(dtype) if dtype.is_floating_point else (made * 1000).to(dtype)


def finish(work):
    if work is not None:
        work.wait()


def both(call, *tensors):
    """Calls on copies of the tensors on the device and on the CPU, and asserts the same bits."""
    results = []
    for device in (GPU, "cpu"):
        own = [tensor.to(device) for tensor in tensors]
        results.append([tensor.cpu() for tensor in call(*own)])
    for i, (here, there) in enumerate(zip(*results, strict=True)):
        if not torch.equal(here, there):
            dist.all_reduce(torch.ones(1, device=GPU), async_op=True)  # raises the failure of a group that gave up
        assert torch.equal(here, there), f"result {i}: {(here != there).sum()} of {here.numel()} elements differ"


@MODES
@on_fake_gpus(2, 3)
def test_the_bits_are_those_of_the_cpu(rank, world, asynchronous):
    set_delays(rank, 300)
    for count in SIZES:
        root = count % world

        def reduce_all(tensor, op=dist.ReduceOp.SUM):
            finish(dist.all_reduce(tensor, op, async_op=asynchronous))
            return [tensor]

        def reduce(tensor, root=root):
            finish(dist.reduce(tensor, root, async_op=asynchronous))
            return [tensor]

        def broadcast(tensor, root=root):
            finish(dist.broadcast(tensor, root, async_op=asynchronous))
            return [tensor]

        def gather(tensor):
            whole = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
            finish(dist.all_gather_into_tensor(whole, tensor, async_op=asynchronous))
            return [whole]

        def scatter(tensor, op=dist.ReduceOp.AVG):
            part = torch.empty(tensor.numel() // world, dtype=tensor.dtype, device=tensor.device)
            finish(dist.reduce_scatter_tensor(part, tensor, op, async_op=asynchronous))
            return [part]

        mine = values(rank, count)
        for call in (reduce_all, reduce, broadcast, gather):
            both(call, mine)
        both(scatter, values(rank, count // world * world))
        both(lambda tensor: reduce_all(tensor, dist.ReduceOp.AVG), values(rank, count, torch.bfloat16))
        both(lambda tensor: reduce_all(tensor, dist.ReduceOp.MAX), values(rank, count, torch.int64))


@on_fake_gpus(2, 3)
def test_lists_of_blocks_of_any_size(rank, world):
    set_delays(rank, 300)
    sizes = [10, 2_000_003, 500_000][:world]

    def gather(mine, *outputs):
        finish(dist.all_gather(list(outputs), mine))
        return outputs

    def scatter(mine, *inputs):
        finish(dist.reduce_scatter(mine, list(inputs)))
        return [mine]

    mine = values(rank, sizes[rank])
    both(gather, mine, *[torch.empty(size) for size in sizes])
    both(scatter, torch.empty(sizes[rank]), *[values(rank, size) for size in sizes])


@MODES
@on_fake_gpus(2)
def test_tensors_that_are_not_contiguous(rank, world, asynchronous):
    set_delays(rank, 2000)
    count = 1_500_000

    def call(like):
        device = like.device
        tensor = values(rank, 2 * count).to(device).view(count, 2).t()
        finish(dist.all_reduce(tensor, async_op=asynchronous))
        wide = torch.zeros(count, 2, device=device)
        finish(dist.all_gather(list(wide.unbind(1)), tensor[0].contiguous(), async_op=asynchronous))
        return [tensor, wide]

    both(call, torch.empty(0))


@on_fake_gpus(2)
def test_inputs_within_outputs(rank, world):
    count = 1_500_000
    for asynchronous in (False, True):
        whole = torch.zeros(2 * count).to(GPU)
        mine = whole[count * rank : count * (rank + 1)].fill_(rank + 1)
        finish(dist.all_gather_into_tensor(whole, mine, async_op=asynchronous))
        assert torch.equal(whole.cpu().view(2, count)[:, ::1000].mean(1), torch.tensor([1.0, 2.0]))
        finish(dist.reduce_scatter_tensor(mine, whole, async_op=asynchronous))
        assert torch.equal(mine.cpu(), torch.full((count,), 2.0 * (rank + 1)))


@MODES
@on_fake_gpus(2)
def test_host_memory_is_bounded(rank, world, asynchronous):
    """The host waits for the device only by polling events."""
    tensor, whole = torch.ones(16 << 20, device=GPU), torch.empty(16 << 20, device=GPU)
    dist.barrier()
    for call in (
        lambda: dist.all_reduce(tensor, async_op=asynchronous),
        lambda: dist.all_gather_into_tensor(whole, tensor[: 8 << 20], async_op=asynchronous),
    ):
        torch.accelerator.synchronize()
        reset_counts()
        finish(call())
        seen = counts()
        assert seen["pinned_allocations"] == 1, seen
        assert 2 * CHUNK < seen["pinned_bytes"] <= 2 * SLOTS * CHUNK, seen
        assert seen["stream_syncs"] == seen["event_syncs"] == seen["device_syncs"] == seen["device_allocations"] == 0
    assert torch.equal(tensor.cpu(), torch.full((16 << 20,), 2.0))


@on_fake_gpus(2)
def test_the_caller_goes_on_at_once(rank, world):
    tensor = torch.ones(4 * CHUNK // 4, device=GPU)
    with held():
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
    work.wait()
    assert torch.equal(tensor.cpu(), torch.full((CHUNK,), 2.0))


@on_fake_gpus(2)
def test_the_order_of_the_callers_streams_is_kept(rank, world):
    """The call sends data that its stream writes later. A wait on another stream makes all results visible there."""
    set_delays(rank, 3000)
    for asynchronous in (False, True):
        tensor = torch.empty(CHUNK, device=GPU)
        slow_fill(tensor, rank + 1, 50)
        work = dist.all_reduce(tensor, async_op=asynchronous)
        with torch.Stream(GPU) if asynchronous else torch.accelerator.current_stream():
            finish(work)
            after = torch.empty_like(tensor)
            after.copy_(tensor, non_blocking=True)
            assert torch.equal(after.cpu(), torch.full((CHUNK,), world * (world + 1) / 2))


@on_fake_gpus(2)
def test_the_user_may_let_go_of_tensors_at_once(rank, world):
    set_delays(5, 1000)
    kept = []
    for round in range(4):
        dist.all_reduce(torch.full((CHUNK,), 1.0 * round).to(GPU), async_op=True)  # no caller waits for it
        gathered = torch.empty(2 * CHUNK, device=GPU)
        dist.all_gather_into_tensor(gathered, torch.full((CHUNK,), 1.0 * round + rank).to(GPU), async_op=True).wait()
        kept.append(gathered)
    for round, gathered in enumerate(kept):
        assert torch.equal(gathered.cpu().view(2, CHUNK), torch.tensor([[round], [round + 1.0]]).expand(2, CHUNK))


@on_fake_gpus(2)
def test_several_at_once(rank, world):
    set_delays(rank, 500)
    tensors = [values(rank + i, 1_200_000 * (i + 1)).to(GPU) for i in range(3)] + [values(rank, 10).to(GPU)]
    want = [tensor.cpu() for tensor in tensors]
    dist.all_reduce_coalesced(want)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, tensor, wanted in zip(works, tensors, want, strict=True):
        work.wait()
        assert torch.equal(tensor.cpu(), wanted)
    tensors = [values(rank + i, 1_200_000 * (i + 1)).to(GPU) for i in range(3)] + [values(rank, 10).to(GPU)]
    with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, wanted in zip(tensors, want, strict=True):
        assert torch.equal(tensor.cpu(), wanted)


@MODES
@on_fake_gpus(2)
def test_it_is_one_operation(rank, world, asynchronous):
    tensor, before = torch.ones(4 * CHUNK, device=GPU), nvx.sequence_number()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        finish(dist.all_reduce(tensor, async_op=asynchronous))
    assert nvx.sequence_number() == before + 1
    assert sum(event.name == "nvx:all_reduce" for event in seen.events()) == 1


@MODES
@on_fake_gpus(2)
def test_a_mismatch_describes_the_whole_operation(rank, world, asynchronous):
    count = [3_000_000, 4_000_000][rank]
    tensor = torch.full((count,), 7.0).to(GPU)
    with pytest.raises(dist.DistBackendError, match="3000000 elements.*4000000 elements|4000000.*3000000"):
        finish(dist.all_reduce(tensor, async_op=asynchronous))
    assert torch.equal(tensor.cpu(), torch.full((count,), 7.0))


@on_fake_gpus(2, op_timeout=1.5)
def test_the_timeout_is_of_the_whole(rank, world):
    """The timeout applies although each chunk alone comes in time."""
    tensor = torch.ones(16 * CHUNK // 4, device=GPU)
    torch.accelerator.synchronize()
    set_copy_rate(CHUNK / 0.3)
    try:
        begin = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="timed out|has not finished within"):
            dist.all_reduce(tensor)
        assert time.monotonic() - begin > 1
    finally:
        set_copy_rate(0)


@on_fake_gpus(2, op_timeout=20)
def test_a_failure_in_the_middle_ends_it(rank, world):
    """Results copied back before the failure stay, and nothing more is written."""
    count = 8 * CHUNK // 4
    tensor = torch.full((count,), rank + 1.0).to(GPU)
    torch.accelerator.synchronize()
    set_copy_rate(CHUNK / 0.2)
    try:
        work = dist.all_reduce(tensor, async_op=True)
        while rank == 1 and peek(tensor)[0] != 3:
            time.sleep(0.01)
        if rank == 1:
            dist.group.WORLD._get_backend(torch.device(GPU)).abort()
        with pytest.raises(dist.DistBackendError):
            work.wait()
    finally:
        set_copy_rate(0)
    torch.accelerator.synchronize()  # waits for the copies in flight
    after = tensor.cpu()
    assert after[0] in (3, rank + 1) and after[-1] == rank + 1
    done = int((after == 3).sum())
    assert torch.equal(after[:done], torch.full((done,), 3.0)), "in order"
    assert torch.equal(after[done:], torch.full((count - done,), rank + 1.0)), "and untouched from there on"
    time.sleep(0.3)
    assert torch.equal(peek(tensor), after)


@on_fake_gpus(2)
def test_a_callback_may_call_the_next_one(rank, world):
    tensor = torch.full((2 * CHUNK // 4,), rank + 1.0).to(GPU)

    def again(done):
        finish(dist.all_reduce(done.value()[0]))
        return done.value()[0]

    result = dist.all_reduce(tensor, async_op=True).get_future().then(again).wait()
    assert torch.equal(result.cpu(), torch.full((2 * CHUNK // 4,), 6.0))
