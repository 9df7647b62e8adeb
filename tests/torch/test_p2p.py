"""send and recv: matching by pair and tag, any source, self messages, batches and coalescing windows."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, on_ranks, on_threads, only_nvx
from reference import DTYPES, assert_guards, assert_same, placed, wild_bits

COUNTS = [0, 1, 7, 1000, 70_001, 2_000_003] if OVER_NVX else [1, 7, 1000, 70_001, 2_000_003]


def message(source, number, count=1000, dtype=torch.int32):
    return wild_bits(dtype, count, source, number)


@on_ranks(2, 3)
def test_send_and_recv_round_the_ring(rank, world):
    after, before = (rank + 1) % world, (rank - 1) % world
    for count in COUNTS:
        for offset in (0, 1):
            mine, theirs = (message(r, count, count, torch.uint8) for r in (rank, before))
            output = placed(torch.zeros_like(theirs), offset)
            if rank % 2 == 0:
                dist.send(placed(mine, offset), after)
            assert dist.recv(output, before) == before
            if rank % 2 == 1:
                dist.send(placed(mine, offset), after)
            assert_same(output, theirs, f"count {count} offset {offset}")
            assert_guards(output)


@only_nvx
@on_ranks(2)
def test_every_dtype(rank, world):
    for number, dtype in enumerate(DTYPES):
        if rank == 0:
            dist.send(message(0, number, 333, dtype), 1)
        else:
            output = torch.zeros(333).to(dtype)
            dist.recv(output, 0)
            assert_same(output, message(0, number, 333, dtype), str(dtype))


@on_ranks(2)
def test_isend_does_not_wait_for_the_receiver(rank, world):
    """Both ranks send first and receive later, also with large messages."""
    other = 1 - rank
    for count in (5, 70_001, 2_000_003):
        send = dist.isend(message(rank, count, count), other)
        output = torch.zeros(count, dtype=torch.int32)
        dist.recv(output, other)
        send.wait()
        assert_same(output, message(other, count, count), f"count {count}")
        assert send.is_completed()


@on_ranks(2)
def test_one_pair_keeps_its_order(rank, world):
    sizes = [1, 70_001, 3, 500_000, 2]
    if rank == 0:
        works = [dist.isend(message(0, i, n), 1) for i, n in enumerate(sizes)]
    else:
        outputs = [torch.zeros(n, dtype=torch.int32) for n in sizes]
        works = [dist.irecv(t, 0) for t in outputs]
    for work in works:
        work.wait()
    for i, n in enumerate(sizes if rank == 1 else ()):
        assert_same(outputs[i], message(0, i, n), f"message {i}")


@on_ranks(2)
def test_tags_are_separate_channels(rank, world):
    """Receives in reverse order of the sends: only the tag matches them."""
    tags = [3, 1, 2, 70_000]
    if rank == 0:
        works = [dist.isend(message(0, tag, 1000 + tag), 1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
        return
    for tag in reversed(tags):
        output = torch.zeros(1000 + tag, dtype=torch.int32)
        dist.recv(output, 0, tag=tag)
        assert_same(output, message(0, tag, 1000 + tag), f"tag {tag}")


@on_ranks(2, 4)
def test_recv_from_any_source_returns_the_source(rank, world):
    if rank != 0:
        dist.send(message(rank, 0), 0)
        dist.send(message(rank, 1), 0, tag=5)
        return
    for tag in (0, 5):
        seen = set()
        for _ in range(world - 1):
            output = torch.zeros(1000, dtype=torch.int32)
            source = dist.recv(output, tag=tag)
            assert_same(output, message(source, tag // 5), f"from {source}")
            seen.add(source)
        assert seen == set(range(1, world))


@on_ranks(3)
def test_irecv_from_any_source(rank, world):
    if rank != 2:
        dist.send(message(rank, 0), 2)
        return
    outputs = [torch.zeros(1000, dtype=torch.int32) for _ in range(2)]
    works = [dist.irecv(t) for t in outputs]
    for work in works:
        work.wait()
    sources = [work._source_rank() for work in works]
    assert sorted(sources) == [0, 1]
    for output, source in zip(outputs, sources, strict=True):
        assert_same(output, message(source, 0), f"from {source}")


@on_ranks(3)
def test_ranks_of_a_subgroup_are_translated(rank, world):
    group = dist.new_group([1, 2])
    if rank == 1:
        dist.send(message(1, 0), 2, group=group)
        dist.send(message(1, 1), group=group, group_dst=1)
    if rank == 2:
        output = torch.zeros(1000, dtype=torch.int32)
        assert dist.recv(output, group=group) == 1
        assert_same(output, message(1, 0), "from any source in the subgroup")
        dist.recv(output, group=group, group_src=0)
        assert_same(output, message(1, 1), "from group rank 0")


@only_nvx
@on_ranks(1, 2)
def test_a_rank_sends_to_itself(rank, world):
    for number, count in enumerate((0, 1, 1000, 2_000_003)):
        send = dist.isend(message(rank, number, count), rank)
        output = torch.zeros(count, dtype=torch.int32)
        receive = dist.irecv(output, rank)
        receive.wait()
        send.wait()
        assert_same(output, message(rank, number, count), f"to itself, count {count}")
    first = torch.zeros(10, dtype=torch.int32)
    receive = dist.irecv(first, rank, tag=9)
    dist.isend(message(rank, 9, 10), rank, tag=9).wait()
    receive.wait()
    assert_same(first, message(rank, 9, 10), "receive posted first")


def exchange(rank, world, order, count=1000, tags=False):
    """Every rank sends to every rank in one batch, with the operations in the given order."""
    peers = [p for p in range(world) if p != rank]
    outputs = {p: torch.zeros(count, dtype=torch.int32) for p in peers}
    ops = [dist.P2POp(dist.isend, message(rank, p, count), p, tag=10 + rank if tags else 0) for p in peers]
    ops += [dist.P2POp(dist.irecv, outputs[p], p, tag=10 + p if tags else 0) for p in peers]
    order(ops)
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for peer in peers:
        assert_same(outputs[peer], message(peer, rank, count), f"from {peer}")


@on_ranks(2, 3, 4)
def test_batches_in_any_order(rank, world):
    """Ranks may list the operations of a batch differently: sends first, receives first, shuffled."""
    exchange(rank, world, lambda ops: None)
    exchange(rank, world, lambda ops: ops.reverse())
    exchange(rank, world, lambda ops: ops.reverse() if rank % 2 else None)
    for seed in range(10):
        exchange(rank, world, random.Random(seed * 10 + rank).shuffle, tags=seed % 2 == 1)
    exchange(rank, world, lambda ops: ops.reverse(), count=500_000)


@only_nvx
@on_ranks(2, 3)
def test_batches_that_only_some_ranks_join(rank, world):
    """A batch involves only the peers that it names; several operations of a pair keep their order."""
    if rank == 0:
        ops = [dist.P2POp(dist.isend, message(0, i), 1) for i in range(5)]
    elif rank == 1:
        outputs = [torch.zeros(1000, dtype=torch.int32) for _ in range(5)]
        ops = [dist.P2POp(dist.irecv, t, 0) for t in outputs]
    else:
        ops = []
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    for i in range(5) if rank == 1 else ():
        assert_same(outputs[i], message(0, i), f"message {i}")
    dist.barrier()


@on_ranks(2)
def test_batched_and_plain_match_each_other(rank, world):
    """Plain receives match batched sends of a pipeline: a pair has one order for all calls."""
    if rank == 0:
        dist.isend(message(0, 0), 1).wait()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, message(0, 1), 1)]):
            work.wait()
        dist.send(message(0, 2), 1)
        return
    outputs = [torch.zeros(1000, dtype=torch.int32) for _ in range(3)]
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, outputs[0], 0)])
    works.append(dist.irecv(outputs[1], 0))
    works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, outputs[2], 0)])
    for work in works:
        work.wait()
    for i in range(3):
        assert_same(outputs[i], message(0, i), f"message {i}")


@only_nvx
@on_ranks(2)
def test_a_batch_to_oneself(rank, world):
    output = torch.zeros(1000, dtype=torch.int32)
    ops = [dist.P2POp(dist.irecv, output, rank), dist.P2POp(dist.isend, message(rank, 0), rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(output, message(rank, 0), "to itself in a batch")


@on_ranks(2, 3)
def test_p2p_beside_collectives(rank, world):
    """Sends and receives neither wait for collectives nor delay them."""
    after, before = (rank + 1) % world, (rank - 1) % world
    output = torch.zeros(70_001, dtype=torch.int32)
    receive = dist.irecv(output, before)
    total = torch.ones(1000)
    reduce = dist.all_reduce(total, async_op=True)
    dist.barrier()
    dist.send(message(rank, 0, 70_001), after) if rank % 2 else dist.isend(message(rank, 0, 70_001), after).wait()
    reduce.wait()
    receive.wait()
    assert_same(output, message(before, 0, 70_001), "received across a barrier")
    assert total.tolist() == [float(world)] * 1000


@only_nvx
@on_ranks(2)
def test_a_strided_message(rank, world):
    """Dense tensors of any stride order are sent; other tensors are refused, never sent wrong."""
    if rank == 0:
        dist.send(message(0, 0, 1200).view(30, 40), 1)
        return
    output = torch.zeros(30, 40, dtype=torch.int32)
    with pytest.raises((ValueError, RuntimeError), match="contiguous|dense"):
        dist.recv(output[:, ::2], 0)
    dist.recv(output, 0)
    assert_same(output, message(0, 0, 1200).view(30, 40), "after the refusal")


# --- coalescing scopes -------------------------------------------------------------------------------------


@only_nvx
@on_ranks(2, 3)
def test_windows_of_the_coalescing_manager(rank, world):
    cpu = torch.device("cpu")
    tensors = [torch.full((n,), rank + 1.0) for n in (1, 1000, 70_001)]
    with dist.distributed_c10d._coalescing_manager(device=cpu):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        assert tensor.unique().tolist() == [world * (world + 1) / 2]
    with dist.distributed_c10d._coalescing_manager(device=cpu, async_ops=True) as window:
        outputs = [torch.zeros(world * n) for n in (2, 300)]
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((output.numel() // world,), float(rank)))
    window.wait()
    for output in outputs:
        assert output.view(world, -1)[:, 0].tolist() == [float(r) for r in range(world)]
    with dist.distributed_c10d._coalescing_manager(device=cpu):
        parts = [torch.zeros(3), torch.zeros(50)]
        for part in parts:
            dist.reduce_scatter_tensor(part, torch.ones(part.numel() * world))
    for part in parts:
        assert part.unique().tolist() == [float(world)]


@only_nvx
@on_ranks(2)
def test_empty_windows(rank, world):
    cpu = torch.device("cpu")
    backend = dist.group.WORLD._get_backend(cpu)
    assert backend.supports_coalescing
    for _ in range(3):
        dist.group.WORLD._start_coalescing(cpu)
        dist.group.WORLD._end_coalescing(cpu)
        with dist.distributed_c10d._coalescing_manager(device=cpu):
            pass
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world


@only_nvx
@on_ranks(2)
def test_a_window_left_open_by_an_exception(rank, world):
    """torch never closes the window; the next window must not include its calls."""
    cpu = torch.device("cpu")
    with pytest.raises(KeyError), dist.distributed_c10d._coalescing_manager(device=cpu):
        raise KeyError
    exchange(rank, world, lambda ops: None)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world


@only_nvx
@on_threads(2, 3)
def test_a_window_of_mixed_operations(pg, rank, world):
    """The backend's guarantee: any operations between start and end give one `Work`."""
    after, before = (rank + 1) % world, (rank - 1) % world
    total, output, shared = (
        torch.ones(500),
        torch.zeros(1000, dtype=torch.int32),
        torch.full((3,), float(rank)),
    )
    pg._start_coalescing()
    pg.allreduce([total])
    pg.recv([output], before, 0)
    pg.broadcast([shared])
    pg.send([message(rank, 0)], after, 0)
    pg._end_coalescing().wait()
    assert total.unique().tolist() == [float(world)]
    assert_same(output, message(before, 0), "received in the window")
    assert shared.tolist() == [0.0] * 3


