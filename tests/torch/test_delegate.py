"""Delegation of collectives to NCCL (`NVX_DELEGATE`), which `fake_nccl` simulates on the fake accelerator.

The tests of `test_device.py`, which cover staging through host memory, apply here too.
"""

import contextlib
import os
import signal
import threading
import time

import fake_nccl
import pytest
import test_device
import torch
import torch.distributed as dist
from fake_device import held, reset_counts, set_delays, slow_fill
from ranks import SEVERAL_HOSTS, TORCH, on_fake_gpus, stderr_lines, sync, until_it_fails
from test_device import GPU, MODES, assert_all, captured, on_gpu

DEVICE = test_device
LARGE = 512  # floats that every rule of `fake_nccl.RULES` delegates
SMALL = 511  # too few floats to delegate an all-reduce


def on_nccl_gpus(*worlds, **settings):
    return on_fake_gpus(*worlds, pool="fake_nccl_gpus", **settings)


def on_simulated_nccl_gpus(*worlds, **settings):
    return on_fake_gpus(*worlds, pool="simulated_nccl_gpus", **settings)


def raises_before_long(match, call=lambda: None, kind=dist.DistBackendError, most=20):
    with pytest.raises(kind, match=match):
        until_it_fails(call, most)


def is_delegated(call):
    """Whether the call reached the other backend."""
    before = sum(fake_nccl.calls().values())
    call()
    return sum(fake_nccl.calls().values()) != before


test_every_collective = MODES(on_nccl_gpus(2, 3)(DEVICE.test_every_collective.body))
test_not_contiguous = MODES(on_nccl_gpus(2)(DEVICE.test_tensors_that_are_not_contiguous.body))
test_late_producer = MODES(on_nccl_gpus(2)(DEVICE.test_call_waits_for_the_stream_that_writes_its_input.body))
test_own_streams = on_nccl_gpus(2)(DEVICE.test_the_caller_may_be_on_a_stream_of_its_own.body)
test_let_go = on_nccl_gpus(2)(DEVICE.test_the_user_may_let_go_of_tensors_at_once.body)
test_futures = on_nccl_gpus(2)(DEVICE.test_futures.body)
test_coalescing = on_nccl_gpus(2)(DEVICE.test_coalescing.body)
test_barrier = on_nccl_gpus(2)(DEVICE.test_a_barrier_waits_for_the_current_stream.body)
test_groups = on_nccl_gpus(2)(DEVICE.test_groups_and_objects.body)
test_cpu_beside = on_nccl_gpus(2)(DEVICE.test_tensors_of_the_cpu_have_an_order_of_their_own.body)
test_every_collective_beside_kernels = MODES(on_simulated_nccl_gpus(2)(DEVICE.test_every_collective.body))
test_ddp_beside_kernels = on_simulated_nccl_gpus(2)(DEVICE.test_ddp.body)


@on_nccl_gpus(2)
def test_ddp(rank, world):
    DEVICE.test_ddp.body(rank, world)
    assert fake_nccl.calls()["broadcast"] > 0, "DDP's parameters"

    def wrap(model):
        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)

    for a, b in zip(DEVICE.train(GPU, rank, wrap), DEVICE.train("cpu", rank, wrap), strict=True):
        assert torch.equal(a, b)
    assert fake_nccl.calls()["allreduce"] >= 3, "buckets that are large enough"


@on_nccl_gpus(2)
def test_named_collectives_are_delegated_from_their_size_on(rank, world):
    dist.broadcast(on_gpu(rank, 1), 0)
    assert fake_nccl.calls() == {"connect": 1, "broadcast": 1}
    assert is_delegated(lambda: dist.all_reduce(on_gpu(1, LARGE)))
    assert not is_delegated(lambda: dist.all_reduce(on_gpu(1, SMALL)))
    assert is_delegated(lambda: dist.reduce(on_gpu(1, LARGE), 1))
    assert not is_delegated(lambda: dist.reduce(on_gpu(1, SMALL), 1))

    def gather(each):
        dist.all_gather_into_tensor(torch.empty(2 * each, device=GPU), on_gpu(rank, each))

    def scatter(each):
        dist.reduce_scatter_tensor(torch.empty(each, device=GPU), on_gpu(rank, 2 * each))

    for call in (gather, scatter):  # the size of the whole counts
        assert is_delegated(lambda call=call: call(LARGE))
        assert not is_delegated(lambda call=call: call(SMALL))
    whole = torch.empty(2 * LARGE, device=GPU)
    assert not is_delegated(lambda: dist.all_to_all_single(whole, on_gpu(1, 2 * LARGE)))
    assert not is_delegated(lambda: dist.broadcast(on_gpu(rank, 0), 0)), "nothing to move"


