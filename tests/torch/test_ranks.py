"""The pool of ranks: a fault in a rank must fail the test and name the rank and the place."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, on_ranks, on_threads


@on_ranks(2, 3, 4)
def test_a_fresh_group_each_time(rank, world):
    assert dist.get_rank() == rank
    assert dist.get_world_size() == world
    assert dist.get_backend() == BACKEND
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == world * (world + 1) / 2


@pytest.mark.parametrize("store", ["file", "tcp", "prefix"])
@on_ranks(2)
def test_stores(rank, store):
    tensor = torch.tensor([rank])
    dist.broadcast(tensor, 1)
    assert tensor.item() == 1


@on_threads(3)
def test_threads(pg, rank, world):
    tensor = torch.tensor([rank])
    pg.allreduce([tensor]).wait()
    assert tensor.item() == world * (world - 1) // 2


def raises_on_one(rank):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def dies_on_one(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def raises(where):
    if where == "a thread":
        thread = threading.Thread(target=raises, args=["here"])
        thread.start()
        thread.join()
    else:
        raise KeyError("the reason")


def hangs_on_one(rank):
    if rank == 1:
        time.sleep(100)


def pid_of_rank():
    return os.getpid()


def test_ranks_stay_alive(ranks):
    assert ranks.run(pid_of_rank, world=3) == ranks.run(pid_of_rank, world=3)


def test_results_come_back_by_rank(ranks):
    pids = ranks.run(pid_of_rank, world=3)
    assert len(set(pids)) == 3


def test_exception_names_the_rank(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 1 of 2: Traceback.*KeyError: 'the reason'"):
        ranks.run(raises_on_one, world=2)
    ranks.run(pid_of_rank, world=2)


def test_death_names_the_rank_and_the_dead_are_replaced(ranks):
    with pytest.raises(pytest.fail.Exception, match="rank 2 of 3: should have died"):
        ranks.run(dies_on_one, world=3, dies={1, 2})
    pids = ranks.run(dies_on_one, world=2, dies={1}, kind="bare")
    assert pids[1] is None
    assert ranks.run(pid_of_rank, world=2)[0] == pids[0]
    with pytest.raises(pytest.fail.Exception, match="rank 1 of 2: died, exit code -9"):
        ranks.run(dies_on_one, world=2, kind="bare")


def test_an_exception_of_a_thread_fails_the_test(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0 of 1: in a thread.*KeyError: 'the reason'"):
        ranks.run(raises, world=1, kind="bare", where="a thread")


def test_an_exception_is_no_death(ranks):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)rank 0 of 1: Traceback.*KeyError: 'the reason'"):
        ranks.run(raises, world=1, kind="bare", where="here", dies={0})


def test_a_hung_rank_is_killed_with_its_stack(ranks):
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="(?s)rank 1 of 2: hung.*hangs_on_one"):
        ranks.run(hangs_on_one, world=2, kind="bare", limit=1)
    assert time.monotonic() - started < 10
    assert len(ranks.run(pid_of_rank, world=2)) == 2
