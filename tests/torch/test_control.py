"""Control operations: barriers, timeouts, sequence numbers, state, abort and shutdown, objects."""

import re
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, TORCH, on_ranks, only_nvx, sync

CPU = torch.device("cpu")


def own_backend(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


def late(seconds, call):
    """Asserts when the call raises `DistBackendError`, and returns the error's text."""
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError) as raised:
        call()
    took = time.monotonic() - started
    assert seconds * 0.9 < took < seconds * 1.1 + 1.0, f"raised after {took:.2f} s instead of {seconds} s"
    return str(raised.value)


# --- barriers -----------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_barrier_waits_for_all_ranks(rank, world):
    store = dist.distributed_c10d._get_default_store()
    for turn in range(1, 20):
        if rank == turn % world:
            time.sleep(0.01)
        store.add("arrived", 1)
        dist.barrier()
        assert store.add("arrived", 0) >= turn * world
        dist.barrier()


def monitored(group, seconds, wait_all_ranks=False):
    (group or dist.group.WORLD).monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=wait_all_ranks)


@on_ranks(2, 4)
def test_monitored_barrier(rank, world):
    for _ in range(5):
        monitored(None, 10)
    if TORCH >= (2, 14) or not OVER_NVX:
        dist.monitored_barrier(timeout=timedelta(seconds=10))


@pytest.mark.parametrize("wait_all_ranks", [False, True])
@on_ranks(4)
def test_monitored_barrier_names_the_missing(rank, world, wait_all_ranks):
    group = dist.new_group()
    if rank in (0, 2):
        with pytest.raises(RuntimeError) as raised:
            monitored(group, 0.5, wait_all_ranks)
        text = str(raised.value)
        if rank == 0:
            missing = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
            assert f"{missing} failed to pass monitoredBarrier" in text, text
    sync("done")


@only_nvx
@pytest.mark.parametrize("span", [timedelta.max, timedelta(0)])
@on_ranks(2)
def test_monitored_barrier_of_a_group_without_a_timeout(rank, world, span):
    import nvx

    group = dist.new_group(timeout=span)
    for barrier in (
        nvx.monitored_barrier,
        lambda of: own_backend(of).monitored_barrier(),
        lambda of: nvx.monitored_barrier(of, timedelta.max),
    ):
        if rank == 1:
            time.sleep(0.2)
        barrier(group)


# --- timeouts -----------------------------------------------------------------------------------------------


