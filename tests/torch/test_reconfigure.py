"""Groups whose ranks change: `init_process_group(enable_reconfigure=True)` and `dist._reconfigure` of torch 2.14."""

import gc
import os
import pickle
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, TORCH, eventually, only_nvx
from reconfiguring import arrive, begin, check_group, come_together, connect, exchange, here, reconfigure, runner

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch has no reconfigure")

# --- the ranks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(ranks):
    """Runs a body in every rank, without a group, over a store that outlives any of them."""
    return runner(ranks)


# --- lists of ranks
# ----------------------------------------------------------------------------------------------------


def in_a_list(rank, world, port):
    store = arrive(port, rank, world)
    assert dist._supports_reconfigure() and here() == (rank, world)
    for call in (lambda: dist.all_reduce(torch.ones(2)), dist.barrier, lambda: dist.send(torch.ones(1), 1 - rank % 2)):
        with pytest.raises(RuntimeError, match=r"has not been initialized.*Call reconfigure\(\)"):
            call()
    before = dist._get_reconfigure_handle()
    handles = exchange(store, "first", rank, range(world))
    work = reconfigure(1, handles[::-1])
    assert work.wait() and work.is_completed() and work.is_success()
    check_group(world - 1 - rank, world)
    assert dist._get_reconfigure_handle() != before
    with pytest.raises(RuntimeError, match="not .*(among|part of)"):
        reconfigure(2, handles)
    check_group(world - 1 - rank, world)


@pytest.mark.parametrize("world", [2, 3])
def test_a_list_gives_ranks_by_position(started, world):
    started(in_a_list, world)


def in_a_set(rank, world, port):
    store = arrive(port, rank, world)
    assert reconfigure(1, set(exchange(store, "first", rank, range(world)))).wait()
    check_group(rank, world)
    turned = (rank + 1) % world
    handles = exchange(store, "second", rank, range(world))
    assert reconfigure(2, [handles[(r - 1) % world] for r in range(world)]).wait()
    check_group(turned, world)
    assert reconfigure(3, set(exchange(store, "third", rank, range(world)))).wait()
    check_group(turned, world)  # the order is kept


def test_a_set_keeps_the_order_of_ranks(started):
    started(in_a_set, 3)


def in_a_set_of_many(rank, world, port):
    store = connect(port)
    number = [2, 10, 9][rank]  # numerical order differs from the order of the texts
    begin(store, number, 100)
    assert reconfigure(1, set(exchange(store, "first", rank, range(world)))).wait()
    check_group([0, 2, 1][rank], world)


@only_nvx
def test_a_set_is_in_the_order_of_numbers(started):
    started(in_a_set_of_many, 3)


def in_many_turns(rank, world, port):
    store = arrive(port, rank, world)
    for turn in range(8):
        handles = exchange(store, f"turn {turn}", rank, range(world))
        size = world - turn % 2  # every second group excludes the last rank
        order = [(r + turn) % world for r in range(size)]
        if rank in order:
            assert reconfigure(turn, [handles[r] for r in order]).wait()
            check_group(order.index(rank), size)
        come_together(store, f"end of turn {turn}", world)


def test_repeated_reconfigurations(started):
    started(in_many_turns, 3)


# --- ranks that leave and join
# ------------------------------------------------------------------------------------------


