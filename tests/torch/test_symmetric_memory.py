"""`torch.distributed._symmetric_memory` over nvx: CPU tensors whose memory all ranks of the host map."""

import gc
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from ranks import SEVERAL_HOSTS, TORCH, Ranks, argument_error, eventually, on_ranks, on_two_hosts, only_nvx, sync
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

pytestmark = only_nvx
one_host = pytest.mark.skipif(SEVERAL_HOSTS, reason="no rank maps memory of another host")
DIES = 1


def shared(count, dtype=torch.float32, group=None):
    tensor = symm_mem.empty(count, dtype=dtype, device="cpu")
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def buffer(handle, peer, count, dtype=torch.float32):
    return handle.get_buffer(peer, (count,), dtype)


@one_host
@on_ranks(1, 2, 3)
def test_every_rank_reads_and_writes_the_buffers_of_all(rank, world):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for count in (1, 33, 1_000_003):
            tensor, handle = shared(count, dtype)
            assert (handle.rank, handle.world_size, handle.buffer_size) == (rank, world, tensor.nbytes)
            assert handle.buffer_ptrs[rank] == tensor.data_ptr()
            tensor.fill_(rank + 1)
            handle.barrier()
            for peer in range(world):
                assert torch.equal(buffer(handle, peer, count, dtype), torch.full((count,), peer + 1, dtype=dtype))
            handle.barrier(channel=1)
            buffer(handle, (rank + 1) % world, count, dtype)[-1] = 100 + rank
            handle.barrier()
            assert tensor[-1] == 100 + (rank - 1) % world
            handle.barrier()


def names_the_backend_first(rank, world):
    symm_mem.set_backend("NVX")
    shared(4)[1].barrier()


@one_host
def test_a_program_may_name_nvx():
    """In processes of its own: torch takes no backend after the first use."""
    pool = Ranks()
    try:
        pool.run(names_the_backend_first, world=2)
    finally:
        pool.close()


@one_host
@on_ranks(2)
def test_torch_finds_nvx(rank, world):
    assert symm_mem.get_backend("cpu") == "NVX"
    assert not _SymmetricMemory.has_multicast_support(DeviceType.CPU, 0)
    tensor, handle = shared(4)
    assert handle.multicast_ptr == 0
    if TORCH >= (2, 13):
        assert symm_mem.is_symm_mem_tensor(tensor)
        assert not symm_mem.is_symm_mem_tensor(torch.empty(4))
    assert symm_mem.rendezvous(tensor, dist.group.WORLD.group_name).buffer_ptrs == handle.buffer_ptrs
    assert symm_mem.rendezvous(tensor[1:], dist.group.WORLD).buffer_ptrs == handle.buffer_ptrs
    assert symm_mem.rendezvous(torch.empty(4), dist.group.WORLD) is None


@one_host
@on_ranks(2)
def test_a_collective_of_nvx_takes_the_tensor(rank, world):
    tensor, _ = shared(100_000)
    tensor.fill_(rank + 1.0)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((100_000,), 3.0))


@one_host
@on_ranks(2, 3)
def test_signals_order_writes(rank, world):
    """A ring: each rank writes to the next one's buffer, and signals it, many times on two channels."""
    tensor, handle = shared(1000, torch.int64)
    after, before = (rank + 1) % world, (rank - 1) % world
    handle.barrier()
    for turn in range(200):
        buffer(handle, after, 1000, torch.int64).fill_(turn * world + rank)
        handle.put_signal(after, channel=turn % 2)
        handle.wait_signal(before, channel=turn % 2)
        assert torch.equal(tensor, torch.full((1000,), turn * world + before))
        handle.put_signal(before, channel=5)
        handle.wait_signal(after, channel=5)
    pad = handle.get_signal_pad(rank)
    assert pad.numel() * 4 == handle.signal_pad_size and not pad.view(torch.int32).any()


@one_host
@on_ranks(2)
def test_a_put_waits_until_the_last_one_was_taken(rank, world):
    _, handle = shared(1)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        handle.put_signal(1)
        store.set("first", "put")
        handle.put_signal(1)
        assert store.check(["taking"])
    else:
        store.wait(["first"])
        time.sleep(0.3)  # a put that does not wait ends meanwhile
        store.set("taking", "")
        handle.wait_signal(0)
        handle.wait_signal(0)
    handle.barrier()


@one_host
@on_ranks(2)
def test_users_may_signal_by_the_pads_themselves(rank, world):
    _, handle = shared(1)
    word = handle.get_signal_pad(1, (1,), dtype=torch.int32, storage_offset=3 * world + 0)
    if rank == 0:
        word.fill_(1)
    else:
        handle.wait_signal(0, channel=3)
        assert word.item() == 0
    handle.barrier()


