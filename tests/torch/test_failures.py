"""Every rank must report a failure between ranks soon, with its cause, and stay usable."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from ranks import SEVERAL_HOSTS, eventually, make_backend, on_ranks, on_two_hosts, only_nvx, sync
from reference import ones

pytestmark = only_nvx
CPU = torch.device("cpu")
ODD = 1  # the rank that deviates or dies


def caught(call, within):
    """The `DistBackendError` that the call raises; asserts that it came within the limit."""
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError) as raised:
        call()
    took = time.monotonic() - started
    assert took < within, f"only after {took:.2f} s: {raised.value}"
    return str(raised.value)


# --- disagreement -------------------------------------------------------------------------------------------


def gathered(count, world):
    return [ones(count) for _ in range(world)]


MISMATCHES = {
    # name: (call of the others, call of the odd rank, text of both sides)
    "operation": (
        lambda g, w: dist.all_reduce(ones(), group=g),
        lambda g, w: dist.broadcast(ones(), 0, group=g),
        ("all_reduce", "broadcast"),
    ),
    "barrier": (
        lambda g, w: dist.all_reduce(ones(), group=g),
        lambda g, w: dist.barrier(g),
        ("all_reduce", "barrier"),
    ),
    "dtype": (
        lambda g, w: dist.all_reduce(ones(), group=g),
        lambda g, w: dist.all_reduce(ones(dtype=torch.int32), group=g),
        ("f32", "i32"),
    ),
    "count": (
        lambda g, w: dist.all_reduce(ones(10), group=g),
        lambda g, w: dist.all_reduce(ones(11), group=g),
        ("10", "11"),
    ),
    "large count": (
        lambda g, w: dist.all_reduce(ones(700_000), group=g),
        lambda g, w: dist.all_reduce(ones(3), group=g),
        ("700000", "3"),
    ),
    "reduce operator": (
        lambda g, w: dist.all_reduce(ones(), group=g),
        lambda g, w: dist.all_reduce(ones(), dist.ReduceOp.MAX, group=g),
        ("sum", "max"),
    ),
    "sparse against dense": (
        lambda g, w: dist.all_reduce(ones(), group=g),
        lambda g, w: dist.all_reduce(ones().to_sparse(), group=g),
        (r"all_reduce\(sum, f32, 10 elements\)", r"all_reduce\(sum, f32, sparse\)"),
    ),
    "type of sparse": (
        lambda g, w: dist.all_reduce(ones().to_sparse(), group=g),
        lambda g, w: dist.all_reduce(ones().double().to_sparse(), group=g),
        (r"all_reduce\(sum, f32, sparse\)", r"all_reduce\(sum, f64, sparse\)"),
    ),
    "root": (
        lambda g, w: dist.broadcast(ones(), 0, group=g),
        lambda g, w: dist.broadcast(ones(), 2, group=g),
        ("root 0", "root 2", "their roots differ"),
    ),
    "root of reduce": (
        lambda g, w: dist.reduce(ones(), 0, group=g),
        lambda g, w: dist.reduce(ones(), 1, group=g),
        ("root 0", "root 1", "their roots differ"),
    ),
    "gathered count": (
        lambda g, w: dist.all_gather_into_tensor(ones(10 * w), ones(10), group=g),
        lambda g, w: dist.all_gather_into_tensor(ones(12 * w), ones(12), group=g),
        ("30", "36"),
    ),
    "scattered count": (
        lambda g, w: dist.reduce_scatter_tensor(ones(5), ones(5 * w), group=g),
        lambda g, w: dist.reduce_scatter_tensor(ones(6), ones(6 * w), group=g),
        ("15", "18"),
    ),
    "parts of all_gather": (
        lambda g, w: dist.all_gather(gathered(10, w), ones(10), group=g),
        lambda g, w: dist.all_gather(gathered(12, w), ones(12), group=g),
        ("30", "36"),
    ),
    "exchanged count": (
        lambda g, w: dist.all_to_all_single(ones(2 * w), ones(2 * w), group=g),
        lambda g, w: dist.all_to_all_single(ones(4 * w), ones(4 * w), group=g),
        ("8 bytes", "16 bytes"),
    ),
    "part of gather": (
        lambda g, w: dist.gather(ones(10), gathered(10, w) if dist.get_rank() == 0 else None, dst=0, group=g),
        lambda g, w: dist.gather(ones(12), dst=0, group=g),
        ("40 bytes", "48 bytes", "sizes of the tensors"),
    ),
}


def mismatch(rank, world, name):
    usual, odd, words = MISMATCHES[name]
    group = dist.new_group()
    dist.all_reduce(ones(), group=group)

    def call():
        (odd if rank == ODD else usual)(group, world)
        dist.barrier(group)  # a rank whose call could return gets the error from its next call

    text = caught(call, within=3)
    first = text.splitlines()[0]
    assert first.startswith("nvx: "), text
    for word in words:
        assert re.search(rf"\b{word}(?!\w)", first), f"{name}: {word!r} is not in {first!r}"
    assert f"rank {rank}" in first, text
    others = [r for r in range(world) if r != rank and f"rank {r}" in first]
    assert others, f"no other rank in {first!r}"
    assert rank == ODD or ODD in others, f"the rank that differs is not named: {first!r}"
    caught(lambda: dist.all_reduce(ones(), group=group), within=0.5)
    sync("saw it")
    total = ones()
    dist.all_reduce(total)
    assert total.tolist() == [float(world)] * 10


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(ranks, name):
    ranks.run(mismatch, world=3, name=name, limit=30)


@pytest.mark.parametrize("name", ["count", "dtype"])
def test_mismatch_of_a_message(ranks, name):
    ranks.run(message_mismatch, world=2, name=name)


def message_mismatch(rank, world, name):
    """The receiver reports that the message does not fit its buffer; nothing is written."""
    group = dist.new_group()
    if rank == 0:
        work = dist.isend(ones(10), 1, group=group)
        sync("received")
        del work
        return
    output = ones(11) * 7 if name == "count" else torch.full((10,), 7, dtype=torch.int32)
    text = caught(lambda: dist.recv(output, 0, group=group), within=3)
    assert text.startswith("nvx: ") and "rank 0" in text.splitlines()[0], text
    for word in ("10", "11") if name == "count" else ("f32", "i32"):
        assert re.search(rf"\b{word}\b", text.splitlines()[0]), text
    assert output.unique().tolist() == [7]
    sync("received")


@on_ranks(2)
def test_calls_after_a_failure_report_that_it_was_earlier(rank, world):
    """Both the rank that timed out and the rank that comes later learn that the group is unusable, and what to do."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(ones(), group=group)
    if rank == ODD:
        sync("gave up")
        text = caught(lambda: dist.all_reduce(ones(), group=group), within=3)
        assert "timed out in all_reduce" in text and "reported by rank 0" in text, text
        assert "which called all_reduce(sum, f32, 10 elements) #2 after that" in text or SEVERAL_HOSTS, text
    else:
        text = caught(lambda: dist.all_reduce(ones(), group=group), within=10)
        assert "earlier" not in text and "init_process_group(timeout=)" in text, text
        assert re.search(r"; to see what rank 1 does: py-spy dump --pid \d+", text) or SEVERAL_HOSTS, text
        sync("gave up")
    for named, call in (
        (r"all_reduce\(.*\)", lambda: dist.all_reduce(ones(), group=group)),
        (r"all_reduce\(.*\)", lambda: dist.all_reduce(ones(), group=group, async_op=True).wait()),
        ("send", lambda: dist.send(ones(), 1 - rank, group=group)),
        ("recv", lambda: dist.recv(ones(), 1 - rank, group=group)),
        ("barrier", lambda: dist.barrier(group=group)),
    ):
        text = caught(call, within=0.5)
        first = rf"nvx: group \w+ failed earlier, so {named} was not begun; first error: timed out in all_reduce"
        assert re.match(first, text), text
        assert text.splitlines()[0].endswith(". Next: destroy the group and make another one"), text


