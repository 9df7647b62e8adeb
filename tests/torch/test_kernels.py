"""Tensors of an accelerator by nvx's kernels: threads simulate them on the streams and in the memory of `fake_device`.

The tests of `test_device.py`, which cover staging through host memory, apply here too.
"""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import test_device
import test_tune
import torch
import torch.distributed as dist
from fake_device import counts, held, launches_block, reset_counts, set_delays, slow_fill
from nvx import doctor
from ranks import TORCH, eventually, on_fake_gpus, on_simulated_gpus, on_simulated_threads, sync, until_it_fails
from test_device import GPU, MODES, assert_all, finish, on_gpu

DEVICE = test_device
TURN = threading.Semaphore(0)
STREAMS = {}

test_every_collective = MODES(on_simulated_gpus(2, 3)(DEVICE.test_every_collective.body))
test_every_type = on_simulated_gpus(2)(DEVICE.test_every_type.body)
test_not_contiguous = MODES(on_simulated_gpus(2)(DEVICE.test_tensors_that_are_not_contiguous.body))
test_late_producer = MODES(on_simulated_gpus(2)(DEVICE.test_call_waits_for_the_stream_that_writes_its_input.body))
test_own_streams = on_simulated_gpus(2)(DEVICE.test_the_caller_may_be_on_a_stream_of_its_own.body)
test_let_go = on_simulated_gpus(2)(DEVICE.test_the_user_may_let_go_of_tensors_at_once.body)
test_futures = on_simulated_gpus(2)(DEVICE.test_futures.body)
test_coalescing = on_simulated_gpus(2)(DEVICE.test_coalescing.body)
test_messages = on_simulated_gpus(2, 3)(DEVICE.test_messages.body)
test_barrier = on_simulated_gpus(2)(DEVICE.test_a_barrier_waits_for_the_current_stream.body)
test_groups = on_simulated_gpus(2)(DEVICE.test_groups_and_objects.body)
test_cpu_beside = on_simulated_gpus(2)(DEVICE.test_tensors_of_the_cpu_have_an_order_of_their_own.body)
test_ddp = on_simulated_gpus(2)(DEVICE.test_ddp.body)
test_tune_kernels = on_simulated_gpus(2)(test_tune.settings_of_kernels_give_the_same_bits)


@on_simulated_gpus(2)
def test_nothing_is_waited_for_and_nothing_staged(rank, world):
    dist.all_reduce(on_gpu(1))
    seen = DEVICE.counts_of_some_calls()
    for waits in ("stream_syncs", "event_syncs", "device_syncs", "device_allocations", "pinned_allocations"):
        assert seen[waits] == 0, seen


@on_fake_gpus(2, pool="simulated_gpus_without_kernels")
def test_no_kernel_is_launched_if_kernels_are_switched_off(rank, world):
    reset_counts()
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    assert_all(tensor, world)
    assert counts()["launches"] == 0, counts()


@on_simulated_gpus(2)
def test_the_profiler_names_the_algorithm(rank, world):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(on_gpu(1))
        dist.broadcast(on_gpu(1), 0)
    names = {event.name for event in profile.events()}
    assert {"nvx:by_kernels:reduce_packets", "nvx:by_kernels:exchange_packets"} <= names, names


@on_simulated_gpus(2)
def test_the_host_runs_ahead(rank, world):
    """A call returns before the device begins it."""
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor)
    with held():
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed()
        work.wait()
        assert not work.is_completed()
    assert_all(tensor, 12)
    assert work.is_completed()


@on_simulated_gpus(2, op_timeout=20)
def test_calls_that_do_not_match_are_named(rank, world):
    tensor = on_gpu(rank + 5)
    with pytest.raises(dist.DistBackendError, match="rank") as caught:
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
        else:
            work = dist.broadcast(tensor, 0, async_op=True)
        until_it_fails(work.wait)
    assert "all_reduce" in str(caught.value) and "broadcast" in str(caught.value), caught.value
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(tensor)


@on_simulated_gpus(2, op_timeout=2)
def test_a_rank_that_does_not_come_is_named(rank, world):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 0:
        sync("the other one has given up")
        return
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        until_it_fails(dist.all_reduce(tensor, async_op=True).wait)
    sync("the other one has given up")


