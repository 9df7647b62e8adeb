"""Works, groups, threads and interrupts in adverse orders: no hang, no crash, no use of a freed group."""

import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import make_backend, on_ranks, on_threads, only_nvx, sync
from reference import assert_same, small_numbers

pytestmark = only_nvx
CPU = torch.device("cpu")


# --- destroyed while busy ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_destroy_with_operations_that_cannot_end(rank, world):
    """The peer never comes: destroy returns immediately, and waiting threads get an error."""
    group = dist.new_group()
    if rank == 0:
        works = [dist.all_reduce(torch.ones(70_001), group=group, async_op=True) for _ in range(3)]
        works.append(dist.irecv(torch.ones(70_001), 1, group=group))
        works.append(dist.isend(torch.ones(2_000_003), 1, group=group))
        time.sleep(0.1)
        started = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - started < 1.5
        for work in works[:4]:
            with pytest.raises(dist.DistBackendError):
                work.wait()
        assert time.monotonic() - started < 3.0
    sync("done")
    dist.barrier()


@on_ranks(2)
def test_works_that_outlive_their_group(rank, world):
    group = dist.new_group()
    tensor = torch.ones(70_001)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    future = work.get_future()
    late = dist.all_reduce(tensor, group=group, async_op=True)
    late.wait()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    work.wait()
    assert future.wait()[0].unique().tolist() == [4.0]
    assert work.is_completed() and work.is_success()
    del late


@on_ranks(2)
def test_the_backend_after_shutdown(rank, world):
    group = dist.new_group()
    backend = group._get_backend(CPU)
    dist.all_reduce(torch.ones(3), group=group)
    sync("used")
    backend.shutdown()
    for call in (lambda: backend.allreduce([torch.ones(3)]).wait(), lambda: backend.barrier().wait()):
        started = time.monotonic()
        with pytest.raises((dist.DistBackendError, ValueError), match="^nvx: .*destroyed"):
            call()
        assert time.monotonic() - started < 1.0
    backend.shutdown()
    backend.abort()


@on_ranks(2)
def test_the_last_reference_goes_in_a_callback(rank, world):
    """The thread that completes the operation frees the group."""
    for turn in range(20):
        store = dist.PrefixStore(f"own-{turn}", dist.distributed_c10d._get_default_store())
        box = [make_backend(store, rank, world)]
        freed = threading.Event()

        def free(_, box=box, freed=freed):
            box.clear()
            freed.set()

        box[0].allreduce([torch.ones(1000)]).get_future().then(free)
        assert freed.wait(10)
    gc.collect()


@on_ranks(2)
def test_destroy_from_another_thread(rank, world):
    group = dist.new_group()
    if rank == 0:
        errors = []

        def stuck():
            try:
                dist.all_reduce(torch.ones(3), group=group)
            except Exception as error:  # torch's own logging of the call fails because the group is gone
                errors.append(error.__context__ or error)

        thread = threading.Thread(target=stuck)
        thread.start()
        time.sleep(0.2)
        dist.destroy_process_group(group)
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(errors[0], dist.DistBackendError)
        assert "destroyed" in str(errors[0])
    sync("done")


# --- threads ----------------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_messages_in_one_thread_and_collectives_in_another(rank, world):
    """One group, two threads: messages and collectives do not affect each other."""
    after, before = (rank + 1) % world, (rank - 1) % world
    failures = []

    def messages():
        try:
            for turn in range(60):
                count = (1, 1000, 70_001)[turn % 3]
                send = dist.isend(torch.full((count,), float(rank + turn)), after, tag=turn % 4)
                got = torch.zeros(count)
                dist.recv(got, before, tag=turn % 4)
                send.wait()
                assert_same(got, torch.full((count,), float(before + turn)), f"message {turn}")
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=messages)
    thread.start()
    for turn in range(60):
        tensor = small_numbers(torch.float32, 5000, rank, turn)
        dist.all_reduce(tensor, async_op=turn % 2 == 0)
        dist.barrier()
        want = sum(small_numbers(torch.float32, 5000, r, turn) for r in range(world))
        assert_same(tensor, want, f"turn {turn}")
    thread.join()
    assert not failures, failures


@on_ranks(2)
def test_groups_made_while_others_work(rank, world):
    """Makes new groups while another thread keeps a group busy."""
    busy = dist.new_group()
    stop = threading.Event()
    turns = []

    def work():
        while True:
            more = torch.tensor([0 if stop.is_set() else 1])
            dist.all_reduce(more, dist.ReduceOp.MIN, group=busy)
            turns.append(1)
            if not more.item():
                return

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        group = dist.new_group()
        total = torch.ones(1000)
        dist.all_reduce(total, group=group)
        assert total.unique().tolist() == [2.0]
        dist.destroy_process_group(group)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()
    assert len(turns) > 10


@on_threads(7, 13)
def test_more_ranks_than_cores(pg, rank, world):
    for count in (1, 1000, 40_001):
        inputs = [small_numbers(torch.float32, count, r) for r in range(world)]
        tensor = inputs[rank].clone()
        pg.allreduce([tensor]).wait()
        assert_same(tensor, sum(inputs), f"allreduce {count}")
        outputs = [torch.zeros(count) for _ in range(world)]
        pg.allgather([outputs], [inputs[rank]]).wait()
        assert_same(torch.stack(outputs), torch.stack(inputs), f"allgather {count}")
        parts = [torch.full((count,), float(rank * world + p)) for p in range(world)]
        pg.alltoall(outputs, parts).wait()
        assert [int(t[0]) for t in outputs] == [r * world + rank for r in range(world)]
        pg.broadcast([tensor]).wait()
        pg.barrier().wait()


# --- hooks ------------------------------------------------------------------------------------------------------------


def fail(*_):
    raise ZeroDivisionError("of the hook's own")


@on_ranks(2)
def test_completion_hooks_that_raise(rank, world):
    """They affect neither the operation, nor the lane, nor messages, nor the process."""
    infos = []

    def hook(info):
        infos.append(info)
        fail()

    group = dist.new_group()
    group._register_on_completion_hook(hook)
    with pytest.raises(RuntimeError, match="hook already registered"):
        group._register_on_completion_hook(hook)
    for turn in range(10):
        total = torch.ones(3)
        work = dist.all_reduce(total, group=group, async_op=turn % 2 == 0)
        if turn % 2 == 0:
            work.get_future().add_done_callback(fail)
            work.wait()
        assert total.tolist() == [2.0] * 3
        if rank == 0:
            dist.send(total, 1, group)
        else:
            dist.recv(total, 0, group)
    group._wait_for_pending_works()
    assert len(infos) == 20
    dist.barrier()
