"""Tensors in memory that nvx allocates and other ranks map: nvx's kernels need no staging for them and compute the
same bits. Threads simulate the kernels on the streams and in the memory of `fake_device`.
"""

import concurrent.futures
import contextlib
import ctypes
import gc
import os
import signal
import sys
import time

import fake_device
import nvx
import pytest
import simulated
import torch
import torch.distributed as dist
import warm
from fake_device import held, set_delays, slow_fill
from ranks import on_simulated_gpus, sync, until_it_fails
from test_device import GPU, assert_all, on_gpu
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

M = 1 << 20
LARGE = M  # elements: more than packets hold


def backend(group=None):
    return (group or dist.group.WORLD)._get_backend(torch.device(GPU))


def empty(count, dtype=torch.float32, group=None, device=0):
    return backend(group).allocate_tensor(count, dtype=dtype, device=torch.device(GPU, device))


def pooled(host, group=None):
    """A copy of the tensor in the pool."""
    tensor = empty(host.numel(), host.dtype, group)
    tensor.copy_(host)
    return tensor


def grown(group=None):
    if nvx.pool_stats(group) is None:
        dist.all_reduce(on_gpu(1), group=group)  # opens the device on all ranks
    return nvx.pool_stats(group)["grown"]


def grow():
    """Tensors of the pool; the last one makes the pool grow."""
    before, made = grown(), []
    while grown() == before:
        made.append(pooled(torch.zeros(LARGE)))
    return made


def call_until(holds, group=None, seconds=40):
    """Calls until `holds()` is true on all ranks: launches announce new memory, and mapping runs beside them."""
    end = time.monotonic() + seconds
    while True:
        all_of_them = on_gpu(float(holds()), 4)
        dist.all_reduce(all_of_them, op=dist.ReduceOp.MIN, group=group)
        if all_of_them[0].item() == 1:
            return
        assert time.monotonic() < end, nvx.pool_stats(group)
        time.sleep(0.002)


def call_until_mapped(group=None):
    """Calls until every rank has mapped the new memory of all others."""
    world = dist.get_world_size(group)
    of_all = torch.zeros(world, dtype=torch.int64)
    of_all[dist.get_rank(group)] = grown(group)
    of_all = of_all.to(GPU)
    dist.all_reduce(of_all, group=group)
    wanted = of_all.tolist()

    def reached():
        mapped = nvx.pool_stats(group)["mapped"]
        return all(mapped[r] >= wanted[r] for r in range(world) if r != dist.get_rank(group))

    call_until(reached, group)


def fake_cuda():
    return ctypes.CDLL(str(simulated.BUILT / "libnvx_fake_cuda.so"))


@contextlib.contextmanager
def refusing(call):
    """Makes the driver refuse this call inside the block."""
    library = fake_cuda()
    library.fake_refuse(call.encode())
    try:
        yield
    finally:
        library.fake_refuse(b"")


def numbers(count, seed, dtype=torch.float32):
    made = torch.rand(count, generator=torch.Generator().manual_seed(seed)) * 8 - 4
    return made.to(dtype)


def bits_of_collectives(make, rank, world, dtype=torch.float32, group=None, count=LARGE + 24):
    """The results of all collectives on tensors that `make()` makes."""
    mine = numbers(count * world, 7 + rank, dtype)
    results = []

    def done(tensor):
        results.append(tensor.cpu().clone())

    def room(elements):
        return make(torch.zeros(elements, dtype=dtype))

    whole = room(count * world)
    dist.all_gather_into_tensor(whole, make(mine[:count]), group=group)
    done(whole)
    part = room(count)
    dist.reduce_scatter_tensor(part, make(mine), group=group)
    done(part)
    summed = make(mine)
    dist.all_reduce(summed, group=group)
    done(summed)
    swapped = room(count * world)
    dist.all_to_all_single(swapped, make(mine), group=group)
    done(swapped)
    swapped = make(mine)
    dist.all_to_all_single(swapped, swapped, group=group)
    done(swapped)
    sent = make(mine)
    dist.broadcast(sent, dist.get_global_rank(group or dist.group.WORLD, world - 1), group=group)
    done(sent)
    scattered, parts = room(count), [make(piece) for piece in mine.chunk(world)]
    dist.scatter(scattered, parts if rank == 0 else None, src=0, group=group)
    done(scattered)
    gathered = [room(count) for _ in range(world)]
    dist.gather(make(mine[:count]), gathered if rank == 0 else None, dst=0, group=group)
    for tensor in gathered if rank == 0 else ():
        done(tensor)
    return results


