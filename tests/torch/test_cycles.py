"""Ranks that wait for each other: the text of the timeout has the cycle of their waits."""

import os
import re
import time
from datetime import timedelta

import nvx
import pytest
import torch
import torch.distributed as dist
from nvx.commands import status
from ranks import SEVERAL_HOSTS, on_ranks, only_nvx, sync

pytestmark = only_nvx
on_one_host = pytest.mark.skipif(SEVERAL_HOSTS, reason="ranks read the status pages of their own host alone")
on_several_hosts = pytest.mark.skipif(not SEVERAL_HOSTS, reason="ranks of one host read each other's status pages")


def pids_of_all(world):
    pids = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]))
    return pids.tolist()


def sleeps(pid):
    """Whether a call of this rank waits for another rank."""
    return any(group["waits_for"] is not None or group["messages"] for group in status.process(pid)["groups"])


def close_cycle(rank, world, waits):
    """Rank 0 begins its wait when all others are in theirs, and times out; then it leaves, which ends their waits.
    Returns the text of its error."""
    pids = pids_of_all(world)
    if rank != 0:
        with pytest.raises(dist.DistBackendError):
            waits[rank]()
        return
    end = time.monotonic() + 20
    while not all(sleeps(pid) for pid in pids[1:]):
        assert time.monotonic() < end
        time.sleep(0.01)
    with pytest.raises(dist.DistBackendError) as raised:
        waits[0]()
    dist.distributed_c10d._abort_process_group()
    return str(raised.value)


def all_reduce(group):
    return lambda: dist.all_reduce(torch.ones(4), group=group)


def groups_of(*members, rank):
    """Groups with these members. Operations of rank 0 in them time out after half a second."""
    groups = [dist.new_group(each) for each in members]
    for group, each in zip(groups, members, strict=True):
        if rank == 0 and 0 in each:
            nvx.set_timeout(timedelta(seconds=0.5), group)
    return groups


@on_one_host
@on_ranks(2)
def test_two_groups_in_opposite_order(rank, world):
    one, two = groups_of([0, 1], [0, 1], rank=rank)
    text = close_cycle(rank, world, [all_reduce(one), all_reduce(two)])
    if rank == 0:
        assert (
            f"cycle of waits: rank 0 waits in group {one.group_name} (all_reduce) for rank 1, "
            f"rank 1 waits in group {two.group_name} (all_reduce) for rank 0;" in text
        ), text
        assert "Next: make these ranks call the operations of the cycle in the same order" in text


@on_one_host
@on_ranks(4)
def test_three_ranks_in_groups_of_two(rank, world):
    """The names are global ranks: rank 3 has rank 1 in its groups."""
    a, b, c = groups_of([0, 2], [2, 3], [0, 3], rank=rank)
    if rank == 1:
        waits = [None, lambda: dist.recv(torch.ones(1), 0), None, None]
        return close_cycle(rank, world, waits)
    text = close_cycle(rank, world, [all_reduce(a), None, all_reduce(b), all_reduce(c)])
    if rank == 0:
        links = [rf"rank {a} waits in group \w+ \(all_reduce\) for rank {b}" for a, b in [(0, 2), (2, 3), (3, 0)]]
        assert re.search("cycle of waits: " + ", ".join(links) + ";", text), text


@on_one_host
@on_ranks(2)
def test_two_receives(rank, world):
    def first():
        nvx.set_timeout(timedelta(seconds=0.5))
        dist.recv(torch.ones(4), 1)

    text = close_cycle(rank, world, [first, lambda: dist.recv(torch.ones(4), 0)])
    if rank == 0:
        assert "rank 0 waits in group 0 (recv) for rank 1, rank 1 waits in group 0 (recv) for rank 0;" in text, text


@on_one_host
@on_ranks(2)
def test_a_receive_and_a_collective(rank, world):
    (group,) = groups_of([0, 1], rank=rank)
    text = close_cycle(rank, world, [all_reduce(group), lambda: dist.recv(torch.ones(4), 0)])
    if rank == 0:
        name = group.group_name
        assert f"rank 0 waits in group {name} (all_reduce) for rank 1, rank 1 waits in group 0 (recv) for" in text, text


@on_one_host
@on_ranks(2)
def test_waits_one_after_another_are_no_cycle(rank, world):
    one, two = groups_of([0, 1], [0, 1], rank=rank)
    if rank == 1:
        nvx.set_timeout(timedelta(seconds=0.2), two)
        with pytest.raises(dist.DistBackendError, match="timed out"):
            dist.all_reduce(torch.ones(4), group=two)
    sync("rank 1 has given up")
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="timed out") as raised:
            dist.all_reduce(torch.ones(4), group=one)
        assert "cycle" not in str(raised.value)
    sync("rank 0 has given up")


def give_up_in_turn(rank, group, after):
    """Rank 0 gives up its wait before rank 1 does. Returns the text of this rank's error."""
    nvx.set_timeout(timedelta(seconds=after), group)
    with pytest.raises(dist.DistBackendError, match="timed out") as raised:
        dist.all_reduce(torch.ones(4), group=group)
    sync("both have given up")
    return str(raised.value)


@on_several_hosts
@on_ranks(2)
def test_two_hosts_in_opposite_order(rank, world):
    """The rank that gives up last names the cycle."""
    one, two = dist.new_group(), dist.new_group()
    text = give_up_in_turn(rank, two if rank else one, 6.0 if rank else 1.0)
    if rank == 1:
        assert (
            f"cycle of waits: rank 1 waits in group {two.group_name} (all_reduce) for rank 0, "
            f"rank 0 waited in another group for rank 1; before that, group {one.group_name} of rank 0 (pid" in text
        ), text
        assert "Next: make these ranks call the operations of the cycle in the same order" in text
    else:
        assert "cycle" not in text


@on_several_hosts
@on_ranks(2)
def test_waits_one_after_another_on_two_hosts_are_no_cycle(rank, world):
    one, two = dist.new_group(), dist.new_group()
    nvx.set_timeout(timedelta(seconds=1), two if rank else one)
    if rank == 1:
        sync("rank 0 has given up")
    with pytest.raises(dist.DistBackendError, match="timed out") as raised:
        dist.all_reduce(torch.ones(4), group=two if rank else one)
    assert "cycle" not in str(raised.value)
    assert rank == 0 or "before that, group" in str(raised.value)
    if rank == 0:
        sync("rank 0 has given up")
    sync("rank 1 has given up")