@on_simulated_gpus(2, op_timeout=6)
def test_a_wait_that_has_a_timeout_waits_on_the_host(rank, world):
    tensor = on_gpu(rank + 1)
    dist.all_reduce(tensor)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(dist.DistBackendError, match="wait.. timed out after 200 ms; all_reduce of group"):
            work.wait(timedelta(milliseconds=200))
    sync("the other one has given up waiting")
    if rank == 1:
        work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=20)) and work.is_completed() and work.is_success()
    assert_all(tensor, 6)
    sync("both have it")
    if rank == 0:
        sync("the other one has seen its operation fail")
        return
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        work.wait(timedelta(seconds=20))
    assert not work.is_success()
    sync("the other one has seen its operation fail")


@on_simulated_gpus(2, op_timeout=4)
def test_successful_work_stays_so_when_the_group_fails_later(rank, world):
    """Asynchronous calls and those of a window stay successful; calls in flight at the failure fail."""
    dist.all_reduce(on_gpu(1))
    tensors = [on_gpu(rank + 1) for _ in range(3)]
    well = [dist.all_reduce(tensors[0], async_op=True)]
    with dist._coalescing_manager(device=torch.device(GPU), async_ops=True) as window:
        dist.all_reduce(tensors[1])
        dist.all_reduce(tensors[2])
    window.wait()
    torch.accelerator.synchronize()
    sync("all have ended")
    if rank == 1:
        sync("the other one has seen its operation fail")
        return
    late = dist.all_reduce(on_gpu(1), async_op=True)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        late.wait(timedelta(seconds=20))
    assert not late.is_success()
    for work in [*well, *window.works]:
        assert work.is_completed() and work.is_success()
        assert TORCH < (2, 13) or work.exception() is None  # earlier torch cannot show it to Python
        assert work.wait()
    for tensor in tensors:
        assert_all(tensor, 3)
    sync("the other one has seen its operation fail")


LAUNCHES = pytest.mark.parametrize("block", [False, True], ids=["", "CUDA_LAUNCH_BLOCKING"])


@LAUNCHES
@on_simulated_gpus(3, op_timeout=60, dies=[1])
def test_a_rank_that_dies_is_named_within_a_second(rank, world, block):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    message = "rank 1 .* ended|rank 1 .*has ended|rank 1 .*died"
    with launches_block(block), pytest.raises(dist.DistBackendError, match=message):
        until_it_fails(dist.all_reduce(tensor, async_op=True).wait)
    assert time.monotonic() - began < 3
    torch.accelerator.synchronize()  # waits for the end of the kernel


@on_simulated_gpus(2)
def test_an_aborted_group_ends_its_kernels(rank, world):
    tensor = on_gpu(1)
    dist.all_reduce(tensor)
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)
        dist.group.WORLD.abort()
        torch.accelerator.synchronize()
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(tensor)
    sync("both")


@on_simulated_gpus(2)
def test_one_device_for_a_group(rank, world):
    dist.all_reduce(on_gpu(1))
    with pytest.raises(ValueError, match="keep the tensors of a group on one device"):
        dist.all_reduce(torch.ones(3, device=f"{GPU}:1"))
    tensor = torch.full((10,), rank + 1.0).to(f"{GPU}:1")
    slow_fill(tensor, rank + 2, 5)
    other = dist.new_group([0, 1])
    with torch.accelerator.device_index(1):
        dist.all_reduce(tensor, group=other)
    assert_all(tensor, 5)


@on_simulated_gpus(2)
def test_many_sizes(rank, world):
    """Packets, packets in two trips, chunks; odd counts, and addresses inside a pack."""
    for count in (1, 3, 100, 2047, 5000, 33_333, 262_144, 1_000_001):
        for offset in (0, 1):
            whole = torch.full((count + offset,), float(rank + 1)).to(GPU)
            dist.all_reduce(whole[offset:])
            host = whole.cpu()
            assert torch.equal(host[offset:], torch.full((count,), 3.0)), count
            assert torch.equal(host[:offset], torch.full((offset,), rank + 1.0)), count