def without_the_dead(rank, world, port):
    store = arrive(port, rank, world)
    assert reconfigure(1, exchange(store, "first", rank, range(world))).wait()
    check_group(rank, world)
    handles = exchange(store, "second", rank, range(world))
    store.set(f"pid {rank}", str(os.getpid()))
    pids = [store.get(f"pid {r}").decode() for r in range(world)]
    come_together(store, "all know", world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        for _ in range(1000):
            dist.all_reduce(torch.ones(2))
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        reconfigure(2, handles, seconds=3).wait()
    if OVER_NVX:
        assert "rank 1" in str(raised.value) and f"pid {pids[1]}" in str(raised.value)
        assert time.monotonic() - began < 2.5
        with pytest.raises(RuntimeError, match=r"has not been initialized.*failed.*rank 1"):
            dist.all_reduce(torch.ones(2))
    assert here() == (rank, world)  # a failed reconfigure changes nothing
    left = [r for r in range(world) if r != 1]
    assert reconfigure(3, exchange(store, "third", rank, left)).wait()
    check_group(left.index(rank), len(left))


def test_survivors_go_on_without_the_dead(started):
    started(without_the_dead, 3, dies=(1,))


def with_a_newcomer(rank, world, port):
    """Rank 1 dies, and the last process replaces it."""
    store = connect(port)
    newcomer = rank == world - 1
    if not newcomer:
        begin(store, rank, world - 1)
        assert reconfigure(1, exchange(store, "first", rank, range(world - 1))).wait()
        check_group(rank, world - 1)
        come_together(store, "all have checked", world - 1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                dist.all_reduce(torch.ones(2))
    else:
        eventually(lambda: store.add("all have checked", 0) == world - 1, 30)
        begin(store, 1, world - 1)
    left = [r for r in range(world) if r != 1]
    assert reconfigure(2, exchange(store, "second", rank, left)).wait()
    check_group(left.index(rank), len(left))
    assert reconfigure(3, set(exchange(store, "third", rank, left))).wait()
    check_group(left.index(rank), len(left))
    group = dist.new_group(list(range(len(left))))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == len(left)


def test_a_newcomer_takes_the_place_of_the_dead(started):
    started(with_a_newcomer, 4, dies=(1,))


def newcomers_last(rank, world, port):
    store = connect(port)
    old = [1, 2]
    if rank in old:
        begin(store, rank, 3)
        assert reconfigure(1, exchange(store, "first", rank, old)).wait()
        check_group(rank - 1, 2)
    else:
        begin(store, 0, 3)
    assert reconfigure(2, set(exchange(store, "second", rank, range(world)))).wait()
    check_group([2, 0, 1][rank], 3)


@only_nvx
def test_in_a_set_those_that_were_there_come_first(started):
    started(newcomers_last, 3)


# --- refused calls
# -----------------------------------------------------------------------------------------------------


def with_another_rank(handle):
    """An outdated handle of the same rank."""
    fields = handle.split(":")
    return ":".join([fields[0], str(int(fields[1]) + 1), *fields[2:]])


def refused(rank, world, port):
    store = arrive(port, rank, world)
    assert reconfigure(1, exchange(store, "first", rank, range(world))).wait()
    handles = exchange(store, "second", rank, range(world))
    own = handles[rank]
    for uuid, given, words in (
        (2, [h for h in handles if h != own], "not .*(among|part of)"),
        (2, [], "handle"),
        (2, [own, own], "twice|unique"),
        (2, [own, with_another_rank(own)], "two handles of one rank"),
        (2, [*handles, with_another_rank(handles[1 - rank])], "two handles of one rank"),
        (2, [own, "garbage"], "(no|Invalid) .*handle.*garbage"),
        (2, [own, "nccl2:1:-1:7:127.0.0.1:29500"], "(no|Invalid) .*handle.*nccl2"),
        (2, [own, own + "\x1b[2J\n"], "handle"),
        (2, [own, own.rpartition(":")[0].rpartition(":")[0]], "handle"),
        (1, handles, "uuid 1 was already used"),
    ):
        with pytest.raises(RuntimeError, match=words) as raised:
            reconfigure(uuid, given)
        assert isinstance(raised.value, ValueError) and "\x1b" not in str(raised.value)
        assert dist._get_reconfigure_handle() == own
    check_group(rank, world)
    assert reconfigure(2, handles).wait()  # refused calls consumed nothing
    check_group(rank, world)


@only_nvx
def test_bad_arguments_leave_the_group_as_it_is(started):
    started(refused, 2)


def used_before(rank, world, port):
    store = arrive(port, rank, world)
    assert reconfigure(7, exchange(store, "first", rank, range(world))).wait()
    check_group(rank, world)
    come_together(store, "all have checked", world)
    dist.destroy_process_group()
    begin(store, rank, world)
    handles = exchange(store, "second", rank, range(world))
    with pytest.raises(RuntimeError, match="uuid 7 was already used in this store.*Next: .*uuid that is new"):
        reconfigure(7, handles)
    assert reconfigure(8, handles).wait()
    check_group(rank, world)


@only_nvx
def test_a_uuid_that_other_groups_have_used(started):
    started(used_before, 2)


def of_two_minds(rank, world, port):
    store = arrive(port, rank, world)
    handles = exchange(store, "first", rank, range(world))
    if rank == 0:
        work = reconfigure(1, handles, seconds=2)
        come_together(store, "rank 0 has called", world)
        with pytest.raises(RuntimeError, match="rank 1"):
            work.wait()
    else:
        come_together(store, "rank 0 has called", world)
        with pytest.raises(RuntimeError, match="uuid 1 was already used.*another order"):
            reconfigure(1, handles[::-1])
    if rank == 0:
        work = reconfigure(2, handles)
        come_together(store, "rank 0 has called again", world)
    else:
        come_together(store, "rank 0 has called again", world)
        with pytest.raises(RuntimeError, match="uuid 2 was already used.*another order"):
            reconfigure(2, handles[::-1])
        work = reconfigure(2, handles)  # the refused call has not used the uuid
    assert work.wait()
    check_group(rank, world)


@only_nvx
def test_lists_that_differ_are_distinguished(started):
    started(of_two_minds, 2)


def late(rank, world, port):
    store = arrive(port, rank, world)
    handles = exchange(store, "first", rank, range(world))
    store.set(f"pid {rank}", str(os.getpid()))
    missing = f"rank 2 is pid {store.get('pid 2').decode()} on host "
    if rank != 2:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError) as raised:
            reconfigure(1, handles, seconds=1.5).wait()
        assert missing in str(raised.value) and "Next: " in str(raised.value)
        assert time.monotonic() - began < 8
    come_together(store, "time is up", world)
    if rank == 2:
        with pytest.raises(dist.DistBackendError, match="failed to create group"):
            reconfigure(1, handles, seconds=20).wait()
    assert reconfigure(2, handles).wait()
    check_group(rank, world)


@only_nvx
def test_absent_rank_is_named(started):
    started(late, 3)


def ordinary(rank, world, port):
    arrive(port, rank, world, enable_reconfigure=False)
    assert not dist._supports_reconfigure()
    for call in (dist._get_reconfigure_handle, lambda: reconfigure(1, ["x"])):
        with pytest.raises(RuntimeError, match=r"Next: init_process_group\(\"nvx\", enable_reconfigure=True\)"):
            call()
    check_group(rank, world)


@only_nvx
def test_an_ordinary_group_names_how_to_make_one_that_changes(started):
    started(ordinary, 2)


# --- the work, and the previous group
# ----------------------------------------------------------------------------------


def in_flight(rank, world, port):
    store = arrive(port, rank, world)
    assert reconfigure(1, exchange(store, "first", rank, range(world))).wait()
    check_group(rank, world)
    handles = exchange(store, "second", rank, range(world))
    waits = dist.irecv(torch.zeros(3), (rank + 1) % world)
    sums = dist.all_reduce(torch.ones(3), async_op=True) if rank == 0 else None
    assert reconfigure(2, handles).wait()
    check_group(rank, world)
    for work in (waits, sums):
        if work is not None:
            with pytest.raises(RuntimeError, match="aborted|reconfigured|rank"):
                work.wait()
    check_group(rank, world)


@only_nvx
def test_operations_in_flight_end(started):
    started(in_flight, 2)


def recorded():
    """The last sums in torch's recorder; completion hooks report their ends."""
    entries = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(backend="nvx")).get("entries", [])
    return [e["state"] for e in entries if e["profiling_name"].endswith(":all_reduce")][-2:]