@on_ranks(2)
def test_object_lists(rank, world):
    objects = [{"rank": 0}, [1, 2, 3], "x" * 10_000]
    if rank == 0:
        dist.send_object_list(objects, dst=1)
    else:
        received = [None] * 3
        dist.recv_object_list(received, src=0)
        assert received == objects


@only_nvx
@on_ranks(2, op_timeout=1.5)
def test_a_recv_that_times_out_names_the_message_that_came_instead(rank, world):
    if rank == 0:
        dist.send(torch.ones(10), 1, tag=2)
        with pytest.raises(dist.DistBackendError):
            dist.recv(torch.ones(1), 1)
        return
    words = r"tag 1\).*rank 0 .*; it has sent 10 elements of f32 with tag 2, for which there is no recv here"
    with pytest.raises(dist.DistBackendError, match=words):
        dist.recv(torch.ones(10), 0, tag=1)


@on_ranks(2, op_timeout=2)
def test_a_message_may_be_posted_long_before_it_is_matched(rank, world):
    """The timeout counts from the wait, as a program may post a receive for an order that comes much later."""
    count, x = 70_001, torch.ones(10)
    received, sent = torch.zeros(count), torch.full((count,), float(rank))
    posted = dist.irecv(received, 1, tag=1) if rank == 0 else dist.isend(sent, 0, tag=2)
    for _ in range(6):
        dist.all_reduce(x)
        time.sleep(0.5)
    if rank == 0:
        other = torch.zeros(count)
        dist.recv(other, 1, tag=2)
        assert other.eq(1).all()
    else:
        dist.send(sent, 0, tag=1)
    posted.wait()
    assert rank == 1 or received.eq(1).all()


@only_nvx
@on_ranks(1, op_timeout=1)
def test_a_recv_from_the_own_rank_is_an_error(rank, world):
    with pytest.raises(dist.DistBackendError, match="which is this rank itself"):
        dist.recv(torch.ones(10), 0)
