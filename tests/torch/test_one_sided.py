"""Windows of torch 2.14 (`dist._new_window`): CPU tensors that other ranks write to."""

import gc
import os
import signal
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, TORCH, argument_error, eventually, on_ranks, on_two_hosts, sync
from reference import assert_same, wild_bits
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.skipif(not OVER_NVX or TORCH < (2, 14), reason="for nvx on torch 2.14 and later")
SECOND = timedelta(seconds=1)


def exchange(rank, world, dtype, count):
    """Each rank's tensor has room for the data of every rank."""
    place = torch.zeros(world, count, dtype=dtype)
    window = dist._new_window(place)
    for turn in range(3):
        mine = wild_bits(dtype, count, rank + 10 * turn)
        for peer in range(world):
            window.put(mine, peer, rank * count, turn == 1)
            window.signal(peer, turn == 1)
        for peer in range(world):
            work = window.wait_signal(peer, turn == 1)
            if turn == 1:
                work.wait()
            assert work.is_completed() and work.is_success()
        want = torch.stack([wild_bits(dtype, count, peer + 10 * turn) for peer in range(world)])
        assert_same(place, want, f"{dtype} {count}, turn {turn}")
        dist.barrier()
    window.tensor_deregister()


@on_ranks(1, 2, 3)
def test_put_data_is_visible_after_the_signal(rank, world):
    assert dist._supports_window()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for count in (0, 1, 33, 70_001):
            exchange(rank, world, dtype, count)


@on_two_hosts(2, 4)
def test_ranks_of_other_hosts_write_too(rank, world):
    assert dist._supports_window()
    for count in (1, 33, 300_001):
        exchange(rank, world, torch.float32, count)


@on_ranks(2)
def test_the_target_need_not_call_anything(rank, world):
    place = torch.zeros(1_000_000)
    window = dist._new_window(place)
    if rank == 0:
        window.put(torch.arange(1_000_000.0), 1, 0, False)
    else:
        eventually(lambda: place[-1] == 999_999 or time.sleep(0.01), 20)
    sync("written")
    window.tensor_deregister()
    assert rank == 0 or torch.equal(place, torch.arange(1_000_000.0))


@on_ranks(2)
def test_sizes_types_and_offsets_are_each_ranks_own(rank, world):
    """Writes into the middle of a view, with another type on each rank, then registers another tensor in the window."""
    window = dist._new_window()
    for turn in range(2):
        whole = torch.zeros(20, dtype=torch.float64 if rank == 0 else torch.int16)
        place = whole[5 : 10 + 3 * rank]
        window.tensor_register(place, turn == 0)
        assert window.map_remote_tensor(rank).data_ptr() == place.data_ptr()
        assert window.get_attr(1 - rank).access_type == torch._C._distributed_c10d.WindowAccessType.UNIFIED
        if rank == 0:
            window.put(torch.tensor([7, 8], dtype=torch.int16), 1, 6, False)
        else:
            window.put(torch.tensor([0.5 + turn], dtype=torch.float64), 0, 4, False)
        window.tensor_deregister()  # all data has arrived
        if rank == 0:
            assert whole.tolist() == [0.0] * 9 + [0.5 + turn] + [0.0] * 10
        else:
            assert whole.tolist() == [0] * 11 + [7, 8] + [0] * 7


@on_ranks(2)
def test_bad_arguments_raise_and_the_group_goes_on(rank, world):
    place = torch.zeros(4 + rank)
    window = dist._new_window(place)
    peer = 1 - rank
    room = 4 + peer
    with argument_error(
        rf"put of 3 elements at offset {room - 2} does not fit into the {room} elements that rank {peer}"
    ):
        window.put(torch.ones(3), peer, room - 2, False)
    with argument_error("dtype torch.float64 does not match rank .'s registered dtype torch.float32"):
        window.put(torch.ones(1, dtype=torch.float64), peer, 0, False)
    with argument_error("contiguous"):
        window.put(torch.ones(4, 4).t()[1:3], peer, 0, False)
    with argument_error("has no storage"):
        window.put(FakeTensorMode().from_tensor(torch.ones(1)), peer, 0, False)
    with argument_error("must not be negative"):
        window.put(torch.ones(1), peer, -1, False)
    with argument_error("invalid rank 2 in a group of 2"):
        window.put(torch.ones(1), 2, 0, False)
    for call in (lambda: window.signal(-1, False), lambda: window.wait_signal(2, False), lambda: window.get_attr(2)):
        with argument_error("invalid rank"):
            call()
    with argument_error("windows do not map the memory of other ranks"):
        window.map_remote_tensor(peer)
    window.put(torch.ones(2), peer, 1, False)
    window.tensor_deregister()
    assert place.tolist() == [0, 1, 1, *[0] * (1 + rank)]
    for call in (
        lambda: window.put(torch.ones(1), peer, 0, False),
        lambda: window.signal(peer, False),
        lambda: window.wait_signal(peer, False),
        lambda: window.map_remote_tensor(rank),
        lambda: window.tensor_deregister(),
    ):
        with argument_error("no tensor is registered"):
            call()
    dist.barrier()


