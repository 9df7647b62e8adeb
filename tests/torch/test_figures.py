"""Figures of docs/reliability.md that no other test measures. `bench/reliability.py` runs these with
`NVX_TEST_TURNS=100` and judges the figures: on a busy machine, times prove nothing."""

import os
import signal
import time
import zlib
from datetime import timedelta

import nvx
import pytest
import torch
import torch.distributed as dist
from ranks import one_host, only_nvx
from reference import DTYPES, OPS, assert_same, bytes_of, meaningful, placed, reduce_op, reduced, small_numbers
from test_process import assert_nothing_leaked, belongings
from test_recovery import TURNS, record_growth

pytestmark = [only_nvx, one_host]
LONG = TURNS >= 100
CELLS = [(dtype, op) for dtype in DTYPES for op in OPS if meaningful(dtype, op)]


def timeouts(rank, world, spans):
    """The seconds by which calls came later than their timeouts, the first of a group or the 1000th. Rank 1 never
    makes them."""
    groups = [(span, calls, dist.new_group()) for span in spans for calls in (0, 999)]
    for span, calls, group in groups:
        for _ in range(calls):
            dist.all_reduce(torch.ones(2), group=group)
        nvx.set_timeout(timedelta(seconds=span), group)
    beyond, store = [], dist.distributed_c10d._get_default_store()
    if rank == 0:
        began = time.monotonic()
        works = [(span, dist.all_reduce(torch.ones(2), group=group, async_op=True)) for span, _, group in groups]
        for span, work in works:
            with pytest.raises(dist.DistBackendError, match="timed out.*rank 1"):
                work.wait()
            beyond.append((span, time.monotonic() - began - span))
            assert beyond[-1][1] > -0.05 * span
        store.set("done", "")
    store.wait(["done"], timedelta(seconds=100))
    return beyond


def test_timeouts_are_kept(ranks, record_property):
    spans = (1, 5, 60) if LONG else (0.5,)
    for span, beyond in ranks.run(timeouts, world=2, limit=120, spans=spans)[0]:
        record_property(f"max_beyond_{span}_s", beyond)


def stopped(rank, world, seconds, path):
    """The seconds until a rank's log names the rank that is stopped. The sum is right when that runs again."""
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    total = torch.full((70_001,), rank + 1.0)
    if rank == 1:
        time.sleep(seconds / 5)  # rank 0 is inside the call
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == 0:
        log, kept = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), os.dup(2)
        os.dup2(log, 2)
        work = dist.all_reduce(total, async_op=True)
        began, warned_after = time.monotonic() + seconds / 5, None
        while time.monotonic() < began + seconds:
            time.sleep(0.01)
            with open(path) as text:
                if warned_after is None and "rank 1" in (words := text.read()) and "stopped by a signal" in words:
                    warned_after = time.monotonic() - began
        while not work.is_completed():  # rank 1 may be late to stop
            os.kill(pids[1], signal.SIGCONT)
            time.sleep(0.05)
        work.wait()
        os.dup2(kept, 2)
        os.close(log)
        os.close(kept)
        assert total.unique().tolist() == [world * (world + 1) / 2]
        return warned_after
    dist.all_reduce(total)
    assert total.unique().tolist() == [world * (world + 1) / 2]
    return None


def test_a_stopped_rank_is_warned_of(ranks, tmp_path, record_property):
    warned_after = ranks.run(stopped, world=3, seconds=5 if LONG else 2, path=str(tmp_path / "log"))[0]
    record_property("warned", int(warned_after is not None))
    assert warned_after is not None
    record_property("max_warning_s", warned_after)


def subgroups(rank, world):
    """Seconds for each group with its first call, what a group that lives holds, and what is left of all."""

    def turn():
        began = time.monotonic()
        group = dist.new_group()
        dist.all_reduce(torch.ones(10), group=group)
        took.append(time.monotonic() - began)
        return group

    took, alive = [], []
    for _ in range(5):
        dist.destroy_process_group(turn())
    took.clear()
    before = belongings()
    for number in range(2 * TURNS):
        if len(alive) == min(64, TURNS):
            dist.barrier()
            dist.destroy_process_group(alive.pop(0))
        alive.append(turn())
        if number == min(64, TURNS) - 1:
            grown = {name: (amount - before[name]) / len(alive) for name, amount in belongings().items()}
    dist.barrier()
    for group in alive:
        dist.destroy_process_group(group)
    return sorted(took), grown, assert_nothing_leaked(before, f"{2 * TURNS} subgroups")


def test_subgroups_are_cheap(ranks, record_property):
    took, grown, left = zip(*ranks.run(subgroups, world=2), strict=True)
    record_property("subgroups", 2 * TURNS)
    for name, at in (("p50_s", 0.5), ("p99_s", 0.99)):
        record_property(name, max(one[int(at * len(one))] for one in took))
    for name in ("descriptors", "resident KiB"):
        record_property(f"{name} of each", max(one[name] for one in grown))
    record_growth(record_property, left)


def again(rank, world):
    """The same inputs many times: the results that differ from the first, in any bit. Returns a digest of the first
    results and the calls."""
    digest, calls = [], 0
    for count in (1, 1000, 20_011):
        for dtype, op in CELLS:
            source, want = small_numbers(dtype, count * world, rank), []
            for _ in range(10 * TURNS // (1 if count < 2000 else 10)):
                whole, part = source.clone(), torch.empty(count, dtype=dtype)
                dist.all_reduce(whole, reduce_op(op))
                dist.reduce_scatter_tensor(part, source, reduce_op(op))
                calls += 2
                want = want or [bytes_of(whole).clone(), bytes_of(part).clone()]
                assert torch.equal(bytes_of(whole), want[0]) and torch.equal(bytes_of(part), want[1]), (dtype, op)
            digest.append(zlib.crc32(bytes(want[0].numpy())))
    return digest, calls


def test_the_same_inputs_give_the_same_bits(ranks, record_property):
    results = ranks.run(again, world=2, limit=180 + 3 * TURNS)
    record_property("calls", results[0][1])
    differ = sum(one[0] != results[0][0] for one in results)
    record_property("ranks that differ", differ)
    assert differ == 0


def exact(rank, world):
    """Each type and operator at each small size and offset, against sums that are exact. Returns the cells."""
    cells = 0
    for dtype, op in CELLS:
        most = 3 * TURNS
        inputs = [small_numbers(dtype, most * world, r) for r in range(world)]
        want = reduced(inputs, op)
        for count in range(1, most, 1 if LONG else 5):
            for offset in range(4):
                got, source = placed(inputs[rank][:count], offset), placed(inputs[rank][: count * world], offset)
                dist.all_reduce(got, reduce_op(op))
                part = torch.empty(count, dtype=dtype)
                dist.reduce_scatter_tensor(part, source, reduce_op(op))
                what = f"{dtype} {op} count {count} offset {offset}"
                assert_same(got, want[:count], what)
                assert_same(part, want[rank * count : (rank + 1) * count], what)
                cells += 2
    return cells


def test_results_are_exact(ranks, record_property):
    record_property("cells", ranks.run(exact, world=2, limit=60 + 5 * TURNS)[0])