@on_simulated_gpus(2)
def test_destroying_a_group_waits_for_its_kernels(rank, world):
    dist.all_reduce(on_gpu(1))
    tensor = torch.empty(1000, device=GPU)
    slow_fill(tensor, rank + 1, 300)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert_all(tensor, 3)


@on_simulated_gpus(2)
def test_a_rank_that_has_done_its_part_may_go(rank, world):
    """The root of a broadcast destroys its group before the other rank's device has begun the call."""
    tensor = on_gpu(rank + 1)
    dist.all_reduce(on_gpu(1))
    torch.accelerator.synchronize()
    if rank == 0:
        slow_fill(tensor, 5, 300)
    dist.broadcast(tensor, 1)
    if rank == 1:
        dist.destroy_process_group()
    assert_all(tensor, 2)


@LAUNCHES
@on_simulated_gpus(2)
def test_a_rank_that_goes_too_early_is_named(rank, world, block):
    dist.all_reduce(on_gpu(1))
    torch.accelerator.synchronize()
    sync("both are done")
    if rank == 1:
        dist.destroy_process_group()
        return
    began = time.monotonic()
    with launches_block(block), pytest.raises(dist.DistBackendError, match="rank 1 .*has left"):
        until_it_fails(dist.all_reduce(on_gpu(1), async_op=True).wait)
    assert time.monotonic() - began < 3


@on_simulated_gpus(2, op_timeout=10)
def test_messages_beside_a_collective_that_waits(rank, world):
    tensor, message = on_gpu(rank + 1), on_gpu(7)
    dist.all_reduce(on_gpu(1))  # the first call opens the device and needs all ranks
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        dist.recv(message, 1)
        dist.send(message + 1, 1)
    else:
        dist.send(message, 0)
        dist.recv(message, 0)
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert_all(tensor, 3)
    assert_all(message, 7 + rank)


@on_simulated_gpus(2, op_timeout=20)
def test_a_barrier_does_not_pass_over_what_has_failed(rank, world):
    tensor = on_gpu(1)
    if rank == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, 0)
    with pytest.raises(dist.DistBackendError, match="mismatch"):
        dist.barrier()


@on_simulated_gpus(2, op_timeout=3)
def test_a_rank_that_does_not_come_to_open_its_device(rank, world):
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="rank 1 did not join"):
            dist.all_reduce(on_gpu(1))
        assert time.monotonic() - began < 5
    sync("after the other one's time")


@on_simulated_gpus(2, op_timeout=20)
def test_opening_a_device_can_be_aborted(rank, world):
    if rank == 0:
        threading.Timer(0.5, dist.group.WORLD.abort).start()
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="aborted"):
            dist.all_reduce(on_gpu(1))
        assert time.monotonic() - began < 5
    sync("after the other one's time")


@on_simulated_gpus(2)
def test_a_forked_child_is_refused(rank, world):
    work = dist.all_reduce(on_gpu(1), async_op=True)
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        try:
            work.wait()
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@on_simulated_gpus(2)
def test_a_window_of_messages_and_collectives(rank, world):
    tensor, message = on_gpu(rank + 1), torch.empty(1000, device=GPU)
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    dist.all_reduce(on_gpu(1))
    backend._start_coalescing()
    options = dist.AllreduceOptions()
    backend.allreduce([tensor], options)
    backend.send([on_gpu(rank)], 1 - rank, 0)
    backend.recv([message], 1 - rank, 0)
    work = backend._end_coalescing()
    doubled = work.get_future().then(lambda done: [tensor * 2 for tensor in done.value()]).wait()
    assert_all(doubled[0], 6)
    assert_all(doubled[1], 2 * (1 - rank))


# --- several calls, few launches ----------------------------------------------------------------------------------


def launches_of(calls):
    torch.accelerator.synchronize()
    reset_counts()
    kept = calls()
    return counts()["launches"], kept