@on_ranks(3)
def test_one_rank_calls_more_often(rank, world):
    """The odd rank issues a collective that no other rank calls: it gets a timeout that names the missing ranks."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(ones(), group=group)
    if rank == ODD:
        first = caught(lambda: dist.all_reduce(ones(), group=group), within=3).splitlines()[0]
        assert "rank 0" in first and (SEVERAL_HOSTS or "rank 2" in first), first
    sync("saw it")


# --- death --------------------------------------------------------------------------------------------------


def die(how, folder):
    with open(os.path.join(folder, "died"), "w") as note:
        note.write(f"{time.monotonic()} {os.getpid()}")
    if how == "os._exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)


def assert_death_named(text, rank, folder):
    reported = time.monotonic()
    with open(os.path.join(folder, "died")) as note:
        died, pid = note.read().split()
    first = text.splitlines()[0]
    assert first.startswith("nvx: "), text
    assert f"rank {ODD}" in first, text
    assert pid in first, f"the pid {pid} is not in {first!r}"
    assert socket.gethostname() in text or "host host" in text, text
    assert f"rank {rank}" in text, text
    assert reported - float(died) < 1.0, f"reported after {reported - float(died):.2f} s"


BLOCKED_IN = {
    "all_reduce": lambda g, w: dist.all_reduce(ones(), group=g),
    "large all_reduce": lambda g, w: dist.all_reduce(ones(3_000_000), group=g),
    "barrier": lambda g, w: dist.barrier(g),
    "all_gather": lambda g, w: dist.all_gather(gathered(1000, w), ones(1000), group=g),
    "all_to_all": lambda g, w: dist.all_to_all_single(ones(1000 * w), ones(1000 * w), group=g),
    "broadcast": lambda g, w: dist.broadcast(ones(70_001), ODD, group=g),
    "recv": lambda g, w: dist.recv(ones(), ODD, group=g),
    "recv from any source": lambda g, w: dist.recv(ones(), group=g),
    "asynchronous": lambda g, w: dist.all_reduce(ones(70_001), group=g, async_op=True).wait(),
    "asynchronous, future": lambda g, w: dist.all_reduce(ones(), group=g, async_op=True).get_future().wait(),
    "monitored_barrier": lambda g, w: (g or dist.group.WORLD).monitored_barrier(timedelta(seconds=20)),
}


def death(rank, world, how, where, folder):
    for _ in range(3):
        dist.all_reduce(ones())
    dist.barrier()
    if rank == ODD:
        time.sleep(0.2)  # the others are inside the call
        die(how, folder)
    kind = RuntimeError if where == "asynchronous, future" else dist.DistBackendError
    with pytest.raises(kind) as raised:
        BLOCKED_IN[where](None, world)
        dist.barrier()  # a rank that needed nothing from the dead rank gets the error from its next call
    assert_death_named(str(raised.value).removeprefix("DistBackendError: "), rank, folder)
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=f"rank {ODD}"):
        dist.all_reduce(ones())
    dist.destroy_process_group()
    assert time.monotonic() - started < 0.5


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "SIGSEGV"])
def test_death(ranks, tmp_path, how):
    ranks.run(death, world=3, how=how, where="all_reduce", folder=str(tmp_path), dies={ODD}, limit=20)


@pytest.mark.parametrize("where", [name for name in BLOCKED_IN if name != "all_reduce"])
def test_death_while_blocked_in(ranks, tmp_path, where):
    ranks.run(death, world=3, how="SIGKILL", where=where, folder=str(tmp_path), dies={ODD}, limit=20)


def death_while_idle(rank, world, folder):
    dist.all_reduce(ones())
    if rank == ODD:
        die("SIGKILL", folder)
    time.sleep(0.5)
    text = caught(lambda: dist.all_reduce(ones()), within=0.5)
    assert f"rank {ODD}" in text.splitlines()[0], text


def test_death_while_idle(ranks, tmp_path):
    ranks.run(death_while_idle, world=3, folder=str(tmp_path), dies={ODD})


def death_in_new_group(rank, world, folder):
    """A rank dies while the others set up a group: they get the error long before the store's timeout."""
    dist.all_reduce(ones())
    dist.barrier()
    if rank == ODD:
        time.sleep(0.2)
        die("SIGKILL", folder)
    with pytest.raises(RuntimeError) as raised:
        group = dist.new_group(use_local_synchronization=True)
        dist.all_reduce(ones(), group=group)
    assert f"rank {ODD}" in str(raised.value), str(raised.value)
    with open(os.path.join(folder, "died")) as note:
        assert time.monotonic() - float(note.read().split()[0]) < 5.0


