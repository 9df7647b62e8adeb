"""Survivors of a failure go on in the same process, and killed jobs leave nothing behind.

`NVX_TEST_TURNS=100 pytest tests/torch/test_recovery.py` is the long run: 100 recoveries, 1000 lives, 200 kills."""

import contextlib
import os
import random
import re
import signal
import statistics
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import nvx
import pytest
import torch
import torch.distributed as dist
import warm
from ranks import BACKEND, SEVERAL_HOSTS, eventually, on_ranks, only_nvx
from test_process import assert_nothing_leaked, belongings, finish, shared_names, start_program

pytestmark = only_nvx
TURNS = int(os.environ.get("NVX_TEST_TURNS", "5"))


def check_sum(value, ranks):
    total = torch.full((70_001,), float(value))
    dist.all_reduce(total)
    assert total.unique().tolist() == [ranks * float(value)]


@on_ranks(3)
def test_an_abort_ends_ranks_that_are_stuck_in_three_groups(rank, world):
    """Each rank waits in another group, so no operation can end. Rank 0 aborts all groups of its process, from another
    thread: all three calls end."""
    store = dist.distributed_c10d._get_default_store()
    groups = [dist.new_group() for _ in range(world)]

    def abort():
        time.sleep(0.5)
        store.set("aborted", str(time.monotonic()))
        dist.distributed_c10d._abort_process_group()
        store.set("returned", str(time.monotonic()))

    aborter = threading.Thread(target=abort)
    if rank == 0:
        aborter.start()
    with pytest.raises(dist.DistBackendError, match="abort") as raised:
        dist.all_reduce(torch.ones(3), group=groups[rank])
    ended = time.monotonic()
    began, returned = (float(store.get(name)) for name in ("aborted", "returned"))
    assert began < ended < began + 1 and returned < began + 1, (began, ended, returned)
    assert rank == 0 or "rank 0" in str(raised.value), str(raised.value)
    if rank == 0:
        aborter.join()
    else:
        dist.destroy_process_group()
    dist.init_process_group(BACKEND, store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    check_sum(2, world)


def record_growth(record_property, ranks):
    """`ranks`: by how much the belongings of each have grown."""
    for name in ranks[0]:
        record_property(name, max(one[name] for one in ranks))


def recover(rank, world, folder):
    """Ranks 0 and 1 survive. In each turn a process takes the place of rank 2 and dies; the survivors first go on
    without it. Returns the pid, the seconds from the failure to the first result of the smaller group, and
    what has grown."""
    took = []
    for turn in range(world - 2) if rank < 2 else [rank - 2]:
        store = dist.FileStore(os.path.join(folder, f"whole {turn}"), 3)
        dist.init_process_group(BACKEND, store=store, rank=min(rank, 2), world_size=3, timeout=timedelta(seconds=60))
        check_sum(turn, 3)
        if rank >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match=r"rank 2 \(pid \d+"):
            dist.barrier()
        failed = time.monotonic()
        if turn % 2:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        store = dist.FileStore(os.path.join(folder, f"left {turn}"), 2)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        check_sum(turn, 2)
        took.append(time.monotonic() - failed)
        dist.destroy_process_group()
        if turn == 1:  # both ways to end a group have taken their memory
            before = belongings()
    return os.getpid(), took, assert_nothing_leaked(before, f"{world - 4} recoveries")


def test_survivors_recover_with_a_replacement_every_time(ranks, tmp_path, record_property):
    """The survivors are the same processes all the time."""
    took, pids = [], set()
    for part in range(0, TURNS, 5):
        folder = tmp_path / str(part)
        folder.mkdir()
        results = ranks.run(recover, world=7, kind="bare", folder=str(folder), dies=set(range(2, 7)))
        pids.add((results[0][0], results[1][0]))
        took += [max(pair) for pair in zip(results[0][1], results[1][1], strict=True)]
        record_growth(record_property, [one[2] for one in results[:2]])
    record_property("recoveries", len(took))
    record_property("p50_s", statistics.median(took))
    record_property("max_s", max(took))
    assert len(took) >= TURNS and len(pids) == 1
    assert statistics.median(took) < 0.3, sorted(took)