@on_simulated_gpus(2)
def test_coalesced_calls_share_launches(rank, world):
    dist.all_reduce(on_gpu(1))

    def sums(count, **named):
        tensors = [on_gpu(rank + i, 100 + i) for i in range(count)]

        def calls():
            with dist._coalescing_manager(async_ops=True, **named) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            return manager

        number, manager = launches_of(calls)
        manager.wait()
        for i, tensor in enumerate(tensors):
            assert_all(tensor, 2 * i + 1)
        return number

    assert sums(1) == 1
    assert sums(16) == 1
    assert sums(20) == 2  # a launch holds 16 calls
    assert sums(16, device=torch.device(GPU, 0)) == 1
    inputs, wholes = [on_gpu(rank + i) for i in range(5)], [on_gpu(0, 2000) for _ in range(5)]
    parts = [on_gpu(0) for _ in range(5)]

    def gather():
        with dist._coalescing_manager(device=torch.device(GPU, 0)):
            for whole, given in zip(wholes, inputs, strict=True):
                dist.all_gather_into_tensor(whole, given)

    def scatter():
        with dist._coalescing_manager():
            for part, whole in zip(parts, wholes, strict=True):
                dist.reduce_scatter_tensor(part, whole)

    assert launches_of(gather)[0] == 1
    assert launches_of(scatter)[0] == 1
    for i in range(5):
        assert_all(wholes[i][1000:], i + 1)
        assert_all(parts[i], 2 * (i + rank))


@on_simulated_gpus(2)
def test_a_window_of_many_calls_shares_launches(rank, world):
    """Independent calls of different collectives share launches; the order of the calls holds."""
    dist.all_reduce(on_gpu(1))
    tensors = [on_gpu(rank + i) for i in range(6)]
    whole, swapped, copied = on_gpu(0, 2000), on_gpu(0, 2000), on_gpu(0, 2000)

    def calls():
        with dist._coalescing_manager(device=torch.device(GPU, 0), async_ops=True) as manager:
            for i, tensor in enumerate(tensors):
                dist.broadcast(tensor, i % 2, async_op=True)
            dist.all_gather(list(whole.chunk(2)), tensors[0], async_op=True)  # reads the result of the broadcast
            dist.all_to_all_single(swapped, copied, async_op=True)
            assert counts()["launches"] == 0, "nothing was queried"
        return manager

    number, manager = launches_of(calls)
    assert number == 2
    manager.wait()
    for i, tensor in enumerate(tensors):
        assert_all(tensor, i + i % 2)
    assert_all(whole, 0)


@on_simulated_gpus(2)
def test_queries_in_a_window_do_not_wait_for_its_end(rank, world):
    dist.all_reduce(on_gpu(1))
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    set_delays(6, 300)

    def in_a_window(query):
        tensor, other = on_gpu(rank + 1), on_gpu(rank + 2)
        backend._start_coalescing()
        work = backend.allreduce([tensor], dist.AllreduceOptions())
        query(work)
        assert counts()["launches"] == 1
        later = backend.allreduce([other], dist.AllreduceOptions())
        dist.broadcast(tensor, 0)  # synchronous: later work on the stream sees the result
        assert_all(tensor, 3)
        backend._end_coalescing().wait()
        assert_all(other, 5)
        del later

    def until_completed(work):
        while not work.is_completed():
            time.sleep(0.001)

    for query in (
        lambda work: work.wait(),
        until_completed,
        lambda work: work.get_future().wait(),
        lambda work: dist.barrier(),
        lambda work: [dist.isend(on_gpu(1), 1 - rank), dist.irecv(on_gpu(0), 1 - rank)][1].wait(),
        lambda work: threading.Thread(target=work.wait).start() or until_completed(work),
    ):
        torch.accelerator.synchronize()
        reset_counts()
        in_a_window(query)


@on_simulated_gpus(2)
def test_a_window_that_an_exception_leaves_open_runs_all(rank, world):
    """The window is never closed; its calls still run."""
    dist.all_reduce(on_gpu(1))
    tensor, last = on_gpu(rank + 1), on_gpu(rank + 1)
    with pytest.raises(ZeroDivisionError), dist._coalescing_manager(device=torch.device(GPU, 0)):
        dist.broadcast(tensor, 0, async_op=True)
        1 / 0  # noqa: B018
    dist.broadcast(last, 1)
    assert_all(tensor, 1)
    assert_all(last, 2)
    dist.broadcast(tensor.fill_(rank), 1, async_op=True)
    dist.destroy_process_group()
    assert_all(tensor, 1)