@on_nccl_gpus(2)
def test_operations_that_nccl_lacks_are_not_delegated(rank, world):
    def ones(dtype):
        return torch.ones(4 * LARGE, dtype=dtype).to(GPU)  # large enough in the smallest type

    dist.broadcast(ones(torch.bool), 0)
    kept = [
        (torch.bool, dist.ReduceOp.SUM),
        (torch.int32, dist.ReduceOp.BAND),
        (torch.int64, dist.ReduceOp.BXOR),
        (torch.int16, dist.ReduceOp.SUM),
        (torch.int64, dist.ReduceOp.AVG),
        (torch.float8_e5m2, dist.ReduceOp.SUM),
        (torch.float32, dist.ReduceOp.MAX),  # the result includes a NaN
        (torch.float32, dist._make_nccl_premul_sum(0.5)),
    ]
    for dtype, op in kept:
        assert not is_delegated(lambda dtype=dtype, op=op: dist.all_reduce(ones(dtype), op)), (dtype, op)
    for dtype, op, total in [
        (torch.float16, dist.ReduceOp.SUM, 2),
        (torch.bfloat16, dist.ReduceOp.AVG, 1),
        (torch.float64, dist.ReduceOp.PRODUCT, 1),
        (torch.int64, dist.ReduceOp.MIN, 1),
        (torch.uint8, dist.ReduceOp.MAX, 1),
    ]:
        tensor = ones(dtype)
        assert is_delegated(lambda tensor=tensor, op=op: dist.all_reduce(tensor, op)), (dtype, op)
        assert_all(tensor, total)
    for dtype in (torch.bool, torch.int16, torch.float8_e5m2):  # moved as bytes
        tensor = torch.full((9,), float(rank)).to(dtype).to(GPU)
        assert is_delegated(lambda tensor=tensor: dist.broadcast(tensor, 1)), dtype
        assert torch.equal(tensor.cpu(), torch.ones(9).to(dtype)), dtype


@on_nccl_gpus(2)
def test_lists_of_uneven_pieces(rank, world):
    dist.broadcast(on_gpu(1), 0)
    sizes = [LARGE, 2 * LARGE + 1]
    parts = [torch.empty(n, device=GPU) for n in sizes]
    assert is_delegated(lambda: dist.all_gather(parts, on_gpu(rank + 1, sizes[rank])))
    assert fake_nccl.calls()["allgather_list"] == 1
    for r, part in enumerate(parts):
        assert_all(part, r + 1)
    part = torch.empty(sizes[rank], device=GPU)
    assert is_delegated(lambda: dist.reduce_scatter(part, [on_gpu(rank + 1, n) for n in sizes]))
    assert fake_nccl.calls()["reduce_scatter_list"] == 1
    assert_all(part, 3)


@on_nccl_gpus(2)
def test_calls_of_several_tensors_are_not_delegated(rank, world):
    dist.broadcast(on_gpu(1), 0)
    tensors = [on_gpu(rank + i, LARGE) for i in range(3)]

    def call():
        with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()

    assert not is_delegated(call)
    for i, tensor in enumerate(tensors):
        assert_all(tensor, 2 * i + 1)


def mix(rank):
    """Delegated calls and others, on several streams, with the same tensors."""
    set_delays(4, 500)
    streams = [torch.Stream(GPU) for _ in range(3)]
    large, small = on_gpu(rank, 5 * LARGE), on_gpu(rank, 10)
    torch.accelerator.synchronize()
    works = []
    for i in range(12):
        for tensor in (large, small):
            with streams[i % 3]:
                if works:
                    works.pop(0).wait()
                works.append(dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True))
        with streams[(i + 1) % 3]:
            streams[(i + 1) % 3].wait_stream(streams[i % 3])
            while works:
                works.pop(0).wait()
            dist.broadcast(large[: i + 1], i % 2)
            large.add_(1)
            small.add_(1)
            streams[i % 3].wait_stream(streams[(i + 1) % 3])
            streams[(i + 2) % 3].wait_stream(streams[(i + 1) % 3])
    torch.accelerator.synchronize()
    assert_all(large, 12.5)
    assert_all(small, 12.5)