def assert_same_bits(some, others):
    assert len(some) == len(others)
    for i, (one, other) in enumerate(zip(some, others, strict=True)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), i


# --- results ---------------------------------------------------------------------------------------------------------


@on_simulated_gpus(2, 3)
def test_the_bits_of_ordinary_tensors(rank, world):
    ordinary = bits_of_collectives(lambda host: host.to(GPU), rank, world)
    assert nvx.pool_stats()["direct"] == 0
    while_it_is_mapped = bits_of_collectives(pooled, rank, world)
    call_until_mapped()
    in_place = bits_of_collectives(pooled, rank, world)
    assert_same_bits(ordinary, while_it_is_mapped)
    assert_same_bits(ordinary, in_place)
    assert nvx.pool_stats()["direct"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
@on_simulated_gpus(2)
def test_types(rank, world, dtype):
    ordinary = bits_of_collectives(lambda host: host.to(GPU), rank, world, dtype, count=LARGE // 4 + 3)
    _ = pooled(torch.zeros(16 * M))
    call_until_mapped()
    assert_same_bits(ordinary, bits_of_collectives(pooled, rank, world, dtype, count=LARGE // 4 + 3))
    call_until(lambda: nvx.pool_stats()["direct"] > 0)


@on_simulated_gpus(2)
def test_one_rank_has_a_tensor_of_the_pool_and_the_other_not(rank, world):
    ordinary = bits_of_collectives(lambda host: host.to(GPU), rank, world)
    _ = pooled(torch.zeros(32 * M))
    call_until_mapped()
    make = pooled if rank == 1 else lambda host: host.to(GPU)
    assert_same_bits(ordinary, bits_of_collectives(make, rank, world))
    call_until(lambda: nvx.pool_stats()["direct"] > 0)
    by_turns = iter(range(1000))

    def mixed(host):
        return pooled(host) if (next(by_turns) + rank) % 2 else host.to(GPU)

    assert_same_bits(ordinary, bits_of_collectives(mixed, rank, world))


@on_simulated_gpus(2)
def test_offsets_and_odd_lengths(rank, world):
    space = pooled(torch.zeros(4 * LARGE))
    call_until_mapped()
    for shift, count in ((1, LARGE), (3, LARGE + 5), (1000, 2 * LARGE + 1)):
        part = space[shift : shift + count]
        part.fill_(rank + 1.0)
        space[shift + count].fill_(77)
        space[shift - 1].fill_(78)
        dist.all_reduce(part)
        assert_all(part, 3)
        assert space[shift + count].item() == 77 and space[shift - 1].item() == 78
    call_until(lambda: nvx.pool_stats()["direct"] > 0)


@on_simulated_gpus(2)
def test_a_pool_that_grows_while_groups_run(rank, world):
    group = dist.new_group([0, 1])
    kept = []
    for i in range(6):
        kept.append(pooled(torch.full((LARGE * (1 + i % 3),), float(rank + i))))
        works = [dist.all_reduce(t, async_op=True) for t in kept[-2:]]
        dist.all_reduce(on_gpu(rank, LARGE), group=group)
        for work in works:
            work.wait()
    assert grown() > 6 * 4 * LARGE
    for g in (None, group):
        call_until_mapped(g)
        before = nvx.pool_stats(g)["direct"]
        kept[-1].fill_(rank + 1)
        dist.all_reduce(kept[-1], group=g)
        assert_all(kept[-1], 3)
        call_until(lambda g=g, before=before: nvx.pool_stats(g)["direct"] > before, g)


@on_simulated_gpus(2)
def test_memory_is_used_again_in_the_order_of_the_stream(rank, world):
    """Late readers and writers would see another tensor's data, or the poison of `fake_device`."""
    dist.all_reduce(on_gpu(1))
    set_delays(5, 500)
    stream, other = torch.accelerator.current_stream(), torch.Stream(GPU)
    sums, before = [], None
    for i in range(12):
        asynchronous = i % 2 == 0
        tensor = pooled(torch.full((LARGE,), float(rank + i)))
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            work.wait()
        if i % 3 == 0:
            ready = stream.record_event()
            with other:
                other.wait_event(ready)
                sums.append((i, tensor.amax()))
                tensor.record_stream(other)
        else:
            sums.append((i, tensor.amax()))
        del tensor, work
        if i == 3:
            torch.accelerator.synchronize()
            before = grown()
    torch.accelerator.synchronize()
    for i, largest in sums:
        assert largest.item() == 2 * i + 1, i
    assert grown() <= before + 8 * 4 * LARGE
    set_delays(5, 50)


# --- no memory, or no more memory -----------------------------------------------------------------------------------


@on_simulated_gpus(2)
def test_backends_that_allocate_tensors(rank, world):
    assert backend().supports_tensor_alloc(torch.device(GPU, 0)), "before the device is opened, without the other ranks"
    assert backend().supports_tensor_alloc(torch.device("cpu"))
    assert nvx.pool_stats() is None
    tensor = empty(10, torch.int64)
    assert tensor.shape == (10,) and tensor.dtype == torch.int64 and tensor.device == torch.device(GPU, 0)
    assert backend().allocate_tensor(10, dtype=torch.float32, device=torch.device(GPU)).device == torch.device(GPU, 0)
    assert backend().allocate_tensor(10, dtype=torch.float32, device=torch.device("cpu")).is_cpu
    with pytest.raises(nvx.ArgumentError, match="cannot allocate tensors on meta.*use torch.empty"):
        backend().allocate_tensor(10, dtype=torch.float32, device=torch.device("meta"))
    dist.all_reduce(on_gpu(1))
    assert not backend().supports_tensor_alloc(torch.device(GPU, 1)), "the group's is another one"
    with pytest.raises(nvx.ArgumentError, match=f"cannot allocate tensors on {GPU}:1"):
        empty(10, device=1)
    stats = nvx.pool_stats()
    assert stats["grown"] >= stats["used"] > 0 and stats["direct"] == 0
    assert stats["mapped"][rank] == 0


@on_simulated_gpus(2)
def test_threads_allocate_memory_beside_each_other(rank, world):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        tensors = list(threads.map(lambda i: pooled(torch.full((1000,), float(i))), range(40)))
    for i, tensor in enumerate(tensors):
        assert_all(tensor, i)


@on_simulated_gpus(2)
def test_a_pool_of_the_users_own(rank, world):
    mine = torch.get_device_module(GPU).MemPool(backend().mem_allocator)
    with torch.get_device_module(GPU).use_mem_pool(mine):
        tensor = torch.full((2 * LARGE,), 0.0).to(GPU)
    assert grown() >= 8 * LARGE
    call_until_mapped()
    tensor.fill_(rank + 1)
    dist.all_reduce(tensor)
    assert_all(tensor, 3)
    call_until(lambda: nvx.pool_stats()["direct"] > 0)


@on_simulated_gpus(2)
def test_a_peer_that_cannot_map_stages(rank, world):
    dist.all_reduce(on_gpu(1))
    before = nvx.pool_stats()["mapped"][1]
    with refusing("cuMemImportFromShareableHandle") if rank == 0 else contextlib.nullcontext():
        kept = grow()
        tensor = kept[-1]
        call_until(lambda: rank == 0 or nvx.pool_stats()["mapped"][0] >= 4 * LARGE)
        for _ in range(3):
            tensor.fill_(rank + 1)
            dist.all_reduce(tensor)
            assert_all(tensor, 3)
        sync("both are done with that")
        if rank == 0:
            assert nvx.pool_stats()["mapped"][1] == before
    kept += grow()
    call_until_mapped()  # retries to map the new memory
    del kept
    assert_same_bits(
        bits_of_collectives(lambda host: host.to(GPU), rank, world), bits_of_collectives(pooled, rank, world)
    )


@on_simulated_gpus(2)
def test_a_device_that_is_full(rank, world):
    small, large = pooled(torch.ones(LARGE)), pooled(torch.ones(4 * LARGE))
    torch.accelerator.synchronize()
    kept = grown()
    with refusing("cuMemCreate"):
        with pytest.raises(torch.OutOfMemoryError):
            empty(kept // 4 + LARGE)
        del large
        torch.accelerator.synchronize()
        again = empty(4 * LARGE)  # uses torch's cached memory
        assert grown() == kept
    assert_all(small, 1)
    more = grow()[-1].fill_(rank + 1)
    dist.all_reduce(more)
    assert_all(more, 3)
    del again


@on_simulated_gpus(2)
def test_freed_memory_is_ordered_behind_its_stream(rank, world):
    module = torch.get_device_module(GPU)
    mine = module.MemPool(backend().mem_allocator)
    with module.use_mem_pool(mine):
        tensor = torch.empty(LARGE, device=GPU)
    address, before = tensor.data_ptr(), grown()
    seen = torch.empty(LARGE, device=GPU)
    other = torch.Stream(GPU)
    with held():
        slow_fill(tensor, 5, 100)
        seen.copy_(tensor)
        del tensor
        mine.empty()
        with other, module.use_mem_pool(mine):
            tensor = torch.empty(LARGE, device=GPU)
            tensor.fill_(6)
    torch.accelerator.synchronize()
    assert tensor.data_ptr() == address and grown() == before
    assert_all(seen, 5)
    assert_all(tensor, 6)


# --- ends -----------------------------------------------------------------------------------------------------------


@on_simulated_gpus(2)
def test_tensors_outlive_their_group(rank, world):
    tensor = pooled(torch.full((LARGE,), rank + 1.0))
    call_until_mapped()
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    assert_all(tensor, 3)
    tensor.fill_(4)
    assert_all(tensor, 4)
    del tensor
    gc.collect()


@on_simulated_gpus(3, op_timeout=60, dies=[1])
def test_an_owner_that_dies(rank, world):
    """Its memory remains for the ranks that mapped it, and the survivors keep theirs."""
    tensor = pooled(torch.full((LARGE,), rank + 1.0))
    call_until_mapped()
    dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError, match="rank 1 "):
        until_it_fails(dist.all_reduce(tensor, async_op=True).wait, 30)
    torch.accelerator.synchronize()
    tensor.fill_(1)
    assert_all(tensor, 1)


@on_simulated_gpus(2)
def test_a_forked_child_is_refused(rank, world):
    _ = pooled(torch.ones(10))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            backend().allocate_tensor(10, dtype=torch.float32, device=torch.device(GPU, 0))
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


EXITS = """
import os, sys
sys.path[:0] = {paths!r}
import nvx, simulated
simulated.load()
import torch, torch.distributed as dist
dist.init_process_group("cpu:nvx,fakegpu:nvx", store=dist.HashStore(), rank=0, world_size=1)
backend = dist.group.WORLD._get_backend(torch.device("fakegpu"))
kept = [backend.allocate_tensor(1 << 20, dtype=torch.float32, device=torch.device("fakegpu", 0)) for _ in range(3)]
kept[0].fill_(1)
del kept[1]
print("alive")
"""


@pytest.mark.simulated
def test_the_interpreter_may_end_with_tensors_alive():
    if simulated.module() is None:
        pytest.skip("nvx was not built with NVX_SIMULATED")
    fake_device.build()
    script = EXITS.format(paths=[os.path.dirname(os.path.abspath(__file__)), *sys.path])
    done = warm.run(["-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "alive" in done.stdout, done.stdout + done.stderr
    assert "rror" not in done.stderr, done.stderr


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def trained(rank, from_pool):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 300)).to(GPU)
    mesh = DeviceMesh.from_group(dist.group.WORLD, GPU)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if from_pool:
        for module in (model[0], model[2], model):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        given = torch.randn(8, 300, generator=torch.Generator().manual_seed(10 * step + rank)).to(GPU)
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach().cpu() for p in model.parameters()]


@on_simulated_gpus(2)
def test_fsdp2(rank, world):
    ordinary = trained(rank, from_pool=False)
    before = nvx.pool_stats()["direct"]
    first = trained(rank, from_pool=True)
    call_until_mapped()
    second = trained(rank, from_pool=True)
    assert_same_bits(ordinary, first)
    assert_same_bits(ordinary, second)
    assert grown() > 0
    assert nvx.pool_stats()["direct"] > before
