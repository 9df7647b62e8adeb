"""Ctrl-C in a blocking call raises `KeyboardInterrupt` immediately, whatever the outcome of the operation."""

import contextlib
import os
import random
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, only_nvx, sync

pytestmark = only_nvx
LONG = timedelta(seconds=50)


def interrupted(call):
    """Sends SIGINT to this process while `call` blocks, and returns the time until the call raised."""
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
    """The failed group was separate: the world still works."""
    sync("interrupted")
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


# --- an operation that succeeds
# -----------------------------------------------------------------------------------------

MET = {
    "all_reduce": lambda g, other: dist.all_reduce(torch.ones(3), group=g),
    "large all_reduce": lambda g, other: dist.all_reduce(torch.ones(2_000_003), group=g),
    "wait": lambda g, other: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(),
    "wait with a timeout": lambda g, other: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(LONG),
    "messages": lambda g, other: dist.recv(torch.ones(3), other, group=g) if other else dist.send(torch.ones(3), 0, g),
    "sparse all_reduce": lambda g, other: dist.all_reduce(torch.eye(3).to_sparse(), group=g),
    "monitored_barrier": lambda g, other: g.monitored_barrier(LONG),
}


ENDS_WELL = {"all_reduce", "wait", "wait with a timeout", "messages"}  # rank 0 has no more to do for rank 1


def interrupt_met(rank, world, where):
    """Rank 1 comes while rank 0 is in the handler: its part may be complete when the handler raises."""
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
            assert "interrupted" in str(error) and where not in ENDS_WELL, error
    world_serves_on()


@pytest.mark.parametrize("where", MET)
def test_interrupt_of_what_ends_well(ranks, where):
    ranks.run(interrupt_met, world=2, where=where)


@on_ranks(2)
def test_interrupts_at_any_moment(rank, world):
    """Only `KeyboardInterrupt` is raised, and never twice."""
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
            group._get_backend(torch.device("cpu")).abort()  # the interrupt may have come between two operations
        except dist.DistBackendError as error:
            assert rank == 1 and ("interrupted" in str(error) or "aborted" in str(error)), error
        finally:
            signal.signal(signal.SIGINT, before)
        sync(f"turn {turn}")
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3


# --- handlers that call nvx -------------------------------------------------------------------------------------------


def handled(call, handler, delay=0.3):
    """Runs `call`; `handler` runs once while the call blocks, which it must do within the delay."""
    before = signal.signal(signal.SIGUSR2, lambda *_: handler())
    timer = threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        return call()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


WITHIN = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(3), group=g),
    "large all_reduce": lambda g: dist.all_reduce(torch.ones(2_000_003), group=g),
    "barrier": lambda g: dist.barrier(g),
}
CALLED = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(3), group=g),
    "barrier": lambda g: dist.barrier(g),
    "sparse all_reduce": lambda g: dist.all_reduce(torch.eye(3).to_sparse(), group=g),
    "wait": lambda g: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(),
    "wait with a timeout": lambda g: dist.all_reduce(torch.ones(3), group=g, async_op=True).wait(LONG),
    "pending works": lambda g: [dist.all_reduce(torch.ones(3), group=g, async_op=True), g._wait_for_pending_works()],
}


@pytest.mark.parametrize("called", CALLED)
@on_ranks(2)
def test_a_handler_that_calls_into_its_own_group_gets_an_error(rank, world, called):
    """The interrupted operation completes normally. Operations that the handler enqueues run after it."""
    store = dist.distributed_c10d._get_default_store()
    for within in WITHIN:
        group = dist.new_group()
        interrupts = []

        def handler(group=group, interrupts=interrupts, within=within):
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="inside an operation of group") as raised:
                CALLED[called](group)
            interrupts.append((time.monotonic() - started, str(raised.value)))
            store.set(f"{called} {within}", "1")

        if rank == 0:
            handled(lambda within=within, group=group: WITHIN[within](group), handler)
            assert len(interrupts) == 1 and interrupts[0][0] < 1.0, interrupts
        else:
            store.wait([f"{called} {within}"], timedelta(seconds=20))
            WITHIN[within](group)
        sync(f"{within} is over")
        if called in ("all_reduce", "barrier"):
            total = torch.ones(3)
            dist.all_reduce(total, group=group)
            assert total.tolist() == [2.0] * 3
            backend = group._get_backend(torch.device("cpu"))
            numbers = [None] * world
            dist.all_gather_object(numbers, backend._get_sequence_number_for_group())
            assert numbers[0] == numbers[1], "what was refused does not count"
        else:
            group._get_backend(torch.device("cpu")).abort()
        sync("next")