def test_death_while_a_group_is_made(ranks, tmp_path):
    ranks.run(death_in_new_group, world=3, folder=str(tmp_path), dies={ODD}, limit=20)


def death_of_one_group_only(rank, world, folder):
    """A group without the dead rank goes on."""
    beside = dist.new_group([0, 2])
    dist.all_reduce(ones())
    if rank == ODD:
        die("SIGKILL", folder)
    caught(lambda: dist.all_reduce(ones()), within=2)
    for _ in range(5):
        total = ones()
        dist.all_reduce(total, group=beside)
        assert total.tolist() == [2.0] * 10


def test_death_does_not_touch_other_groups(ranks, tmp_path):
    ranks.run(death_of_one_group_only, world=3, folder=str(tmp_path), dies={ODD})


def death_of_a_rank_of_an_unnamed_group(rank, world, folder):
    """A group that a program makes itself may have any ranks: its rank 0 here is not rank 0 of the job."""
    if rank != 0:
        store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
        beside = make_backend(store, rank - 1, 2)
        beside.barrier().wait()
    dist.all_reduce(ones())
    if rank == ODD:
        die("SIGKILL", folder)
    time.sleep(0.5 if rank == 0 else 0)  # meanwhile rank 2 checks whether rank 0 has ended
    group = dist.new_group([0, 2], use_local_synchronization=True)
    total = ones()
    dist.all_reduce(total, group=group)
    assert total.tolist() == [2.0] * 10