@on_ranks(3)
def test_a_tensor_that_is_refused_is_refused_on_all_ranks(rank, world):
    """One rank's error blocks no other rank, and the others learn which rank it was."""
    window = dist._new_window()
    unfit = {"contiguous": torch.zeros(4, 4).t(), "CPU tensors only": torch.zeros(3, device="meta")}
    freed = torch.zeros(4)
    freed.untyped_storage().resize_(0)
    fake = FakeTensorMode().from_tensor
    unfit |= {"storage of 0 bytes": freed, "has no storage": fake(torch.zeros(3))}
    for text, tensor in unfit.items():
        with argument_error(text if rank == 1 else r"a tensor was refused on rank 1 \(pid"):
            window.tensor_register(tensor if rank == 1 else torch.zeros(3))
    # The memory of an empty fake tensor is never read.
    window.tensor_register(fake(torch.zeros(0)) if rank == 1 else torch.zeros(3))
    window.tensor_deregister()
    place = torch.zeros(3)
    window.tensor_register(place)
    with argument_error("registered with this window already"):
        window.tensor_register(torch.zeros(3))
    window.put(torch.ones(1), (rank + 1) % world, 1, False)
    window.tensor_deregister()
    assert place.tolist() == [0, 1, 0]


@on_ranks(2)
def test_a_tensor_is_kept_as_long_as_it_is_registered(rank, world):
    """The registration keeps the tensor, whether or not the window owns it, even after the window is dropped."""
    group = dist.new_group()
    for owning in (True, False):
        window = dist._new_window(group=group)
        window.tensor_register(torch.zeros(100_000), owning)
        window.put(torch.full((100_000,), 3.0), 1 - rank, 0, False)
        window.signal(1 - rank, False)
        window.wait_signal(1 - rank, False)
        assert window.map_remote_tensor(rank).unique().tolist() == [3.0]
        window.tensor_deregister()
    memory = np.zeros(1000, dtype=np.float32)
    watched = weakref.ref(memory)
    window = dist._new_window(torch.from_numpy(memory), group)
    other = dist._new_window(torch.zeros(1), group)
    sync("made")
    del memory, window
    gc.collect()
    assert watched() is not None
    other.signal(1 - rank, False)
    other.wait_signal(1 - rank, False)
    dist.destroy_process_group(group)
    eventually(lambda: watched() is None, 20)


@on_ranks(2)
def test_a_window_of_a_group_that_is_gone_raises(rank, world):
    group = dist.new_group()
    window = dist._new_window(torch.zeros(3), group)
    sync("made")
    started = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - started < 5.0
    for call in (lambda: window.put(torch.ones(1), 0, 0, False), lambda: window.signal(0, False)):
        with pytest.raises(RuntimeError, match="destroyed"):
            call()
    with pytest.raises(RuntimeError, match="destroyed"):
        window.tensor_deregister()
    del group
    dist.barrier()


# --- failed waits
# ------------------------------------------------------------------------------------------------------


def wait_options(timeout):
    options = torch._C._distributed_c10d.WaitSignalOptions()
    options.timeout = timeout
    return options


@on_ranks(2)
def test_a_wait_has_a_timeout_of_its_own(rank, world):
    window = dist._new_window(torch.zeros(3), dist.new_group())
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"timed out in wait_signal\(from rank 1\).*rank 1"):
            window.wait_signal(1, False, wait_options(0.3 * SECOND))
        assert time.monotonic() - started < 5.0
    sync("late")
    dist.barrier()


@on_ranks(2)
def test_an_async_wait_ends_when_the_signal_comes(rank, world):
    window = dist._new_window(torch.zeros(3))
    if rank == 0:
        work = window.wait_signal(1, True)
        assert not work.is_completed()
        sync("waits")
        eventually(work.is_completed, 20)
        work.wait()
    else:
        sync("waits")
        window.signal(0, False)
    window.tensor_deregister()


def dies_while_awaited(rank, world):
    window = dist._new_window(torch.zeros(3))
    sync("made")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"rank 1 \(pid"):
        window.wait_signal(1, False)
    assert time.monotonic() - started < 5.0


def test_a_peer_that_dies_is_named(ranks):
    ranks.run(dies_while_awaited, world=2, dies=(1,))


@on_ranks(2)
def test_a_peer_that_leaves_is_named_and_its_last_signal_counts(rank, world):
    group = dist.new_group()
    place = torch.zeros(3)
    window = dist._new_window(place, group)
    sync("made")
    if rank == 1:
        window.put(torch.ones(3), 0, 0, False)
        window.signal(0, False)
        dist.destroy_process_group(group)
    else:
        window.wait_signal(1, False)
        assert place.tolist() == [1, 1, 1]
        with pytest.raises(dist.DistBackendError, match=r"rank 1 \(pid.*destroyed|rank 1.*left"):
            window.wait_signal(1, False)
    sync("left")


# --- groups whose ranks change ----------------------------------------------------------------------------------------


def in_a_reconfigured_group(rank, world, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("nvx", store=store, rank=rank, world_size=world, enable_reconfigure=True)
    windows = []
    for uuid in (1, 2):
        store.set(f"{uuid}/{rank}", dist._get_reconfigure_handle())
        dist._reconfigure(uuid=uuid, handles=[store.get(f"{uuid}/{r}").decode() for r in range(world)]).wait()
        place = torch.zeros(2)
        windows.append(dist._new_window(place))
        windows[-1].put(torch.full((2,), float(uuid)), 1 - rank, 0, False)
        windows[-1].signal(1 - rank, False)
        windows[-1].wait_signal(1 - rank, False)
        assert place.tolist() == [uuid, uuid]
        dist.barrier()
    with pytest.raises(RuntimeError):
        windows[0].signal(0, False)
    dist.destroy_process_group()


def test_windows_in_a_group_whose_ranks_change(ranks):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(in_a_reconfigured_group, world=2, kind="bare", port=server.port)