@pytest.mark.parametrize("within", [*WITHIN, "wait", "recv", "wait for a message"])
@pytest.mark.parametrize("how", ["abort", "shutdown", "destroy"])
@on_ranks(2)
def test_a_handler_may_end_the_group(rank, world, within, how):
    group = dist.new_group()
    if rank == 0:
        took = []

        def handler():
            started = time.monotonic()
            if how == "destroy":
                dist.destroy_process_group(group)
            else:
                getattr(group._get_backend(torch.device("cpu")), how)()
            took.append(time.monotonic() - started)

        started = time.monotonic()
        # torch's wrapper of a failed message looks up the group, which torch has removed, and raises `ValueError`.
        with pytest.raises((dist.DistBackendError, ValueError), match="abort|destroy|not initialized"):
            handled(lambda: {**BLOCKING, **WITHIN}[within](group), handler)
        assert took and took[0] < 1.0, took
        assert time.monotonic() - started < 2.5
    sync("ended")
    if rank == 1:  # data that rank 0 sent before may complete this call; otherwise it raises
        with contextlib.suppress(dist.DistBackendError):
            WITHIN.get(within, WITHIN["barrier"])(group)
    world_serves_on()


@on_ranks(2)
def test_a_handler_may_use_other_groups_and_messages(rank, world):
    group, other = dist.new_group(), dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    got = []

    def exchange():
        total, there = torch.ones(3), torch.zeros(3)
        dist.all_reduce(total, group=other)
        works = [dist.isend(torch.full((3,), float(rank)), 1 - rank, group), dist.irecv(there, 1 - rank, group)]
        for work in works:
            work.wait()
        got.extend([total.tolist(), there.tolist()])
        store.set("exchanged", "1")

    total = torch.ones(3)
    if rank == 0:
        handled(lambda: dist.all_reduce(total, group=group), exchange)
    else:
        exchange()
        dist.all_reduce(total, group=group)
    assert got == [[2.0] * 3, [1.0 - rank] * 3]
    assert total.tolist() == [2.0] * 3


def coalesced(call, group):
    with dist._coalescing_manager(group):
        call(group)


SINGLE = {
    "all_gather_into_tensor": lambda g: dist.all_gather_into_tensor(torch.zeros(6), torch.ones(3), group=g),
    "reduce_scatter_tensor": lambda g: dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(6), group=g),
    "all_to_all_single": lambda g: dist.all_to_all_single(torch.zeros(6), torch.ones(6), group=g),
    "coalesced all_gather": lambda g: coalesced(SINGLE["all_gather_into_tensor"], g),
    "coalesced reduce_scatter": lambda g: coalesced(SINGLE["reduce_scatter_tensor"], g),
}


@on_ranks(2)
def test_a_handler_may_call_what_it_interrupts_in_another_group(rank, world):
    """torch from 2.14 on forwards these names to others, and refuses a forwarded call inside another one."""
    group, other = dist.new_group(), dist.new_group()
    for name, call in SINGLE.items():
        called = []
        if rank == 0:
            handled(lambda call=call: call(group), lambda call=call, called=called: called.append(call(other)))
            assert len(called) == 1, name
        else:
            call(other)
            call(group)


@on_ranks(2)
def test_a_handler_that_raises_is_reported_by_its_exception(rank, world):
    class Stopped(Exception):
        pass

    def stop(number, frame):
        raise Stopped

    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match="signal handler that raised Stopped on rank 0"):
            dist.recv(torch.ones(3), 0)
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Stopped):
            dist.all_reduce(torch.ones(3))
    finally:
        signal.signal(signal.SIGALRM, before)