def test_death_in_an_unnamed_group_is_blamed_on_no_other_rank(ranks, tmp_path):
    ranks.run(death_of_a_rank_of_an_unnamed_group, world=3, folder=str(tmp_path), dies={ODD})


def death_after_fork(rank, world, folder):
    """A child of the dead rank lives on with every inherited descriptor."""
    dist.all_reduce(ones())
    dist.barrier()
    if rank == ODD:
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        time.sleep(0.2)
        die("SIGKILL", folder)
    text = caught(lambda: dist.all_reduce(ones()), within=3)
    assert_death_named(text, rank, folder)


def test_death_is_seen_although_a_child_lives(ranks, tmp_path):
    ranks.run(death_after_fork, world=3, folder=str(tmp_path), dies={ODD}, limit=20)


# --- groups after a failure ----------------------------------------------------------------------------------


def survivors_start_again(rank, world, folder):
    dist.all_reduce(ones())
    if rank == ODD:
        die("SIGKILL", folder)
    caught(lambda: dist.all_reduce(ones()), within=2)
    dist.destroy_process_group()
    mine = rank if rank < ODD else rank - 1
    for life in range(5):
        store = dist.FileStore(os.path.join(folder, f"life-{life}"), world - 1)
        dist.init_process_group("nvx", store=store, rank=mine, world_size=world - 1)
        total = torch.full((70_001,), mine + 1.0)
        dist.all_reduce(total)
        assert total.unique().tolist() == [world * (world - 1) / 2]
        dist.destroy_process_group()


