"""Backend features of torch 2.14 and 2.15: the _single family, hooks, the flight recorder, ephemeral timeouts."""

import pickle
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, TORCH, on_ranks, sync
from reference import assert_same, wild_bits

pytestmark = pytest.mark.skipif(not OVER_NVX or TORCH < (2, 14), reason="for nvx on torch 2.14 and later")
from_2_15 = pytest.mark.skipif(TORCH < (2, 15), reason="torch has this from 2.15 on")
CPU = torch.device("cpu")


def backend_of(group=None):
    return (group or dist.group.WORLD)._get_backend(CPU)


# --- the _single family -----------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_gather_single(rank, world):
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for count in (0, 1, 7, 70_001):
            inputs = [wild_bits(dtype, count, r) for r in range(world)]
            for root in range(world):
                output = torch.zeros(world, count, dtype=dtype) if rank == root else None
                dist.gather_single(inputs[rank], output, dst=root)
                if rank == root:
                    assert_same(output, torch.stack(inputs), f"gather_single {dtype} {count} to {root}")
            work = dist.gather_single(inputs[rank], output, dst=world - 1, async_op=True)
            work.wait()
            if rank == world - 1:
                assert_same(output, torch.stack(inputs), f"gather_single {dtype} {count}, async")


@on_ranks(3)
def test_single_names_of_the_backend(rank, world):
    backend = backend_of()
    whole = torch.zeros(world, 2)
    backend.all_gather_single(whole, torch.full((2,), float(rank))).wait()
    assert whole.tolist() == [[0, 0], [1, 1], [2, 2]]
    part = torch.zeros(2)
    backend.reduce_scatter_single(part, whole).wait()
    assert part.tolist() == [3.0 * rank] * 2
    output = torch.zeros(world)
    backend.all_to_all_single(output, torch.arange(float(world)) + 10 * rank, [], []).wait()
    assert output.tolist() == [10.0 * source + rank for source in range(world)]
    outputs, parts = [torch.zeros(world, n) for n in (1, 4)], [torch.zeros(n) for n in (1, 4)]
    backend.all_gather_single_coalesced(outputs, [torch.full((n,), float(rank)) for n in (1, 4)]).wait()
    for tensor in outputs:
        assert tensor[:, 0].tolist() == [0.0, 1.0, 2.0]
    backend.reduce_scatter_single_coalesced(parts, [t.clone() for t in outputs]).wait()
    for tensor in parts:
        assert tensor.unique().tolist() == [3.0 * rank]


# --- hooks ------------------------------------------------------------------------------------------------------------


def trace():
    return pickle.loads(torch._C._distributed_c10d._dump_fr_trace(backend="nvx")).get("entries", [])


def newest():
    """The number of the last entry of torch's recorder, which keeps 2000 entries."""
    return max((e["record_id"] for e in trace()), default=-1)


def recorded(after):
    """The collectives among later entries."""
    return [e for e in trace() if e["record_id"] > after and "all_" in e["profiling_name"]]


@from_2_15
@on_ranks(2)
def test_flight_recorder(rank, world):
    """The recorder shows finished operations as completed."""
    before = newest()
    for _ in range(3):
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(5), async_op=True).wait()
    dist.all_gather_into_tensor(torch.zeros(10), torch.ones(5))
    dist.barrier()
    end = time.monotonic() + 5
    while unfinished := [e for e in recorded(before) if e["state"] != "completed"]:
        assert time.monotonic() < end, unfinished
        time.sleep(0.01)
    names = [e["profiling_name"].split(":")[-1] for e in recorded(before)]
    assert names.count("all_reduce") == 6


@from_2_15
@on_ranks(2)
def test_flight_recorder_shows_what_hangs(rank, world):
    group = dist.new_group()
    before = newest()
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
        time.sleep(0.1)
        assert [e["state"] == "completed" for e in recorded(before)] == [False]
    sync("looked")
    if rank == 1:
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    work.wait()


