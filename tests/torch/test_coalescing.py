"""Coalescing windows and their single `Work`; works whose callbacks wait for them."""

import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import warm
from ranks import TORCH, eventually, on_ranks, only_nvx, sync

pytestmark = only_nvx
CPU = torch.device("cpu")


def window(calls, group=None):
    """The single `Work` of the calls in a window."""
    group = group or dist.group.WORLD
    group._start_coalescing(CPU)
    for call in calls:
        call()
    return group._end_coalescing(CPU)


# --- the end of a window's work ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_window_ends_without_a_waiter(rank, world):
    sums = [torch.ones(3) for _ in range(3)]
    there, here = torch.full((3,), float(rank)), torch.zeros(3)
    calls = [lambda t=t: dist.all_reduce(t, async_op=True) for t in sums]
    calls += [lambda: dist.isend(there, 1 - rank), lambda: dist.irecv(here, 1 - rank)]
    work = window(calls)
    seen = []
    work.get_future().add_done_callback(lambda f: seen.append([t.tolist() for t in f.value()]))
    eventually(work.is_completed)
    eventually(lambda: seen)
    assert work.is_success()
    assert seen == [[[2.0] * 3] * 3 + [[1.0 - rank] * 3]], seen
    assert [t.data_ptr() for t in work.result()] == [t.data_ptr() for t in [*sums, here]]
    for _ in range(3):
        assert work.wait()


@on_ranks(2)
def test_a_window_is_over_when_its_works_were_over_before(rank, world):
    def sum_and_wait():
        dist.all_reduce(torch.ones(3), async_op=True).wait()

    work = window([sum_and_wait] * 3)
    assert work.is_completed() and work.is_success()
    assert [t.tolist() for t in work.get_future().wait()] == [[2.0] * 3] * 3


@on_ranks(2)
def test_a_window_that_fails_has_ended(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        work = window([lambda tag=tag: dist.irecv(torch.ones(3), 1, group, tag=tag) for tag in range(3)], group)
        future = work.get_future()
        eventually(work.is_completed)
        assert not work.is_success()
        assert TORCH < (2, 13) or "timed out" in str(work.exception())  # earlier torch cannot show it to Python
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match="timed out"):
                work.wait()
        with pytest.raises(RuntimeError, match="timed out"):
            future.wait()
    sync("failed")


@on_ranks(2)
def test_many_threads_wait_for_one_window(rank, world):
    for _ in range(20):
        calls = []
        work = window([lambda: dist.all_reduce(torch.ones(70_001), async_op=True) for _ in range(4)])
        work.get_future().add_done_callback(lambda f, calls=calls: calls.append(1))
        threads = [threading.Thread(target=work.wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert work.is_completed()
        eventually(lambda calls=calls: calls)
        assert calls == [1]


@on_ranks(2)
def test_abort_ends_a_window(rank, world):
    group = dist.new_group()
    if rank == 0:
        work = window([lambda tag=tag: dist.irecv(torch.ones(3), 1, group, tag=tag) for tag in range(3)], group)
        group._get_backend(CPU).abort()
        with pytest.raises(dist.DistBackendError, match="abort"):
            work.wait()
        eventually(work.is_completed)  # the first message raises, and the others end a moment later
        assert not work.is_success()
    sync("aborted")
    dist.barrier()


# --- waiting for a work that is running its callbacks ----------------------------------------------------------------

ENDS = {
    "collective": lambda other: dist.all_reduce(torch.ones(70_001), async_op=True),
    "message": lambda other: [dist.isend(torch.ones(3), other), dist.irecv(torch.ones(3), other)][1],
    "window": lambda other: window([lambda: dist.all_reduce(torch.ones(70_001), async_op=True) for _ in range(3)]),
    "window of messages": lambda other: window(
        [lambda: dist.irecv(torch.ones(3), other), lambda: dist.isend(torch.ones(3), other)]
    ),
}


@pytest.mark.parametrize("ending", ENDS)
@on_ranks(2)
def test_a_callback_may_wait_for_its_own_work(rank, world, ending):
    """With and without a timeout, from its own callback and from a callback of a work that it waits for."""
    for turn in range(10):
        dist.barrier()
        work = ENDS[ending](1 - rank)
        printed = []

        def query_work(_, work=work, printed=printed):
            printed.append(work.wait())
            printed.append(work.wait(timedelta(seconds=20)))
            printed.append(work.is_completed())
            dist.group.WORLD._wait_for_pending_works()  # waits for all works but this one

        future = work.get_future().then(query_work)
        if turn % 2:
            work.wait()
        future.wait()
        assert printed == [True] * 3


@on_ranks(2)
def test_a_callback_may_wait_for_its_own_failure(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        printed = []

        def query_work(_):
            try:
                work.wait()
            except dist.DistBackendError as error:
                printed.append(str(error))

        work.get_future().add_done_callback(query_work)
        eventually(lambda: printed)
        assert "rank 1" in printed[0]
    sync("failed")


@on_ranks(2)
def test_a_callback_may_wait_for_the_work_before_it(rank, world):
    first = dist.all_reduce(torch.ones(3), async_op=True)
    second = dist.all_reduce(torch.ones(3), async_op=True)
    inner = []
    second.get_future().add_done_callback(lambda f: inner.append(first.wait()))
    future = first.get_future().then(lambda f: second.wait())
    future.wait()
    eventually(lambda: inner == [True])


# --- windows that an exception leaves open ----------------------------------------------------------------------------


def leave_open(group=None):
    with pytest.raises(ZeroDivisionError), dist.distributed_c10d._coalescing_manager(group, CPU):
        dist.isend(torch.ones(3), 1 - dist.get_rank(), group)
        dist.irecv(torch.zeros(3), 1 - dist.get_rank(), group)
        raise ZeroDivisionError
    # torch collects the window's calls there.
    dist.distributed_c10d._world.pg_coalesce_state.pop(group or dist.group.WORLD)


def all_goes_on(world):
    for count in (3, 70_001):
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [float(world)]
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait()
        assert tensor.unique().tolist() == [float(world**2)]
        assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0].unique().tolist() == [float(world**3)]
    here, there, other = torch.ones(3), torch.zeros(3), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, here, other), dist.P2POp(dist.irecv, there, other)]):
        work.wait()
    assert there.tolist() == [1.0] * 3
    dist.barrier()