def second_life(rank, world, folder):
    """The survivors renumber their ranks; one of them is late. No rank may take it for the dead rank of the first
    group."""
    former = dist.group.WORLD  # keeps a reference to the failed group
    dist.all_reduce(ones())
    if rank == 0:
        die("SIGKILL", folder)
    caught(lambda: dist.all_reduce(ones()), within=2)
    dist.destroy_process_group()
    if rank == world - 1:
        time.sleep(1.0)
    store = dist.FileStore(os.path.join(folder, "second"), world - 1)
    dist.init_process_group("nvx", store=store, rank=rank - 1, world_size=world - 1)
    if rank == world - 1:
        time.sleep(1.0)
    group = dist.new_group()
    total = ones()
    dist.all_reduce(total, group=group)
    assert total.tolist() == [world - 1.0] * 10
    del former


def test_a_late_rank_in_a_second_group_over_one_store(ranks, tmp_path):
    ranks.run(second_life, world=3, folder=str(tmp_path), dies={0})


@pytest.mark.parametrize("world", [2, 4])
def test_survivors_start_again(ranks, tmp_path, world):
    ranks.run(survivors_start_again, world=world, folder=str(tmp_path), dies={ODD})


@on_ranks(2)
def test_the_process_lives_on_after_each_failure(rank, world):
    """Several groups fail, one after the other, in a process that continues."""
    for turn in range(5):
        group = dist.new_group()
        text = caught(
            lambda: dist.all_reduce(ones(10 + rank), group=group) or dist.barrier(group),  # noqa: B023
            within=3,
        )
        assert "nvx: " in text
        sync(f"turn {turn}")
        dist.destroy_process_group(group)
    total = ones()
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 10


# --- no failure ---------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_stopped_rank_is_waited_for(rank, world):
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pids[1], signal.SIGCONT)
    for _ in range(20):
        total = torch.full((5000,), rank + 1.0)
        dist.all_reduce(total)
        assert total.unique().tolist() == [6.0]


# --- unresponsive ranks on this host and on others --------------------------------------------------------------


@pytest.mark.parametrize("how", ["forked", "with descriptors"])
@on_two_hosts(2, dies={ODD})
def test_children_that_live_on_do_not_hide_a_death(rank, world, how):
    """Children inherit connections, which close only when no process has them open."""
    dist.all_reduce(ones())
    if rank == ODD:
        if how == "forked":
            if os.fork() == 0:
                time.sleep(8)
                os._exit(0)
        else:
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(8)"], close_fds=False)
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    caught(lambda: dist.all_reduce(ones()), within=5)


@on_two_hosts(4, dies={ODD})
def test_ranks_of_the_same_host_report_how_a_process_ended(rank, world):
    """A rank that only lost its connection and does not know the cause may report first."""
    dist.all_reduce(ones())
    hosts = [None] * world
    dist.all_gather_object(hosts, os.environ["NVX_HOST_ID"])
    if rank == ODD:
        os.kill(os.getpid(), signal.SIGKILL)
    printed = caught(lambda: dist.all_reduce(ones()), within=5)
    assert re.search(rf"rank {ODD} \(pid \d+, host \w+\)", printed), printed
    if hosts[rank] == hosts[ODD]:
        assert re.search(r" has ended(?!, or)", printed), printed


def timeout_beside_a_stopped_rank(rank, world, within):
    """Returns the error of the other ranks. The stopped rank returns nothing; its call raises after it resumes."""
    dist.all_reduce(ones())
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    if rank == ODD:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the other rank has timed out
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(ones())
        return None
    stopped = psutil.Process(pids[ODD])
    eventually(lambda: stopped.status() == psutil.STATUS_STOPPED)
    try:
        return caught(lambda: dist.all_reduce(ones()), within=within)
    finally:
        stopped.resume()


@on_two_hosts(2, op_timeout=4)
def test_a_timeout_reports_silence(rank, world):
    printed = timeout_beside_a_stopped_rank(rank, world, within=9)
    assert rank == ODD or "gives no sign of life for" in printed, printed


