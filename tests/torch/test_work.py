"""The `Work` of an asynchronous call: waiting, futures, order, threads; and the view of profilers."""

import json
import pathlib
import subprocess
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import warm
from ranks import BACKEND, OVER_NVX, TORCH, eventually, on_ranks, on_threads, only_nvx, sync
from reference import assert_same, reduced, small_numbers
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

CPU = torch.device("cpu")


@on_ranks(2)
def test_works_that_may_be_inputs_of_graphs(rank, world):
    """torch keeps these works until a wait on them or on their tensors."""
    size, tensor = torch._C._distributed_c10d._get_work_registry_size, torch.ones(10)
    before = size()  # these ranks may have run tests that leave a work
    with allow_inflight_collective_as_graph_input_ctx():
        for _ in range(3):
            dist.all_reduce(tensor, async_op=True).wait()
        assert size() == before
        if OVER_NVX:
            dist.group.WORLD.allreduce([tensor])
            assert size() == before + 1
    torch.ops._c10d_functional.wait_tensor(tensor)
    assert size() == before


def inputs(world, count=1000, salt=0):
    return [small_numbers(torch.float32, count, r, salt) for r in range(world)]


def every_collective(rank, world):
    """Returns (name, call, expected result); each call returns a `Work`."""
    mine, whole = inputs(world, 12)[rank], torch.zeros(12 * world)
    lists = [torch.zeros(12) for _ in range(world)]
    at_root = lists if rank == 0 else None
    part = torch.zeros(12 // world)
    return [
        ("all_reduce", lambda: dist.all_reduce(mine, async_op=True), [mine]),
        ("broadcast", lambda: dist.broadcast(mine, 0, async_op=True), [mine]),
        ("reduce", lambda: dist.reduce(mine, 0, async_op=True), None),
        ("all_gather", lambda: dist.all_gather(lists, mine, async_op=True), None),
        ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(whole, mine, async_op=True), [whole]),
        ("gather", lambda: dist.gather(mine, at_root, dst=0, async_op=True), None),
        ("scatter", lambda: dist.scatter(mine, at_root, src=0, async_op=True), None),
        ("reduce_scatter_tensor", lambda: dist.reduce_scatter_tensor(part, mine, async_op=True), [part]),
        ("reduce_scatter", lambda: dist.reduce_scatter(part, list(mine.chunk(world)), async_op=True), [part]),
        ("all_to_all_single", lambda: dist.all_to_all_single(torch.zeros(12), mine, async_op=True), None),
        ("barrier", lambda: dist.barrier(async_op=True), []),
    ]


@only_nvx
@on_ranks(2, 3)
def test_every_collective_gives_a_whole_work(rank, world):
    for name, call, outputs in every_collective(rank, world):
        work = call()
        assert work.wait(), name
        assert work.is_completed() and work.is_success(), name
        assert TORCH < (2, 13) or work.exception() is None, name  # earlier torch cannot show it to Python
        value = work.get_future().wait()
        assert isinstance(value, list), name
        assert all(isinstance(t, torch.Tensor) for t in value), name
        if outputs is not None:
            assert [t.data_ptr() for t in value] == [t.data_ptr() for t in outputs], name
            assert [t.data_ptr() for t in work.result()] == [t.data_ptr() for t in outputs], name


@on_ranks(2, 3)
def test_futures(rank, world):
    tensor = inputs(world)[rank]
    want = sum(inputs(world))
    seen = []
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda f: [2 * f.value()[0]])
    future.add_done_callback(lambda f: seen.append(f.value()[0].clone()))
    assert_same(doubled.wait()[0], 2 * want, "then")
    assert_same(future.wait()[0], want, "future")
    eventually(lambda: seen)  # callbacks run beside waiting threads
    assert_same(seen[0], want, "done callback")
    together = torch.futures.collect_all([dist.all_reduce(torch.ones(3), async_op=True).get_future() for _ in range(5)])
    assert [f.value()[0].tolist() for f in together.wait()] == [[float(world)] * 3] * 5


@on_ranks(2)
def test_a_callback_may_start_the_next_collective(rank, world):
    first, second = torch.ones(3), torch.ones(3)
    future = dist.all_reduce(first, async_op=True).get_future()
    chained = future.then(lambda f: dist.all_reduce(second, async_op=True))
    chained.wait().wait()
    assert second.tolist() == [2.0] * 3


@only_nvx
@on_ranks(2)
def test_a_callback_may_wait_for_the_next_collective(rank, world):
    """DDP's powerSGD hook does this: the thread that completes the previous call waits for a future."""

    def follow(_):
        return dist.all_reduce(second, async_op=True).get_future().wait()[0] + 1

    first, second = torch.ones(3), torch.ones(70_001)
    future = dist.all_reduce(first, async_op=True).get_future().then(follow)
    assert future.wait().unique().tolist() == [3.0]


@on_ranks(2)
def test_a_callback_that_raises_hurts_no_other(rank, world):
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda f: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        future.wait()
    dist.barrier()