def hooked(rank, world, port):
    store = arrive(port, rank, world, seconds=2)
    group = dist.group.WORLD
    done, aborts, dropped = [], [], []
    group._register_on_completion_hook(done.append)
    group.register_abort_hook(903, lambda: aborts.append(1))
    group.register_abort_hook(904, lambda: dropped.append(1))
    for uuid in (1, 2):
        assert reconfigure(uuid, exchange(store, f"turn {uuid}", rank, range(world))).wait()
        before = len(done)
        check_group(rank, world)
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        eventually(lambda before=before: len(done) >= before + 4)
        if TORCH >= (2, 15):  # earlier torch records its own backends only
            eventually(lambda: recorded() == ["completed"] * 2)
        group.unregister_abort_hook(904)
    assert aborts == []  # nothing has failed
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.recv(torch.zeros(1), 1)
        eventually(lambda: aborts == [1])
    come_together(store, "rank 0 is late", world)
    group.unregister_abort_hook(903)
    assert reconfigure(3, exchange(store, "third", rank, range(world))).wait()
    check_group(rank, world)
    assert dropped == []


@only_nvx
def test_hooks_go_on(started):
    started(hooked, 2)


def timed(rank, world, port):
    import nvx

    store = arrive(port, rank, world, seconds=1.5)
    assert reconfigure(1, exchange(store, "first", rank, range(world)), seconds=60).wait()
    check_group(rank, world)
    come_together(store, "all have checked", world)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError):
        dist.recv(torch.zeros(1), (rank + 1) % world)
    assert time.monotonic() - began < 10
    nvx.set_timeout(timedelta(seconds=17))
    assert reconfigure(2, exchange(store, "second", rank, range(world)), seconds=60).wait()
    check_group(rank, world)
    assert nvx._backend(dist.group.WORLD).options._timeout == timedelta(seconds=17)
    assert nvx.sequence_number() > 0 and nvx.pool_stats() is None
    nvx.monitored_barrier()


@only_nvx
def test_timeouts_of_the_setup_and_of_operations(started):
    started(timed, 2)


def in_groups_of_groups(rank, world, port):
    import nvx

    store = arrive(port, rank, world, enable_reconfigure=False)
    options = nvx.Options()
    options.enable_reconfigure = True
    group = dist.new_group(pg_options=options)
    store.set(f"handle {rank}", dist._get_reconfigure_handle(group))
    handles = [store.get(f"handle {r}").decode() for r in range(world)]
    assert dist._reconfigure(uuid=1, handles=handles, group=group).wait()
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == world
    dist.destroy_process_group(group)
    gc.collect()
    check_group(rank, world)


@only_nvx
def test_a_group_made_by_options(started):
    started(in_groups_of_groups, 2)


def in_detail(rank, world, port):
    store = connect(port)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        begin(store, rank, world)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    assert not dist._supports_reconfigure()
    with pytest.raises(RuntimeError, match="does not support"):
        dist._get_reconfigure_handle()


def test_the_wrapper_of_debug_detail_does_not_offer_it(started):
    started(in_detail, 2)