@on_two_hosts(2, op_timeout=2, fresh=True)
def test_a_later_group_works_if_a_rank_was_stopped_before_it_connected(rank, world):
    """Each rank closes connections that the other has not noticed."""
    store = dist.distributed_c10d._get_default_store()
    if rank == ODD:
        store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)  # until the other rank has timed out
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
    else:
        stopped = psutil.Process(int(store.get("pid")))
        eventually(lambda: stopped.status() == psutil.STATUS_STOPPED)
        try:
            caught(dist.barrier, within=6)
            time.sleep(1)  # UCX closes the connection
        finally:
            stopped.resume()
    sync("both have failed")
    dist.destroy_process_group()
    later = dist.PrefixStore("later", store)
    dist.init_process_group("nvx", store=later, rank=rank, world_size=world, timeout=timedelta(seconds=4))
    total = ones(300_007)
    dist.all_reduce(total)
    assert total.unique().tolist() == [2.0]


@pytest.mark.skipif(SEVERAL_HOSTS, reason="seen on one host only")
@on_ranks(2, op_timeout=1.5)
def test_a_timeout_names_the_stopped_rank(rank, world):
    printed = timeout_beside_a_stopped_rank(rank, world, within=6)
    assert rank == ODD or "stopped by a signal" in printed, printed
    assert rank == ODD or re.search(r"Next: let rank 1 go on \(kill -CONT \d+\), and find out", printed)


@pytest.mark.parametrize("store", ["file", "tcp"])
@on_ranks(3, 4, dies={ODD})
def test_those_that_are_left_go_on_in_a_smaller_group(rank, world, store):
    dist.all_reduce(ones())
    if rank == ODD:
        os.kill(os.getpid(), signal.SIGKILL)
    caught(lambda: dist.all_reduce(ones()), within=5)
    with pytest.raises(ValueError, match=r"Next: correct the arguments on this rank and call it again$"):
        dist.group.WORLD._get_backend(CPU).shrink([], 0, None)
    smaller = dist.shrink_group([ODD], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    left = [r for r in range(world) if r != ODD]
    assert (dist.get_rank(), dist.get_world_size()) == (left.index(rank), world - 1)
    assert dist.group.WORLD is smaller and dist.get_backend() == "nvx"
    tensor = torch.full((100_000,), float(rank))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100_000,), float(sum(left))))
    seen = [None] * (world - 1)
    dist.all_gather_object(seen, rank)
    assert seen == left
    part = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        tensor = ones()
        dist.all_reduce(tensor, group=part)
        assert tensor[0] == 2


@on_ranks(4, dies={1, 3})
def test_a_dead_rank_that_a_shrink_keeps_is_named_at_once(rank, world):
    dist.all_reduce(ones())
    if rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    caught(lambda: dist.all_reduce(ones()), within=5)
    keep_one = {"ranks_to_exclude": [3], "shrink_flags": dist.distributed_c10d.SHRINK_ABORT}
    printed = caught(lambda: dist.shrink_group(**keep_one), within=2)
    assert re.search(r"global rank 1 \(pid \d+, host .*\) (is lost|has ended \(signal 9\))", printed), printed


@on_ranks(3)
def test_a_group_shrinks_though_nothing_has_failed(rank, world):
    pair = dist.new_group([0, 1, 2])
    backend = pair._get_backend(CPU)
    assert backend.supports_shrinking
    if rank == 2:
        with pytest.raises(ValueError, match="must not call shrink_group"):
            backend.shrink([2], 0, None)
    else:
        smaller = dist.shrink_group([2], group=pair)
        tensor = ones()
        dist.all_reduce(tensor, group=smaller)
        assert tensor[0] == 2
    dist.barrier()
    for wrong in ([], [3], [-1], [1, 1]):
        with pytest.raises(ValueError, match=r"distinct ranks of 0..2; got.*; the group can still be used$"):
            dist.group.WORLD._get_backend(CPU).shrink(wrong, 0, None)