@only_nvx
@on_ranks(3)
def test_timeout_of_a_group(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank != 1:
        text = late(1.0, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert text.startswith("nvx: ")
        first = text.splitlines()[0]
        assert "rank 1" in first and "all_reduce" in first, text
    sync("done")


@only_nvx
@on_ranks(2)
def test_timeout_of_an_asynchronous_operation(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert "rank 1" in late(1.0, work.wait)
        assert not work.is_success()
        assert TORCH < (2, 13) or work.exception() is not None  # earlier torch cannot show it to Python
        with pytest.raises(RuntimeError, match="rank 1"):
            work.get_future().wait()
    sync("done")


@only_nvx
@on_ranks(2)
def test_timeout_of_one_operation(rank, world):
    """The timeout in a call's options applies to that call."""
    backend = own_backend(dist.new_group(timeout=timedelta(seconds=60)))
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.7)
        options.asyncOp = True
        assert "rank 1" in late(0.7, lambda: backend.allreduce([torch.ones(3)], options).wait())
    sync("done")


@only_nvx
@on_ranks(2)
def test_one_operation_without_a_timeout(rank, world):
    """`timedelta.max` in a call's options means no timeout, not the group's."""
    backend = own_backend(dist.new_group())
    backend.set_timeout(timedelta(seconds=0.3))
    options = dist.AllreduceOptions()
    options.timeout = timedelta.max
    options.asyncOp = True
    if rank == 1:
        time.sleep(0.8)
    backend.allreduce([torch.ones(3)], options).wait()


@only_nvx
@on_ranks(2)
def test_timeout_of_a_wait(rank, world):
    """`wait(timeout)` ends the wait but not the operation, which completes when the peer comes."""
    groups = [dist.new_group() for _ in range(5)]
    tensors = [torch.ones(3) for _ in groups]
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
        for work in works:
            printed = late(0.2, lambda: work.wait(timedelta(seconds=0.2)))  # noqa: B023
            assert re.search(r"after 200 ms; all_reduce of group \d+ on rank 0 goes on\. Next: ", printed), printed
        store.set("gave up", "1")
    else:
        store.wait(["gave up"], timedelta(seconds=20))
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        assert tensor.tolist() == [2.0] * 3


@only_nvx
@on_ranks(2)
def test_timeout_of_a_receive_names_the_sender(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        first = late(1.0, lambda: dist.recv(torch.ones(3), 1, group=group, tag=7)).splitlines()[0]
        assert "timed out in recv(f32, 3 elements, from rank 1, tag 7)" in first, first
        assert "waiting for rank 1 (pid" in first, first
    sync("done")


@only_nvx
@pytest.mark.parametrize("how", ["nvx.set_timeout", "backend", "torch"])
@on_ranks(2)
def test_timeout_set_later(rank, world, how):
    import nvx

    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(torch.ones(3), group=group)
    if how == "nvx.set_timeout":
        nvx.set_timeout(timedelta(seconds=1), group)
    elif how == "backend":
        own_backend(group).set_timeout(timedelta(seconds=1))
    elif TORCH >= (2, 15):
        dist.set_timeout(timedelta(seconds=1), group)
    else:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
        if TORCH < (2, 14):  # it ignores other backends than its own, which is why there is nvx.set_timeout
            assert any("Set timeout is now only supported" in str(warning.message) for warning in seen), seen
            assert own_backend(group).options._timeout == timedelta(seconds=60)
            return
    if rank == 0:
        late(1.0, lambda: dist.all_reduce(torch.ones(3), group=group))
    sync("done")


@only_nvx
@on_ranks(2)
def test_a_late_peer_is_not_a_failure(rank, world):
    for _ in range(3):
        if rank == 1:
            time.sleep(0.3)
        tensor = torch.ones(1000)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [2.0]


# --- state --------------------------------------------------------------------------------------------------


@only_nvx
@on_ranks(2)
def test_sequence_numbers(rank, world):
    group = dist.new_group()
    backend = own_backend(group)
    backend._set_sequence_number_for_group()
    start = backend._get_sequence_number_for_group()
    for number in range(1, 6):
        dist.all_reduce(torch.ones(3), group=group, async_op=number % 2 == 0)
        assert backend._get_sequence_number_for_group() == start + number
    starts = [None] * world
    dist.all_gather_object(starts, start)
    assert starts == [start] * world
    if TORCH >= (2, 14):
        assert group._get_sequence_number_for_group() == backend._get_sequence_number_for_group()


@only_nvx
@on_ranks(2)
def test_get_error_of_a_healthy_and_a_failed_group(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    backend = own_backend(group)
    assert "SUCCESS" in str(backend.get_error())
    if rank == 0:
        late(0.5, lambda: dist.all_reduce(torch.ones(3), group=group))
        assert "TIMEOUT" in str(backend.get_error())
        started = time.monotonic()
        for call in (lambda: dist.all_reduce(torch.ones(3), group=group), lambda: dist.barrier(group)):
            with pytest.raises(dist.DistBackendError, match="^nvx: "):
                call()
        assert time.monotonic() - started < 0.2, "a failed group must say so at once"
    sync("done")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


# --- abort and shutdown -------------------------------------------------------------------------------------


@only_nvx
@on_ranks(2)
def test_abort_frees_a_stuck_thread(rank, world):
    """Aborts a stuck group from another thread: a local call, immediate, and valid twice."""
    group = dist.new_group()
    if rank == 0:
        caught = []

        def stuck():
            try:
                dist.all_reduce(torch.ones(3), group=group)
            except dist.DistBackendError as error:
                caught.append((time.monotonic(), str(error)))

        thread = threading.Thread(target=stuck)
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        started = time.monotonic()
        own_backend(group).abort()
        own_backend(group).abort()
        assert time.monotonic() - started < 1.0
        thread.join(5)
        assert not thread.is_alive()
        assert caught[0][0] - started < 1.0
        assert "abort" in caught[0][1], caught[0][1]
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.barrier(group)
    sync("done")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@only_nvx
@on_ranks(2)
def test_abort_frees_asynchronous_operations_and_windows(rank, world):
    group = dist.new_group()
    if rank == 0:
        works = [dist.all_reduce(torch.ones(70_001), group=group, async_op=True) for _ in range(3)]
        works.append(dist.irecv(torch.ones(3), 1, group=group))
        own_backend(group).abort()
        for work in works:
            with pytest.raises(dist.DistBackendError, match="abort"):
                work.wait()
        group._start_coalescing(CPU)
        group._end_coalescing(CPU)
    sync("done")


@only_nvx
@on_ranks(2)
def test_abort_process_group(rank, world):
    """torch's own call aborts every group; the same process then makes new groups."""
    dist.all_reduce(torch.ones(3))
    dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("nvx", store=dist.PrefixStore("second life", store), rank=rank, world_size=world)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@only_nvx
@on_ranks(2)
def test_destroy_does_not_wait_for_the_others(rank, world):
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 1:
        time.sleep(1.0)
    started = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - started < 0.5


@only_nvx
@on_ranks(2)
def test_an_operation_after_the_peer_left_reports_it(rank, world):
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        dist.destroy_process_group(group)
        store.set("left", "1")
    else:
        store.wait(["left"], timedelta(seconds=20))
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="^nvx: .*rank 1"):
            dist.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - started < 2.0
    sync("done")


@only_nvx
@on_ranks(2)
def test_results_that_were_sent_are_not_lost_when_the_sender_leaves(rank, world):
    """The last operation completes on every rank, even if the first rank to finish destroys the group immediately."""
    for _ in range(20):
        group = dist.new_group()
        tensor = torch.ones(70_001)
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 0, group=group)
        dist.destroy_process_group(group)
        assert tensor.unique().tolist() == [2.0]


# --- objects ------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_object_collectives(rank, world):
    objects = [{"rank": r, "text": "x" * (r * 1000)} for r in range(world)]
    gathered = [None] * world
    dist.all_gather_object(gathered, objects[rank])
    assert gathered == objects
    gathered = [None] * world if rank == 1 else None
    dist.gather_object(objects[rank], gathered, dst=1)
    assert gathered in (objects, None)
    output = [None]
    dist.scatter_object_list(output, objects if rank == 0 else None, src=0)
    assert output == [objects[rank]]
    shared = list(objects) if rank == world - 1 else [None] * world
    dist.broadcast_object_list(shared, src=world - 1)
    assert shared == objects


# --- long timeouts, and pending works --------------------------------------------------------------------------


@only_nvx
@pytest.mark.parametrize("span", [timedelta.max, timedelta(days=100_000_000), timedelta(days=400)])
@on_ranks(2)
def test_timeouts_as_long_as_can_be(rank, world, span):
    """A timeout beyond the range of the clock means no timeout, not an expired one."""
    group = dist.new_group(timeout=span)
    for _ in range(2):
        if rank == 1:
            time.sleep(0.3)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        assert work.wait(span)
        if rank == 1:
            time.sleep(0.3)
            dist.send(torch.ones(3), 0, group=group)
        else:
            assert dist.irecv(torch.ones(3), 1, group=group).wait(span)
        own_backend(group).set_timeout(span)
        if span != timedelta.max:  # torch makes it negative
            group.monitored_barrier(span)


@only_nvx
@on_ranks(2)
def test_negative_timeouts_are_refused(rank, world):
    """Zero means no timeout, like with gloo. A negative value is an error and makes no group."""
    import nvx

    for make in (
        lambda: dist.new_group(timeout=timedelta(seconds=-5)),
        lambda: dist.new_group(pg_options=nvx.Options(timeout=timedelta(milliseconds=-1))),
        lambda: nvx.set_timeout(timedelta(seconds=-5)),
        lambda: nvx.monitored_barrier(timeout=timedelta(seconds=-5)),
    ):
        with pytest.raises(ValueError, match="a timeout of -[0-9.]+ s is negative"):
            make()
    nvx.set_timeout(timedelta(0))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world


@only_nvx
@on_ranks(2)
def test_future_of_a_window_that_fails_ends(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        group._start_coalescing(CPU)
        for tag in range(3):
            dist.irecv(torch.ones(3), 1, group, tag=tag)
        future = group._end_coalescing(CPU).get_future()
        with pytest.raises(RuntimeError, match="timed out"):
            future.wait()
    sync("failed")


@only_nvx
@on_ranks(2)
def test_timeout_of_a_window_counts_once(rank, world):
    if rank == 0:
        group = dist.group.WORLD
        group._start_coalescing(CPU)
        for tag in range(4):
            dist.irecv(torch.ones(3), 1, tag=tag)
        work = group._end_coalescing(CPU)
        late(0.5, lambda: work.wait(timedelta(seconds=0.5)))
    sync("late")
    if rank == 1:
        for tag in range(4):
            dist.send(torch.ones(3), 0, tag=tag)
    else:
        work.wait()


@only_nvx
@on_ranks(2)
def test_pending_works_are_waited_for(rank, world):
    """Collectives, sends and receives, and their callbacks."""
    seen = []
    if rank == 1:
        time.sleep(0.5)
    works = [dist.all_reduce(torch.ones(3), async_op=True), dist.isend(torch.ones(2_000_003), 1 - rank)]
    works.append(dist.irecv(torch.ones(2_000_003), 1 - rank))
    for work in works:
        work.get_future().add_done_callback(lambda f: seen.append(1))
    dist.group.WORLD._wait_for_pending_works()
    assert all(work.is_completed() for work in works)
    assert len(seen) == 3


@only_nvx
@on_ranks(2)
def test_set_timeout_while_operations_are_issued(rank, world):
    group = dist.new_group()
    done = threading.Event()

    def change():
        while not done.is_set():
            own_backend(group).set_timeout(timedelta(seconds=30))
            assert own_backend(group).options._timeout == timedelta(seconds=30)

    own_backend(group).set_timeout(timedelta(seconds=30))
    thread = threading.Thread(target=change)
    thread.start()
    for turn in range(500):
        dist.all_reduce(torch.ones(3), group=group, async_op=turn % 5 == 0)
    done.set()
    thread.join()