def many_lives(rank, world, folder):
    """A group, an operation inline, one on a thread of the pool; then nothing of it."""
    for life in range(10 + 10 * TURNS):
        if life == 10:
            before = belongings()
        store = dist.FileStore(os.path.join(folder, str(life)), world)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
        check_sum(1, world)
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
        dist.destroy_process_group()
    return assert_nothing_leaked(before, f"{10 * TURNS} lives")


def test_lives_leak_nothing(ranks, tmp_path, record_property):
    record_property("lives", 10 * TURNS)
    record_growth(record_property, ranks.run(many_lives, world=2, kind="bare", folder=str(tmp_path), limit=60 + TURNS))


FOR_EVER = """
import itertools, sys, torch, torch.distributed as dist, nvx
folder, rank = sys.argv[1], int(sys.argv[2])
for life in itertools.count():
    dist.init_process_group("nvx", store=dist.FileStore(f"{folder}/{life}", 3), rank=rank, world_size=3)
    group = dist.new_group()
    for _ in range(20):
        dist.all_reduce(torch.ones(70_001), async_op=True).wait()
        dist.all_reduce(torch.ones(10), group=group)
    print(life, flush=True)
    dist.destroy_process_group()
"""


def present():
    """The names in /dev/shm and this process's children: warm.py makes it the parent of what its children leave."""
    names = shared_names()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as children:
            names.update(children.read().split())
    return names


@pytest.mark.skipif(SEVERAL_HOSTS, reason="its processes are not those of the pool")
def test_killed_jobs_leave_nothing(tmp_path, record_property):
    """Jobs are killed as they start, and jobs that work."""
    record_property("killed jobs", 2 * TURNS)
    dice = random.Random(7)
    warm.run(["-c", ""])  # the process that the others are forked from stays
    before = present()
    for number in range(2 * TURNS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with open(folder / "log", "w") as log:
            job = [warm.Popen(["-c", FOR_EVER, folder, rank], stdout=log, stderr=log) for rank in range(3)]
        try:
            if number % 2:
                eventually((folder / "log").read_text, 30)  # the first life is over
            time.sleep(dice.uniform(0, 0.2))
        finally:
            for process in job:
                process.kill()
            for process in job:
                process.wait()
    eventually(lambda: not present() - before, 5)


CANNOT_LOAD = """
import sys, time
import torch, torch.distributed as dist
import nvx
store, rank, victim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if rank == victim:
    sys.modules.pop("nvx._C", None)
    nvx.obstacle = lambda: "it was built for another torch"
began = time.monotonic()
try:
    dist.init_process_group("nvx", store=dist.FileStore(store, 3), rank=rank, world_size=3)
finally:
    print(time.monotonic() - began)
"""


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_whose_module_does_not_load_is_named_on_the_others(tmp_path, victim):
    ended = finish(start_program(tmp_path, CANNOT_LOAD, 3, victim))
    for rank, ((out, err), code, _) in enumerate(ended):
        last_line = err.strip().splitlines()[-1]
        assert code == 1, err
        if rank == victim:
            assert last_line.endswith(": it was built for another torch"), err
        else:
            why = rf"nvx: rank {victim} \(pid \d+, host \S+\) cannot load nvx: it was built for another torch; "
            assert re.search(why + rf"this is rank {rank}.*Next: see the log of that rank", last_line), err
        assert float(out) < 15


def test_a_store_that_fails_does_not_hide_why_the_module_does_not_load(monkeypatch):
    error = nvx.Unusable("it was built for another torch")

    def load():
        raise error

    def add(key, more):
        raise dist.DistNetworkError("the store is lost")

    monkeypatch.setattr(nvx, "_load", load)
    with pytest.raises(nvx.Unusable) as raised:
        nvx._create(SimpleNamespace(store=SimpleNamespace(add=add), group_rank=1), None)
    assert raised.value is error