@one_host
@on_ranks(2)
def test_pads_have_the_size_that_was_set(rank, world):
    size = symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(2 * size)
    try:
        tensor, handle = shared(64)
        pad = handle.get_signal_pad(rank)
        assert pad.data_ptr() == handle.signal_pad_ptrs[rank] and pad.numel() == 2 * size // 4
        assert handle.get_signal_pad(1 - rank, (8, 8), dtype=torch.uint64).shape == (8, 8)
        handle.barrier(channel=2 * size // 4 // world - 1)
        pad.fill_(42)
        tensor.fill_(0)
        assert pad.view(torch.int32).eq(42).all()
    finally:
        symm_mem.set_signal_pad_size(size)


@one_host
@on_ranks(2)
def test_a_put_that_is_not_taken_ends_at_its_timeout(rank, world):
    _, handle = shared(1)
    if rank == 0:
        handle.put_signal(1)
        with pytest.raises(dist.DistBackendError, match="timed out in symm_mem put_signal.*waiting for rank 1"):
            handle.put_signal(1, timeout_ms=300)
    sync("timed out")


@one_host
@on_ranks(2)
def test_blocks_that_differ_are_refused_on_all_ranks(rank, world):
    tensor = symm_mem.empty(10 + rank, device="cpu")
    with argument_error(r"blocks differ.*rank 0 .* has 40 bytes.*rank 1 .* has 44 bytes.*one size on all ranks"):
        symm_mem.rendezvous(tensor, dist.group.WORLD)
    size = symm_mem.get_signal_pad_size()
    symm_mem.set_signal_pad_size(size * (1 + rank))
    tensor = symm_mem.empty(10, device="cpu")
    symm_mem.set_signal_pad_size(size)
    with argument_error(f"signal pad of {size}, .* signal pad of {2 * size}"):
        symm_mem.rendezvous(tensor, dist.group.WORLD)
    shared(10)[1].barrier()  # the group goes on


def shared_kib():
    with open("/proc/self/status") as status:
        return int(re.search(r"RssShmem:\s+(\d+)", status.read())[1])


@one_host
@on_ranks(2)
def test_a_refused_rendezvous_keeps_no_memory(rank, world):
    tensor = symm_mem.empty(10 + rank, device="cpu")
    before, times = shared_kib(), 500
    for _ in range(times):
        with argument_error("blocks differ in group"):
            symm_mem.rendezvous(tensor, dist.group.WORLD)
    assert shared_kib() - before < times * 4 / 2, "each kept a page"


@one_host
@on_ranks(2)
def test_bad_arguments_raise_and_the_group_goes_on(rank, world):
    _, handle = shared(1)
    channels = symm_mem.get_signal_pad_size() // 4 // world
    for channel in (-1, channels):
        with argument_error(f"maximum supported channel for 2 ranks is {channels - 1}, and this is {channel}"):
            handle.barrier(channel=channel)
    handle.barrier(channel=channels - 1)
    for peer in (-1, 2):
        with argument_error(rf"put_signal: rank must be in \[0, 2\) \(got {peer}\)"):
            handle.put_signal(peer)
        with argument_error(rf"wait_signal: rank must be in \[0, 2\) \(got {peer}\)"):
            handle.wait_signal(peer)
    with argument_error("no group is given"):
        _SymmetricMemory.rendezvous(symm_mem.empty(1, device="cpu"))
    with pytest.raises(RuntimeError, match="exceeds the allocated size"):
        handle.get_buffer(1 - rank, (2,), torch.float32)
    handle.barrier()


@one_host
@on_ranks(4)
def test_groups_map_one_tensor_each_for_itself(rank, world):
    """A tensor that two groups share, one of them of some ranks only. They share its pads: each has its channel."""
    half = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    tensor = symm_mem.empty(8, device="cpu")
    every, some = (symm_mem.rendezvous(tensor, group) for group in (dist.group.WORLD, half))
    assert (every.world_size, some.world_size, some.rank) == (4, 2, rank % 2)
    tensor.fill_(rank)
    every.barrier()
    assert [buffer(every, peer, 1).item() for peer in range(4)] == [0, 1, 2, 3]
    assert [buffer(some, peer, 1).item() for peer in range(2)] == [rank // 2 * 2, rank // 2 * 2 + 1]
    some.barrier(channel=4)
    every.barrier()


@one_host
@on_ranks(3)
def test_groups_that_share_a_rank_have_a_rendezvous_each(rank, world):
    """The rank in both has had two rendezvous when its peer in the second has had one."""
    for ranks in ([0, 1], [1, 2]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        tensor, handle = shared(64, group=group)
        tensor.fill_(rank)
        handle.barrier()
        other = dist.get_global_rank(group, 1 - handle.rank)
        assert torch.equal(buffer(handle, 1 - handle.rank, 64), torch.full((64,), float(other)))
        handle.barrier()
    shared(64)[1].barrier()


@one_host
@on_ranks(2)
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 has no such operators")
def test_the_dispatcher_takes_the_handle(rank, world):
    tensor = symm_mem.empty(64, device="cpu")
    torch.ops.symm_mem._barrier(torch.ops.symm_mem._rendezvous(tensor, dist.group.WORLD.group_name))


@one_host
@on_ranks(2)
def test_a_group_of_another_backend_is_refused(rank, world):
    gloo = dist.new_group(backend="gloo")
    with argument_error("uses gloo for tensors of cpu, and memory of nvx needs nvx"):
        symm_mem.rendezvous(symm_mem.empty(1, device="cpu"), gloo)
    dist.barrier()  # gloo of a rank that leaves would break the other's connections while they are made


@one_host
@on_ranks(2)
def test_a_handle_outlives_its_group(rank, world):
    tensor, handle = shared(1000)
    tensor.fill_(rank)
    handle.barrier()
    store = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD
    dist.destroy_process_group()
    del group
    gc.collect()
    assert torch.equal(buffer(handle, 1 - rank, 1000), torch.full((1000,), 1.0 - rank))
    store.add("has read", 1)  # a rank without groups and tensors of nvx frees its memory
    eventually(lambda: store.add("has read", 0) == world or time.sleep(0.01), 20)
    with argument_error("barrier: the group of this handle has been destroyed"):
        handle.barrier()


@one_host
@on_ranks(2)
def test_memory_returns_when_all_ranks_have_dropped_it(rank, world):
    """To the same rank, at the same address, and not while a peer has a handle."""
    first, handle = shared(5000)
    at = first.data_ptr()
    peers = buffer(handle, 1 - rank, 5000)
    first.fill_(rank + 7)
    handle.barrier()
    if rank == 0:  # drops its own; rank 1 still reads it
        del first, peers, handle
        gc.collect()
        others = [symm_mem.empty(5000, device="cpu").fill_(0) for _ in range(50)]
        assert at not in [tensor.data_ptr() for tensor in others]
        del others
        _, its_handle = shared(5000)
        its_handle.barrier()
    else:
        _, its_handle = shared(5000)
        its_handle.barrier()
        assert torch.equal(peers, torch.full((5000,), 7.0))
        del first, handle
        gc.collect()
    its_handle.barrier()
    last = [symm_mem.empty(5000, device="cpu") for _ in range(50)]
    if rank == 0:
        assert at in [tensor.data_ptr() for tensor in last]


@one_host
@on_ranks(2)
def test_persistent_allocations_keep_their_place(rank, world):
    def persistent():
        group = dist.group.WORLD.group_name
        return _SymmetricMemory.empty_strided_p2p((64,), (1,), torch.float32, torch.device("cpu"), group, alloc_id=42)

    tensor = persistent()
    at = tensor.data_ptr()
    handle = _SymmetricMemory.rendezvous(tensor)  # in the group of the allocation
    with pytest.raises(RuntimeError, match="still active"):
        persistent()
    del tensor
    again = persistent()
    assert again.data_ptr() == at
    handle.barrier()


@one_host
@on_ranks(2)
def test_a_wait_ends_at_its_timeout(rank, world):
    _, handle = shared(1)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"timed out in symm_mem wait_signal.*waiting for rank 1"):
            handle.wait_signal(1, timeout_ms=300)
        assert 0.2 < time.monotonic() - began < 10
        with pytest.raises(dist.DistBackendError, match="timed out"):  # the first failure stays
            handle.barrier()
    else:
        with pytest.raises(dist.DistBackendError, match="timed out|rank 0"):
            handle.barrier(channel=1)


def death_in_a_barrier(rank, world):
    _, handle = shared(1)
    handle.barrier()
    if rank == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=f"rank {DIES}"):
        handle.barrier()
    assert time.monotonic() - began < 10


@one_host
def test_a_rank_that_dies_ends_the_barriers_of_the_others():
    pool = Ranks()
    try:
        pool.run(death_in_a_barrier, world=3, dies={DIES})
    finally:
        pool.close()


@one_host
@on_ranks(2)
def test_a_forked_child_leaves_it_to_its_parent(rank, world):
    tensor, handle = shared(1000)
    tensor.fill_(rank)
    handle.barrier()
    child = os.fork()
    if child == 0:
        try:
            same = torch.equal(tensor, torch.full((1000,), float(rank)))
            del tensor, handle
            gc.collect()
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    handle.barrier()
    assert torch.equal(buffer(handle, 1 - rank, 1000), torch.full((1000,), 1.0 - rank))
    handle.barrier()


@on_two_hosts(2)
def test_several_hosts_are_refused(rank, world):
    with argument_error("needs all ranks of a group on one host.* on 2: rank 0 .* and rank 1 "):
        symm_mem.rendezvous(symm_mem.empty(1, device="cpu"), dist.group.WORLD)
    dist.all_reduce(torch.ones(1))  # the group goes on


@one_host
@on_ranks(2)
def test_another_collective_instead_is_a_mismatch(rank, world):
    """The memory does not return: elsewhere a peer may have mapped it before the group failed."""
    tensor = symm_mem.empty(1, device="cpu")
    with pytest.raises(dist.DistBackendError, match="collective mismatch"):
        if rank == 0:
            symm_mem.rendezvous(tensor, dist.group.WORLD)
        else:
            dist.all_reduce(tensor)
    at = tensor.data_ptr()
    del tensor
    gc.collect()
    later = [symm_mem.empty(1, device="cpu") for _ in range(50)]
    assert (at in [tensor.data_ptr() for tensor in later]) == (rank == 1)
