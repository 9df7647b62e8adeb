"""Ctrl-C while something blocks: it comes out as KeyboardInterrupt, at once, whatever became of the operation."""

import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import meet, on_ranks, only_nvx

pytestmark = only_nvx
LONG = timedelta(seconds=50)


def interrupted(call):
    """Sends this process SIGINT while call blocks; how long it took to come out."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    return time.monotonic() - started - 0.3


def wait_for_what_the_pool_runs(group):
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    time.sleep(0.1)
    work.wait()


def wait_for_pending(group, work):
    group._wait_for_pending_works()
    assert work.is_completed()


BLOCKING = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(3), group=g),
    "large all_reduce": lambda g: dist.all_reduce(torch.ones(2_000_003), group=g),
    "barrier": lambda g: dist.barrier(g),
    "recv": lambda g: dist.recv(torch.ones(3), 1, group=g),
    "wait": lambda g: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(),
    "wait, run by the pool": wait_for_what_the_pool_runs,
    "wait for a message": lambda g: dist.irecv(torch.ones(3), 1, group=g).wait(),
    "wait with a timeout": lambda g: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(LONG),
    "wait with a timeout for a message": lambda g: dist.irecv(torch.ones(3), 1, group=g).wait(LONG),
    "sparse all_reduce": lambda g: dist.all_reduce(torch.eye(3).to_sparse(), group=g),
    "monitored_barrier": lambda g: g.monitored_barrier(LONG),
    "pending works": lambda g: wait_for_pending(g, dist.all_reduce(torch.ones(3), group=g, async_op=True)),
    "pending messages": lambda g: wait_for_pending(g, dist.irecv(torch.ones(3), 1, group=g)),
}


def world_serves_on():
    """What failed was a group of its own."""
    meet("interrupted")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


def interrupt(rank, world, where):
    group = dist.new_group()
    if rank == 0:
        assert interrupted(lambda: BLOCKING[where](group)) < 1.0
    world_serves_on()


@pytest.mark.parametrize("where", BLOCKING)
def test_interrupt(ranks, where):
    ranks.run(interrupt, world=2, where=where)


# --- while the operation ends well ------------------------------------------------------------------------------------

MET = {
    "all_reduce": lambda g, other: dist.all_reduce(torch.ones(3), group=g),
    "large all_reduce": lambda g, other: dist.all_reduce(torch.ones(2_000_003), group=g),
    "wait": lambda g, other: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(),
    "wait with a timeout": lambda g, other: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(LONG),
    "messages": lambda g, other: dist.recv(torch.ones(3), other, group=g) if other else dist.send(torch.ones(3), 0, g),
    "sparse all_reduce": lambda g, other: dist.all_reduce(torch.eye(3).to_sparse(), group=g),
    "monitored_barrier": lambda g, other: g.monitored_barrier(LONG),
}


def interrupt_met(rank, world, where):
    """Rank 1 comes while rank 0 is inside the handler, so that the operation is over when the handler raises."""
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()

    def handler(*_):
        store.set("inside", "1")
        store.wait(["came"], timedelta(seconds=20))
        time.sleep(0.2)
        raise KeyboardInterrupt

    if rank == 0:
        before = signal.signal(signal.SIGINT, handler)
        timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                MET[where](group, 1)
        finally:
            timer.join()
            signal.signal(signal.SIGINT, before)
    else:
        store.wait(["inside"], timedelta(seconds=20))
        threading.Timer(0.1, lambda: store.set("came", "1")).start()
        try:
            MET[where](group, 0)
        except dist.DistBackendError as error:
            assert "interrupted" in str(error), error
    world_serves_on()


@pytest.mark.parametrize("where", MET)
def test_interrupt_of_what_ends_well(ranks, where):
    ranks.run(interrupt_met, world=2, where=where)


@on_ranks(2)
def test_interrupts_at_any_moment(rank, world):
    """Never anything else than KeyboardInterrupt, and never twice."""
    moments = random.Random(7)
    for turn in range(25):
        group = dist.new_group()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(moments.random() * 0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            if rank == 0:
                timer.start()
            for step in range(1_000_000):
                if rank == 1 and step % 7 == 0:
                    time.sleep(moments.random() * 0.06)
                tensor = torch.ones((3, 70_001)[step % 2])
                work = dist.all_reduce(tensor, group=group, async_op=step % 3 == 0)
                if work is not None:
                    work.wait()
        except KeyboardInterrupt:
            assert rank == 0
            group._get_backend(torch.device("cpu")).abort()  # it may have come between two operations
        except dist.DistBackendError as error:
            assert rank == 1 and ("interrupted" in str(error) or "aborted" in str(error)), error
        finally:
            signal.signal(signal.SIGINT, before)
        meet(f"turn {turn}")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