@on_ranks(2)
def test_calls_after_an_open_window_run(rank, world):
    for _ in range(3):
        leave_open()
        all_goes_on(world)


@on_ranks(2)
def test_an_open_window_keeps_no_tensors_for_ever(rank, world):
    """An open window holds only tensors of calls that nobody waited for; a wait releases them."""
    leave_open()
    kept = []
    for turn in range(500):
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor.untyped_storage()))
        if turn % 3 == 0:
            dist.all_reduce(tensor)
        elif turn % 3 == 1:
            dist.all_reduce(tensor, async_op=True).wait()
        else:
            dist.all_reduce(tensor, async_op=True).get_future().wait()
        del tensor
    assert sum(ref() is not None for ref in kept) < 200
    group = dist.group.WORLD
    group._start_coalescing(CPU)
    assert group._end_coalescing(CPU) is None


@on_ranks(2)
def test_a_large_window_forgets_nothing(rank, world):
    tensors = [torch.ones(3) for _ in range(300)]
    work = window([lambda t=t: dist.all_reduce(t, async_op=True) for t in tensors])
    assert work.wait()
    assert len(work.result()) == 300
    assert all(t.tolist() == [2.0] * 3 for t in tensors)


@on_ranks(2)
def test_another_threads_window_changes_nothing_here(rank, world):
    group = dist.new_group()
    backend = group._get_backend(CPU)
    thread = threading.Thread(target=lambda: group._start_coalescing(CPU))
    thread.start()
    thread.join()
    options = dist.AllreduceOptions()
    options.asyncOp = False
    assert backend.allreduce([torch.ones(3)], options) is None or TORCH >= (2, 15)


def test_an_open_window_is_logged(tmp_path):
    script = (
        "import sys, nvx, torch, torch.distributed as dist\n"
        "dist.init_process_group('nvx', init_method='file://' + sys.argv[1], rank=0, world_size=1)\n"
        "group, cpu = dist.group.WORLD, torch.device('cpu')\n"
        "group._start_coalescing(cpu)\n"
        "group._get_backend(cpu).allreduce([torch.ones(3)])\n"
        "group._start_coalescing(cpu)\n"
        "assert group._end_coalescing(cpu) is None\n"
        "group._start_coalescing(cpu)\n"
        "group._end_coalescing(cpu)\n"
    )
    ran = warm.run(["-c", script, str(tmp_path / "store")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    printed = [line for line in ran.stderr.splitlines() if "coalescing scope" in line]
    assert len(printed) == 1 and "the 1 operations" in printed[0], ran.stderr