@on_nccl_gpus(2)
def test_calls_on_several_streams_keep_their_order(rank, world):
    """The caller makes no stream wait for another; the group orders the calls."""
    dist.broadcast(on_gpu(1), 0)
    tensor = on_gpu(rank + 2, LARGE)
    torch.accelerator.synchronize()
    first, second = torch.Stream(GPU), torch.Stream(GPU)
    with held(first):
        with first:
            dist.all_reduce(tensor)
        with second:
            dist.all_reduce(tensor, op=dist.ReduceOp.PRODUCT)
        time.sleep(0.5)  # enough time for the second to run
    torch.accelerator.synchronize()
    assert_all(tensor, 25)


@on_nccl_gpus(2)
def test_order_beside_what_goes_through_host_memory(rank, world):
    mix(rank)
    assert fake_nccl.calls()["allreduce"] == fake_nccl.calls()["broadcast"] == 12


@on_nccl_gpus(2)
def test_calls_follow_pending_results_on_all_routes(rank, world):
    """A call that reads the pending results of another runs after it, as on one stream."""
    dist.all_reduce(on_gpu(1, LARGE))
    set_delays(3, 1000)
    for _ in range(5):
        tensor = on_gpu(rank + 1, LARGE)
        works = [dist.all_reduce(tensor[:SMALL], async_op=True)]
        works.append(dist.all_reduce(tensor, async_op=True))  # delegated
        works.append(dist.all_reduce(tensor[:SMALL], async_op=True))
        works.append(dist.all_reduce(tensor, async_op=True))  # delegated
        dist.all_reduce(tensor[:SMALL])
        for work in works:
            work.wait()
        assert_all(tensor[:SMALL], 48)
        assert_all(tensor[SMALL:], 6)


@on_nccl_gpus(2)
def test_write_waits_for_a_delegated_read(rank, world):
    """A call that writes a buffer runs after the delegated call that reads it."""
    dist.all_reduce(on_gpu(1, LARGE))
    set_delays(3, 1000)
    for i in range(5):
        read, whole = on_gpu(rank + 1, LARGE), on_gpu(0, world * LARGE)
        slow_fill(whole, 0, 20)  # the delegated call has to wait for this
        pieces = [on_gpu(10.0 * i + r, SMALL) for r in range(world)] if rank == 0 else None
        gathered = dist.all_gather_into_tensor(whole, read, async_op=True)  # delegated
        written = dist.scatter(read[:SMALL], pieces, src=0, async_op=True)
        for work in (gathered, written):
            work.wait()
        assert_all(read[:SMALL], 10 * i + rank)
        for r in range(world):
            assert_all(whole[r * LARGE : (r + 1) * LARGE], r + 1)


@on_simulated_nccl_gpus(2)
def test_order_beside_kernels(rank, world):
    mix(rank)
    assert fake_nccl.calls()["allreduce"] == fake_nccl.calls()["broadcast"] == 12


@on_simulated_nccl_gpus(2)
def test_ranks_agree_behind_kernels_that_others_may_wait_for(rank, world):
    """The first call that may be delegated blocks the host until all ranks reach it. A call that still waits for
    kernels does not, as long as this rank holds its own call back in a window."""
    few, many, made = on_gpu(rank, SMALL), on_gpu(rank, LARGE), len(fake_nccl.made)
    # By kernels; ranks have not agreed on a backend yet.
    dist.reduce_scatter_tensor(torch.empty(1, device=GPU), on_gpu(1, 2))
    assert len(fake_nccl.made) == made
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    if rank == 0:
        backend._start_coalescing()
        work = dist.all_reduce(few, async_op=True)
        dist.all_reduce(many, async_op=True)
        backend._end_coalescing()
        work.wait()
    else:
        dist.all_reduce(few)
        torch.accelerator.synchronize()
        dist.all_reduce(many)
    torch.accelerator.synchronize()
    assert_all(few, 1)
    assert_all(many, 1)


@on_nccl_gpus(2)
def test_the_host_runs_ahead(rank, world):
    tensor = on_gpu(rank + 1, LARGE)
    dist.all_reduce(tensor)
    with held():
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert not work.is_completed()
    assert_all(tensor, 12)
    assert work.is_completed()


@on_nccl_gpus(2)
def test_each_call_counts(rank, world):
    before = dist.group.WORLD._get_backend(torch.device(GPU))._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(on_gpu(1, LARGE))
    assert dist.group.WORLD._get_backend(torch.device(GPU))._get_sequence_number_for_group() == before + 3


