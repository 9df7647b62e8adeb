"""`TORCH_DISTRIBUTED_DEBUG=DETAIL`: torch wraps every nvx group in its checks and adds a gloo group."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import BACKEND, OVER_NVX, on_ranks, only_nvx
from reference import assert_same, small_numbers, wild_bits
from torch.nn.parallel import DistributedDataParallel as DDP
from training import assert_same_weights, net, train, weights

CPU = torch.device("cpu")


@contextlib.contextmanager
def detail():
    """A wrapped group over all ranks. The default group was made before and is plain."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield dist.new_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def numbers(world, count=1001):
    return [small_numbers(torch.float32, count, r) for r in range(world)]


@on_ranks(2, 3)
def test_reductions(rank, world):
    with detail() as group:
        inputs = numbers(world)
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, sum(inputs), "all_reduce")
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True).wait()
        assert_same(tensor, torch.stack(inputs).amax(0), "all_reduce max, async")
        tensor = inputs[rank].clone()
        dist.reduce(tensor, 1, group=group)
        if rank == 1:
            assert_same(tensor, sum(inputs), "reduce")
        part = torch.zeros(5)
        whole = [t[: 5 * world] for t in inputs]
        dist.reduce_scatter_tensor(part, whole[rank].clone(), group=group)
        assert_same(part, sum(whole).view(world, 5)[rank], "reduce_scatter_tensor")
        dist.reduce_scatter(part, [t.clone() for t in whole[rank].view(world, 5)], group=group)
        assert_same(part, sum(whole).view(world, 5)[rank], "reduce_scatter")


@on_ranks(2, 3)
def test_moves(rank, world):
    with detail() as group:
        inputs = numbers(world)
        outputs = [torch.zeros(1001) for _ in range(world)]
        dist.all_gather(outputs, inputs[rank], group=group)
        assert_same(torch.stack(outputs), torch.stack(inputs), "all_gather")
        whole = torch.zeros(world * 1001)
        dist.all_gather_into_tensor(whole, inputs[rank], group=group)
        assert_same(whole, torch.cat(inputs), "all_gather_into_tensor")
        tensor = inputs[rank].clone()
        dist.broadcast(tensor, 1, group=group)
        assert_same(tensor, inputs[1], "broadcast")
        dist.gather(inputs[rank], outputs if rank == 0 else None, dst=0, group=group)
        dist.scatter(tensor, inputs if rank == 0 else None, src=0, group=group)
        assert_same(tensor, inputs[rank], "scatter")
        given = wild_bits(torch.int64, 4 * world, rank)
        got = torch.zeros_like(given)
        dist.all_to_all_single(got, given, group=group)
        sent = [wild_bits(torch.int64, 4 * world, r).view(world, 4)[rank] for r in range(world)]
        assert_same(got, torch.cat(sent), "all_to_all_single")
        dist.barrier(group)


@on_ranks(2, 3)
def test_messages_and_windows(rank, world):
    after, before = (rank + 1) % world, (rank - 1) % world
    with detail() as group:
        inputs, tensor = numbers(world), torch.zeros(1001)
        works = [dist.isend(inputs[rank], after, group), dist.irecv(tensor, before, group)]
        for work in works:
            work.wait()
        assert_same(tensor, inputs[before], "isend, irecv")
        tensor = torch.zeros(1001)
        ops = [dist.P2POp(dist.irecv, tensor, before, group), dist.P2POp(dist.isend, inputs[rank], after, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_same(tensor, inputs[before], "batch_isend_irecv")
        if OVER_NVX:
            total = torch.ones(3)
            with dist.distributed_c10d._coalescing_manager(group, CPU):
                dist.all_reduce(total, group=group)
            assert total.tolist() == [float(world)] * 3


@on_ranks(2)
def test_differing_calls_are_named(rank, world):
    with detail() as group, pytest.raises(RuntimeError, match="(?i)mismatch|collectives|shape"):
        dist.all_reduce(torch.ones(3 + rank), group=group)


@only_nvx
@on_ranks(2)
def test_training_and_functional_collectives(rank, world):
    plain = weights(train(DDP(net()), rank))
    with detail() as group:
        assert_same_weights(weights(train(DDP(net(), process_group=group), rank)), plain, "DDP under DETAIL")
        total = funcol.wait_tensor(funcol.all_reduce(torch.ones(5), "avg", group))
        assert total.tolist() == [1.0] * 5
        objects = [None] * world
        dist.all_gather_object(objects, rank, group=group)
        assert objects == [0, 1]
        subgroup = dist.new_group([1])
        assert dist.get_backend(subgroup if rank == 1 else group) == BACKEND
    dist.destroy_process_group(group)


@only_nvx
@on_ranks(2)
def test_functions_of_nvx_accept_the_wrapper(rank, world):
    import nvx

    with detail() as group:
        nvx.monitored_barrier(group)
        before = nvx.sequence_number(group)
        dist.all_reduce(torch.ones(3), group=group)
        assert nvx.sequence_number(group) == before + 1
        nvx.set_timeout(timedelta(seconds=0.5), group)
        backend = nvx._backend(group)
        assert backend.options._timeout == timedelta(seconds=0.5)
        if rank == 0:
            started = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="timed out"):
                backend.allreduce([torch.ones(3)]).wait()  # the wrapper itself would first wait for gloo
            assert time.monotonic() - started < 3.0
        else:
            time.sleep(1.0)


@only_nvx
@on_ranks(2)
def test_groups_that_nvx_has_no_facts_of(rank, world):
    import nvx

    with detail():
        over_gloo = dist.new_group(backend="gloo")
        only_one = dist.new_group([1])
    with pytest.raises(ValueError, match="gloo|ProcessGroupWrapper"):
        nvx.set_timeout(timedelta(seconds=1), over_gloo)
    if rank == 0:
        for call in (lambda: nvx.set_timeout(timedelta(seconds=1), only_one), lambda: nvx.sequence_number(only_one)):
            with pytest.raises(ValueError, match="this rank is not in that group"):
                call()
    dist.barrier()