@on_simulated_gpus(2)
def test_postponed_call_of_an_aborted_group_raises(rank, world):
    dist.all_reduce(on_gpu(1))
    backend = dist.group.WORLD._get_backend(torch.device(GPU))
    backend._start_coalescing()
    work = backend.allreduce([on_gpu(1)], dist.AllreduceOptions())
    sync("both")
    backend.abort()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        work.wait()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        backend._end_coalescing().wait()
    sync("both have")


# --- completion ----------------------------------------------------------------------------------------------------


@on_simulated_gpus(2)
def test_hooks_are_called_at_the_end_on_the_device(rank, world):
    """A launch is not the end, and a duration is the time on the device."""
    group, infos = dist.new_group(), []
    group._enable_collectives_timing()
    # torch registers hooks only with the default backend.
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    dist.all_reduce(on_gpu(1), group=group)
    group._register_on_completion_hook(infos.append)
    tensor = on_gpu(rank + 1)
    with held():
        works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(3)]
        dist.all_reduce(tensor, group=group)
        time.sleep(0.1)
        assert not infos
    eventually(lambda: len(infos) == 4, 30)
    for work in works:
        assert 0 <= work._get_duration() < 1e6
    if rank == 1:
        slow_fill(tensor, 1, 200)  # keeps the peer's kernel waiting
    work = dist.all_reduce(tensor, group=group, async_op=True)
    eventually(lambda: len(infos) == 5, 30)
    if rank == 0:
        assert work._get_duration() > 100
    assert work._get_duration() == pytest.approx(infos[-1].active_duration.total_seconds() * 1e3, rel=0.01)


# --- ranks that are threads of one process, on one device


def stream_of(i):
    """One stream for all threads, in an object per thread: such an object stores the previous current stream."""
    stream = STREAMS.setdefault(i, torch.Stream(GPU))
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


@on_simulated_threads(2, 3)
def test_threads_on_streams_of_their_own(pg, rank, world):
    """Synchronous and asynchronous calls, and streams that other threads reuse after all calls have ended."""
    options = dist.AllreduceOptions()
    for round_ in range(12):
        options.asyncOp = round_ % 3 == 0
        with stream_of((rank + round_) % world):
            tensor = torch.full((1000,), rank + round_, device=GPU)
            finish(pg.allreduce([tensor], options), options.asyncOp)
            gathered = torch.empty(world * 1000, dtype=tensor.dtype, device=GPU)
            pg._allgather_base(gathered, tensor).wait()
            expected = sum(r + round_ for r in range(world))
            assert_all(tensor, expected)
            assert_all(gathered, expected)
            pg.barrier().wait()


@on_simulated_threads(2)
def test_two_ranks_on_one_stream_get_an_error(pg, rank, world):
    """The second rank gets the error, both behind the other's call on the stream and after a wait for its end."""
    options = dist.AllreduceOptions()
    for options.asyncOp in (True, False, True):
        with stream_of(rank):
            pg.allreduce([torch.ones(1, device=GPU)]).wait()  # the first call opens the device
            tensor = torch.full((10,), rank + 1, device=GPU)
            if rank == 0:
                finish(pg.allreduce([tensor], options), options.asyncOp)
                TURN.release()
            else:
                assert TURN.acquire(timeout=20)
                second = r"#\d+ of rank 1 would begin behind #\d+ of rank 0.*one stream"
                with stream_of(0), pytest.raises(ValueError, match=second):
                    pg.allreduce([tensor], options)
                finish(pg.allreduce([tensor], options), options.asyncOp)  # the group still works
            assert_all(tensor, 3)


@on_simulated_gpus(2, 3)
def test_nvx_doctor_reports_whether_kernels_serve_and_are_exact(rank, world):
    assert doctor.exact_on_device(torch.device(GPU)) == {"kernels": True, "wrong": []}


@on_fake_gpus(2, pool="simulated_gpus_without_kernels")
def test_nvx_doctor_reports_that_kernels_do_not_serve(rank, world):
    assert doctor.exact_on_device(torch.device(GPU)) == {"kernels": False, "wrong": []}