@on_nccl_gpus(2)
def test_log_names_the_route(rank, world):
    with stderr_lines() as lines:
        dist.all_reduce(on_gpu(1, LARGE))
        dist.all_reduce(on_gpu(1, SMALL))
    message = "\n".join(lines)
    assert ("delegated to fake_nccl, on fakegpu:0 of this rank" in message) == (rank == 0), message
    assert "all_reduce on fakegpu:0: delegated to fake_nccl (NVX_DELEGATE)" in message
    assert "all_reduce on fakegpu:0: through host memory" in message


@on_nccl_gpus(2)
def test_tensors_of_two_devices_are_refused(rank, world):
    dist.all_reduce(on_gpu(1, LARGE))
    with pytest.raises(ValueError, match="keep the tensors of a group on one device"):
        dist.all_reduce(torch.ones(LARGE, device=f"{GPU}:1"))


def aborts():
    """How often the other backend was aborted. The abort runs beside the call that raises."""
    end = time.monotonic() + 5
    while "abort" not in fake_nccl.calls() and time.monotonic() < end:
        time.sleep(0.01)
    return fake_nccl.calls().get("abort", 0)


def call_something_else(rank, mine, theirs):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    with pytest.raises(dist.DistBackendError, match="mismatch") as caught:
        work = mine(tensor) if rank == 0 else theirs(tensor)
        raises_before_long("mismatch", work.wait)
        work.wait()
    torch.accelerator.synchronize()  # pending work has been aborted
    return str(caught.value)


@on_nccl_gpus(2)
def test_calls_that_do_not_match_are_named(rank, world):
    message = call_something_else(
        rank,
        lambda tensor: dist.all_reduce(tensor, async_op=True),
        lambda tensor: dist.broadcast(tensor, 0, async_op=True),
    )
    assert "all_reduce(sum, f32, 512 elements)" in message and "broadcast(f32, 512 elements, root 0)" in message
    assert aborts() == 1
    with pytest.raises(dist.DistBackendError, match="mismatch"):
        dist.all_reduce(on_gpu(1, LARGE))
    with pytest.raises(dist.DistBackendError, match="mismatch"):
        dist.all_reduce(on_gpu(1, SMALL))


@on_nccl_gpus(2)
def test_a_delegated_call_against_one_that_is_not(rank, world):
    """Ranks call with different sizes, or one calls with several tensors."""
    message = call_something_else(
        rank,
        lambda tensor: dist.all_reduce(tensor, async_op=True),
        lambda tensor: dist.all_reduce(tensor[:-1], async_op=True),
    )
    assert "512 elements" in message and "511 elements" in message


@on_nccl_gpus(2)
def test_a_call_of_several_operations_against_a_delegated_one(rank, world):
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    message = call_something_else(
        rank,
        lambda tensor: dist.all_reduce(tensor, async_op=True),
        lambda tensor: backend.allreduce_coalesced([tensor], dist.AllreduceCoalescedOptions()),
    )
    assert message.count("all_reduce(sum, f32, 512 elements)") >= 2


