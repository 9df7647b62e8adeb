"""CPU tensors of `allocate_tensor`: the ranks of a host read them in place. Other tensors give the same bits."""

import gc
import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from ranks import SEVERAL_HOSTS, Ranks, eventually, on_ranks, only_nvx
from reference import assert_same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import assert_same_weights

pytestmark = [only_nvx, pytest.mark.skipif(SEVERAL_HOSTS, reason="every rank would be alone on its host")]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lenders():
    """Processes of their own: caches of torch keep the mesh of an earlier test, by the specs of its DTensors."""
    pool = Ranks()
    yield pool
    pool.close()


def lent(count, dtype=torch.float32, group=None):
    backend = (group or dist.group.WORLD)._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    return backend.allocate_tensor(count, dtype=dtype, device=CPU)


def mapped():
    """How many processes' tensors this process has mapped, its own included."""
    gc.collect()  # a caught exception keeps the frames below it, and so their groups
    with open("/proc/self/maps") as maps:
        ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .* /memfd:nvx", maps.read(), re.MULTILINE)
    return sum(int(end, 16) - int(start, 16) > 1 << 30 for start, end in ranges)


def results(make, own, rank, world):
    """The results of all collectives that lend, out of place, in place, and of views."""
    each = own.numel() // world
    whole, room, part = make(own.numel()), make(own.numel()), make(each)
    whole.copy_(own)
    got = []

    def done(tensor):
        got.append(tensor.clone())

    dist.all_gather_into_tensor(room, whole[:each])
    done(room)
    mine = room[rank * each : (rank + 1) * each]
    mine.copy_(own[each:][:each])
    dist.all_gather_into_tensor(room, mine)
    done(room)
    dist.reduce_scatter_tensor(part, whole)
    done(part)
    dist.reduce_scatter_tensor(part, room, op=dist.ReduceOp.MAX)
    done(part)
    dist.all_to_all_single(room, whole)
    done(room)
    part.copy_(own[:each])
    dist.broadcast(part, world - 1)
    done(part)
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    done(whole)
    whole.copy_(own)
    dist.all_reduce(whole[3:-5])  # a view
    done(whole)
    strided = whole.view(-1, 2)[:, 0]
    dist.all_reduce(strided)
    done(whole)
    dist.all_gather_into_tensor(whole, whole[:each])  # the output overlaps the input of another rank
    done(whole)
    work = dist.all_reduce(room, async_op=True)
    del room, mine  # the work holds its tensors
    work.wait()
    done(work.result()[0])
    return got


@on_ranks(2, 3, pool="lenders")
def test_the_bits_of_staged_tensors(rank, world):
    for dtype, each in ((torch.float32, 40_000), (torch.bfloat16, 150_002)):
        own = (torch.rand(each * world, generator=torch.Generator().manual_seed(rank)) - 0.5).to(dtype)
        want = results(lambda n, t=dtype: torch.empty(n, dtype=t), own, rank, world)
        for who, lends in (("all", True), ("some", rank % 2 == 0)):
            make = (lambda n, t=dtype: lent(n, t)) if lends else (lambda n, t=dtype: torch.empty(n, dtype=t))
            for number, (a, b) in enumerate(zip(results(make, own, rank, world), want, strict=True)):
                assert_same(a, b, f"{dtype}, {who} lend, result {number}")
    eventually(lambda: mapped() == world)  # not staged; an earlier group may go a moment late


@on_ranks(3, pool="lenders")
def test_several_groups_lend(rank, world):
    pair = dist.new_group([0, 2])
    tensor = lent(100_000)
    for _ in range(3):
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [6.0]
        if rank != 1:
            dist.all_reduce(tensor, group=pair)
            assert tensor.unique().tolist() == [12.0]


@on_ranks(2, pool="lenders")
def test_freed_memory_serves_again_and_goes_with_the_last_tensor(rank, world):
    first = lent(1 << 20)
    place = first.data_ptr()
    del first
    kept = lent(1 << 20)
    assert kept.data_ptr() == place
    dist.all_reduce(kept.fill_(1.0))
    dist.destroy_process_group()
    eventually(lambda: mapped() == 1)
    assert kept.mul_(2).unique().tolist() == [2.0 * world], "a tensor outlives its group"
    del kept
    eventually(lambda: mapped() == 0)


@on_ranks(2, pool="lenders")
def test_a_forked_child_reads_and_frees_nothing(rank, world):
    tensor = lent(100_000).fill_(rank)
    child = os.fork()
    if child == 0:
        good = tensor[-1].item() == rank
        del tensor
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lent(100_000).data_ptr() != tensor.data_ptr()
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [1.0]


def death_of_a_lender(rank, world):
    tensor = lent(1 << 20).fill_(rank)
    dist.all_reduce(tensor)
    if rank == 1:
        dist.all_reduce(tensor[:1], async_op=True)  # arrives, and lends nothing
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(tensor[:1])
        dist.all_gather_into_tensor(lent(world << 20), tensor)
    assert time.monotonic() - began < 20
    dist.destroy_process_group()
    assert tensor.add_(1).numel() == 1 << 20


def test_death_of_a_lender(lenders):
    lenders.run(death_of_a_lender, world=3, dies={1}, limit=40)


def trained(rank, pool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 300), nn.ReLU(), nn.Linear(300, 10))
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh).set_allocate_memory_from_process_group_for_comm(pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach() for p in model.parameters()]


@on_ranks(2, pool="lenders")
def test_fsdp2_from_lent_memory(rank, world):
    """The last of this file: the caches keep its group."""
    want = trained(rank, pool=False)
    assert_same_weights(trained(rank, pool=True), want, "with the memory of the group")
    eventually(lambda: mapped() == world)