@on_ranks(2)
def test_abort_hooks(rank, world):
    """A hook runs on a timeout of a collective and before an abort, but not for a healthy group."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    backend = backend_of(group)
    assert TORCH < (2, 15) or backend.supports_abort_hooks
    called, dropped = threading.Event(), threading.Event()
    backend.register_abort_hook(1, called.set)
    backend.register_abort_hook(2, dropped.set)
    backend.unregister_abort_hook(2)
    dist.all_reduce(torch.ones(3), group=group)
    assert not called.is_set()
    if rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3), group=group)
        assert called.wait(2)
        backend.abort()
        backend.shutdown()
        backend.unregister_abort_hook(1)  # torch also does so after a shutdown
        assert not dropped.is_set()
    sync("done")


@on_ranks(2)
def test_abort_hook_before_an_abort(rank, world):
    backend = backend_of(dist.new_group())
    called = threading.Event()
    backend.register_abort_hook(7, called.set)
    backend.abort()
    assert called.wait(5)


@on_ranks(2)
def test_no_abort_hook_for_operations_that_leaving_cancels(rank, world):
    group = dist.new_group()
    called = threading.Event()
    backend_of(group).register_abort_hook(3, called.set)
    works = [dist.irecv(torch.ones(3), 1 - rank, group=group)]
    if rank == 0:
        works.append(dist.all_reduce(torch.ones(3), group=group, async_op=True))
    dist.destroy_process_group(group)
    for work in works:
        with pytest.raises(dist.DistBackendError):
            work.wait()
    assert not called.wait(0.3)
    sync("done")


def fail(*_):
    raise ZeroDivisionError("of the hook's own")


@on_ranks(2)
def test_slow_abort_hooks_do_not_delay_errors(rank, world):
    """torch's flight recorder is such a hook: it writes for seconds and sometimes holds the GIL."""
    backend = backend_of(dist.new_group(timeout=timedelta(seconds=0.5)))
    ended = threading.Event()
    backend.register_abort_hook(1, lambda: ended.wait(3))
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            backend.allreduce([torch.ones(3)]).wait()
    backend.abort()
    assert time.monotonic() - began < 2.5
    ended.set()
    sync("done")


@on_ranks(2)
def test_abort_hooks_that_raise(rank, world):
    """They affect neither the user's error, nor other hooks, nor the process."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    backend = backend_of(group)
    aborted = threading.Event()
    backend.register_abort_hook(1, fail)
    backend.register_abort_hook(2, aborted.set)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
        assert aborted.wait(2), "an asynchronous operation that fails calls the abort hooks too"
        aborted.clear()
        backend.abort()
        assert aborted.wait(5)
    sync("done")
    dist.barrier()


# --- timeouts ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_ephemeral_timeout(rank, world):
    """It extends operations that are issued next, and expires when these have completed."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        backend_of(group)._add_ephemeral_timeout(timedelta(seconds=20))
    else:
        time.sleep(1.2)
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0] * 3
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(total, group=group)
        assert time.monotonic() - started < 3.0
    sync("done")


@on_ranks(2)
def test_ephemeral_timeout_of_all_until_the_first_has_ended(rank, world):
    """It applies to collectives and messages issued meanwhile, and adds no timeout to a group without one."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if rank == 0:
        backend_of(group)._add_ephemeral_timeout(timedelta(seconds=20))
    else:
        time.sleep(1.2)
    tensors = [torch.ones(3) for _ in range(3)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    there = torch.zeros(3)
    works += [dist.irecv(there, 1 - rank, group), dist.isend(torch.ones(3), 1 - rank, group)]
    if rank == 1:
        time.sleep(0.3)
    for work in works:
        work.wait()
    assert [t.tolist() for t in [*tensors, there]] == [[2.0] * 3] * 3 + [[1.0] * 3]
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.recv(there, 1, group)
        assert time.monotonic() - started < 3.0
    sync("timed out")
    forever = dist.new_group(timeout=timedelta.max)  # torch makes it negative, which means no timeout
    if rank == 0:
        backend_of(forever)._add_ephemeral_timeout(timedelta(seconds=0.2))
    else:
        time.sleep(1.0)
    dist.all_reduce(there, group=forever)


@from_2_15
@on_ranks(2)
def test_abort_hooks_come_and_go_while_operations_end(rank, world):
    """Completion hooks too: torch's C++ recorder registers one on every new group."""
    group = dist.new_group()
    backend = backend_of(group)
    over = threading.Event()
    turns = {11: 0, 12: 0}

    def change(number):
        while not over.is_set():
            backend.register_abort_hook(number, lambda: None)
            assert backend.options._timeout
            backend.register_abort_hook(number, lambda: None)  # replaces the other hook
            backend.unregister_abort_hook(number)
            turns[number] += 1

    threads = [threading.Thread(target=change, args=(n,)) for n in turns]
    for thread in threads:
        thread.start()
    for turn in range(300):
        work = dist.all_reduce(torch.ones(3), group=group, async_op=turn % 2 == 0)
        if work is not None:
            work.wait()
    over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert min(turns.values()) > 10, turns
    dist.barrier(group)


@from_2_15
@on_ranks(2)
def test_unsupported_features_raise(rank, world):
    backend = backend_of()
    if not backend.supports_window:
        with pytest.raises(RuntimeError, match="nvx|not support|implement"):
            backend.new_window(torch.ones(3))
    if not backend.supports_reconfigure:
        with pytest.raises(RuntimeError, match="nvx|not support|implement"):
            backend.get_reconfigure_handle()
    dist.barrier()