@only_nvx
@on_ranks(2, 3)
def test_collectives_run_in_the_order_of_issue(rank, world):
    """Every call depends on the previous one; only the last is waited for."""
    tensor = torch.full((1001,), float(rank))
    works = []
    for root in range(world):
        works.append(dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True))  # world - 1 everywhere
        works.append(dist.all_reduce(tensor, async_op=True))  # times world
        works.append(dist.broadcast(tensor, root, async_op=True))
    works[-1].wait()
    assert tensor.unique().tolist() == [(world - 1.0) * world**world]
    for work in works:
        work.wait()


@only_nvx
@on_ranks(2)
def test_blocking_the_current_stream(rank, world):
    """Without a stream, the caller blocks."""
    if rank == 1:
        time.sleep(0.2)
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    if not torch.cuda.is_available():
        work.block_current_stream()
        assert tensor.tolist() == [2.0] * 3
    work.wait()


@only_nvx
@on_ranks(2)
def test_synchronous_after_asynchronous(rank, world):
    tensor = torch.ones(70_001)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [64.0]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()


@on_ranks(2)
def test_tensors_and_works_without_a_reference(rank, world):
    for count in (10, 70_001):
        for _ in range(10):
            dist.all_reduce(torch.ones(count), async_op=True)
            dist.all_gather([torch.ones(count) for _ in range(world)], torch.ones(count), async_op=True)
    held = torch.ones(3)
    dist.all_reduce(held)
    assert held.tolist() == [2.0] * 3


@on_ranks(2)
def test_polling_until_completed(rank, world):
    """No thread waits: the operation must progress by itself."""
    tensor = torch.ones(200_000)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end, "an asynchronous operation that is only polled does not end"
        time.sleep(0.001)
    assert tensor.unique().tolist() == [2.0]


def late_all_reduce(rank, seconds):
    """Rank 1 calls it this much later than rank 0."""
    dist.barrier()
    time.sleep(seconds * rank)
    return dist.all_reduce(torch.ones(3), async_op=True)


@only_nvx
@on_ranks(2)
def test_a_completed_work_has_a_completed_future(rank, world):
    """Also while a callback delays it on another thread."""
    work = late_all_reduce(rank, 0.1)
    future = work.get_future()
    last = future.then(lambda _: time.sleep(0.2 if rank == 0 else 0))
    while not work.is_completed():
        time.sleep(0.001)
    assert future.done() and last.done()
    last.wait()
    sync("over")


@only_nvx
@on_ranks(2)
def test_a_wait_whose_time_has_passed_raises(rank, world):
    work = late_all_reduce(rank, 1.0)
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out"):
            work.wait(timedelta(seconds=-1))
        assert time.monotonic() - began < 0.9
    work.wait()
    sync("over")


@only_nvx
@on_ranks(2)
def test_groups_in_opposite_order(rank, world):
    """Asynchronous calls of different groups must not wait for each other in any order of issue."""
    groups = [dist.new_group() for _ in range(4)]
    order = list(range(4)) if rank == 0 else list(reversed(range(4)))
    for _ in range(10):
        tensors = [torch.full((5000,), float(i)) for i in range(4)]
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
        for i in range(4):
            works[i].wait()
        assert [t[0].item() for t in tensors] == [0.0, 2.0, 4.0, 6.0]


def hammer(group, world, number, failures):
    try:
        for turn in range(40):
            count = (1, 100, 5_000, 40_000)[turn % 4]
            tensor = torch.full((count,), number + turn + 0.0)
            if turn % 3 == 0:
                dist.all_reduce(tensor, group=group, async_op=True).wait()
            else:
                dist.all_reduce(tensor, group=group)
            assert_same(tensor, torch.full((count,), (number + turn) * float(world)), f"thread {number} turn {turn}")
    except BaseException as error:
        failures.append(error)


@on_ranks(2, 3)
def test_several_groups_from_several_threads(rank, world):
    groups = [dist.new_group() for _ in range(4)]
    failures = []
    threads = [threading.Thread(target=hammer, args=(g, world, n, failures)) for n, g in enumerate(groups)]
    for thread in threads if rank % 2 == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@on_ranks(2)