@on_nccl_gpus(2, op_timeout=2)
def test_a_rank_that_does_not_come_is_named(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        raises_before_long("timed out in all_reduce.*waiting for rank 1", work.wait)
        torch.accelerator.synchronize()
    sync("rank 0 has given up")


@on_nccl_gpus(2, op_timeout=2)
def test_a_call_that_the_device_does_not_reach_ends_in_a_timeout(rank, world):
    """All ranks make the call, and the stream of one rank is stuck."""
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    with held() if rank == 1 else contextlib.nullcontext():
        work = dist.all_reduce(tensor, async_op=True)
        raises_before_long("timed out in all_reduce" + (".*on the device" if rank == 0 else ""), work.wait)
        sync("both know it")
    torch.accelerator.synchronize()


@on_nccl_gpus(2, op_timeout=1)
def test_time_before_the_device_reaches_the_call_does_not_count(rank, world):
    tensor = on_gpu(rank + 1, LARGE)
    dist.all_reduce(on_gpu(1, LARGE))
    gate = torch.empty(1, device=GPU)
    slow_fill(gate, 1, 2500)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    assert_all(tensor, 3)
    dist.barrier()


@pytest.mark.skipif(SEVERAL_HOSTS, reason="a rank of another host that dies is missed when the time is up")
@on_nccl_gpus(3, op_timeout=60, dies=[1])
def test_a_rank_that_dies_is_named_soon(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 1:
        with held():
            dist.all_reduce(tensor)  # calls it, but its device does not reach it
            sync("all have called it")
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(tensor, async_op=True)
    sync("all have called it")
    began = time.monotonic()
    raises_before_long("rank 1 .*ended", work.wait)
    assert time.monotonic() - began < 10
    torch.accelerator.synchronize()


@on_nccl_gpus(2)
def test_an_abort_cancels_calls_in_flight(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)
        dist.group.WORLD.abort()
        torch.accelerator.synchronize()
        assert aborts() == 1
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(tensor)
    sync("both")


def in_flight(rank, ms):
    """The tensor of a delegated call that takes that long."""
    dist.all_reduce(on_gpu(1, LARGE))
    tensor = torch.empty(LARGE, device=GPU)
    slow_fill(tensor, rank + 1, ms)
    dist.all_reduce(tensor)
    return tensor


@on_nccl_gpus(2)
def test_destroying_a_group_waits_for_calls_in_flight(rank, world):
    tensor = in_flight(rank, 300)
    dist.destroy_process_group()
    assert fake_nccl.calls()["shutdown"] == 1 and "abort" not in fake_nccl.calls()
    assert_all(tensor, 3)


@on_nccl_gpus(2)
def test_a_handler_may_destroy_the_group_again_that_waits_for_its_calls(rank, world):
    tensor = in_flight(rank, 2000)
    backend, handled = dist.group.WORLD._get_backend(torch.device(GPU)), []
    before = signal.signal(signal.SIGUSR2, lambda *_: handled.append(backend.shutdown()))
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        dist.destroy_process_group()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert handled == [None] and "abort" not in fake_nccl.calls()
    assert_all(tensor, 3)


@on_nccl_gpus(2)
def test_failure_of_the_delegate_fails_the_group(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 0:
        with held():
            work = dist.all_reduce(tensor, async_op=True)
            fake_nccl.made[-1].break_down()
            raises_before_long("fake_nccl reports that all_reduce.* has failed", work.wait)
    else:
        message = "fake_nccl reports that all_reduce.* has failed.*reported by rank 0"
        raises_before_long(message, lambda: dist.all_reduce(tensor))
    torch.accelerator.synchronize()


@on_nccl_gpus(2)
def test_a_call_that_the_backend_refuses_fails_the_group(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 0:
        fake_nccl.made[-1].refuse_calls()
        with pytest.raises(dist.DistBackendError, match="fake_nccl did not take all_reduce.*not today"):
            dist.all_reduce(tensor)
    else:
        raises_before_long("not today.*reported by rank 0", lambda: dist.all_reduce(tensor))
    torch.accelerator.synchronize()


@on_simulated_nccl_gpus(2)
def test_a_failure_of_a_delegated_call_ends_kernels(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    dist.all_reduce(on_gpu(1, SMALL))
    torch.accelerator.synchronize()
    if rank == 0:
        fake_nccl.made[-1].refuse_calls()
        with pytest.raises(dist.DistBackendError, match="not today"):
            dist.all_reduce(tensor)
    raises_before_long("not today", lambda: dist.all_reduce(on_gpu(1, SMALL)))
    torch.accelerator.synchronize()


@on_nccl_gpus(2)
def test_a_forked_child_does_not_use_the_delegate(rank, world):
    tensor = on_gpu(1, LARGE)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(tensor)
        except (RuntimeError, ValueError) as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(on_gpu(1, LARGE))


@on_nccl_gpus(2)
def test_the_profiler_names_the_library_that_serves_a_call(rank, world):
    dist.all_reduce(on_gpu(1, LARGE))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(on_gpu(1, LARGE))
        dist.all_reduce(on_gpu(1, SMALL))
    names = {event.name for event in profile.events()}
    assert {"nvx:all_reduce", "nvx:delegated", "nvx:through_host_memory"} <= names, names


@pytest.mark.skipif(TORCH < (2, 13), reason="this torch cannot report whether a stream is captured")
@on_nccl_gpus(2)
def test_a_capture_is_refused_before_anything_is_delegated(rank, world):
    """The capture needs kernels, and there are none."""
    tensor = on_gpu(rank, LARGE)
    dist.broadcast(on_gpu(1), 0)
    torch.accelerator.synchronize()
    reset_counts()

    def call():  # thread-local: without a driver this process cannot decide whether other threads may query the device
        message = "this stream is being captured into a graph"
        with captured(mode="thread_local"), pytest.raises(ValueError, match=message):
            dist.all_reduce(tensor)

    assert not is_delegated(call)
    assert is_delegated(lambda: dist.all_reduce(tensor))
    assert_all(tensor, 1)