def test_one_thread_issues_and_another_waits(rank, world):
    tensors = [torch.full((10_000,), float(i)) for i in range(20)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    thread = threading.Thread(target=lambda: [w.wait() for w in reversed(works)])
    thread.start()
    for work in works:
        work.wait()
    thread.join()
    assert [t[0].item() for t in tensors] == [2.0 * i for i in range(20)]


@only_nvx
@on_threads(2, 4)
def test_ranks_as_threads_serve_every_collective(pg, rank, world):
    for count in (0, 1, 1000, 70_001):
        given = inputs(world, count * world)
        tensor = given[rank].clone()
        pg.allreduce([tensor]).wait()
        assert_same(tensor, reduced(given, "sum"), "allreduce")
        output = torch.zeros(count)
        pg.reduce_scatter([output], [[t.clone() for t in given[rank].view(world, count).unbind()]]).wait()
        assert_same(output, reduced(given, "sum").view(world, count)[rank], "reduce_scatter")
        outputs = [torch.zeros(count) for _ in range(world)]
        pg.alltoall(outputs, [t.clone() for t in given[rank].view(world, count).unbind()]).wait()
        assert_same(torch.stack(outputs), torch.stack([g.view(world, count)[rank] for g in given]), "alltoall")
        receive = pg.recv([output], (rank - 1) % world, 3)
        pg.send([given[rank][:count].clone()], (rank + 1) % world, 3).wait()
        receive.wait()
        assert_same(output, given[(rank - 1) % world][:count], "send and recv")
    pg.barrier().wait()


# --- profilers and loggers ----------------------------------------------------------------------------------


@on_ranks(2)
def test_profiler_events(rank, world):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(3, 5))
        dist.all_reduce(torch.ones(3, 5), async_op=True).wait()
        dist.broadcast(torch.ones(7), 0)
        dist.barrier()
    events = profiler.events()
    names = [event.name for event in events]
    assert names.count(f"{BACKEND}:all_reduce") == 2, sorted(set(names))
    counted = [row.count for row in profiler.key_averages() if row.key == f"{BACKEND}:all_reduce"]
    assert counted == [2], "key_averages() counts synchronous and asynchronous calls in one row"
    assert names.count(f"{BACKEND}:broadcast") == 1, sorted(set(names))
    if OVER_NVX:
        assert "record_param_comms" in names, sorted(set(names))
        assert f"{BACKEND}:barrier" in names, sorted(set(names))
    for event in events:
        if event.name == f"{BACKEND}:all_reduce":
            assert event.input_shapes == [[3, 5]]


PROFILED = """
import sys, time
import torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
rank = int(sys.argv[2])
dist.init_process_group("nvx", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
for _ in range(10):
    dist.barrier()
    time.sleep(0.03 * rank)
    with profile(activities=[ProfilerActivity.CPU]):
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
        works += [dist.irecv(torch.ones(3), 1 - rank)]
    for work in [*works, dist.isend(torch.ones(3), 1 - rank)]:
        work.wait()
dist.destroy_process_group()
"""


@only_nvx
def test_operations_may_end_after_the_profiler(tmp_path):
    """torch would write their ends to memory that the profiler has freed."""
    commands = [["-c", PROFILED, str(tmp_path / "store"), str(rank)] for rank in range(2)]
    ranks = [warm.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    printed = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed


@only_nvx
@on_ranks(2)
def test_profiler_titles_of_every_collective(rank, world):
    """Every asynchronous operation appears under a name of nvx."""
    for name, call, _ in every_collective(rank, world):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            call().wait()
        titles = [e.name for e in profiler.events() if e.name.startswith("nvx:")]
        assert titles, f"{name} leaves no event"
        assert "record_param_comms" in [e.name for e in profiler.events()], name


def seen_by_the_profiler(path, call):
    """The fields of a call's `record_param_comms` events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [e["args"] for e in events if e.get("name") == "record_param_comms"]


@only_nvx
@on_ranks(2)
def test_profiler_shows_what_is_asynchronous(rank, world):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        for async_op in (False, True):

            def call(async_op=async_op):
                work = dist.all_reduce(torch.ones(5), async_op=async_op)
                if async_op:
                    work.wait()

            (event,) = seen_by_the_profiler(path, call)
            assert bool(event.get("Is asynchronized op", async_op)) == async_op, event  # 2.11 does not record it


@only_nvx
@on_ranks(4)
def test_profiler_shows_messages_splits_and_ranks(rank, world):
    group = dist.new_group([0, 2])
    uneven = dist.new_group([0, 1, 3])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        tensor = torch.ones(5)
        if rank == 1:
            (event,) = seen_by_the_profiler(path, lambda: dist.send(tensor, 0))
            assert (event["Collective name"], event["In msg nelems"], event["Out msg nelems"]) == ("send", 5, 0)
        elif rank == 0:
            (event,) = seen_by_the_profiler(path, lambda: dist.recv(tensor, 1))
            assert (event["Collective name"], event["In msg nelems"], event["Out msg nelems"]) == ("recv", 0, 5)
        if rank in (0, 2):
            splits = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])  # send splits, receive splits
            given, taken = torch.ones(sum(splits[0])), torch.ones(sum(splits[1]))
            (event,) = seen_by_the_profiler(
                path, lambda: dist.all_to_all_single(taken, given, splits[1], splits[0], group=group)
            )
            assert (event["In split size"], event["Out split size"]) == (str(splits[0]), str(splits[1]))
            assert (event["Global rank start"], event["Global rank stride"]) == (0, 2)
        if rank != 2:
            (event,) = seen_by_the_profiler(path, lambda: dist.all_reduce(tensor, group=uneven))
            assert event["Global rank start"] == 0 and "Global rank stride" not in event, "they are not evenly apart"


@only_nvx
@on_ranks(2)
def test_collectives_timing(rank, world):
    dist.group.WORLD._enable_collectives_timing()
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    work.wait()
    assert 0 < work._get_duration() < 10_000
    if rank == 0:
        time.sleep(0.2)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.wait()
    assert rank == 0 or work._get_duration() > 50, "it includes the wait for rank 0"
