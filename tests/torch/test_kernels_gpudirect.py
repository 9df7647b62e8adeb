"""Collectives of device tensors over two hosts, over a UCX that moves device memory: an all_gather leaves out host
memory. The trial that allows it runs when the first collective of a group opens the device."""

import test_graphs
import torch
import torch.distributed as dist
from fake_device import counts, reset_counts, set_delays
from ranks import on_direct_gpus, only_nvx
from simulated.gpudirect import counted
from test_device_chunks import CHUNK, GPU, MODES, both, values
from test_graphs import open_device
from test_graphs_proxy import captured
from test_kernels_proxy import gather, scatter

pytestmark = only_nvx

test_every_collective = MODES(on_direct_gpus(2, 4)(test_graphs.test_every_collective_as_eager.body))


@MODES
@on_direct_gpus(2, 4)
def test_blocks_go_from_device_to_device(rank, world, asynchronous):
    open_device()
    counted()  # the trial
    set_delays(rank, 300)
    for count in (1, 333, 20_001, 1_333_333):
        both(gather(asynchronous), values(rank, count))
        moved = counted()
        assert moved == [4 * count, 4 * count, 0], f"{moved}, not one block to and one from the other host"


@on_direct_gpus(4)
def test_host_memory_holds_no_data(rank, world):
    mine, whole = torch.full((CHUNK,), rank + 1.0).to(GPU), torch.empty(world * CHUNK, device=GPU)
    dist.all_gather_into_tensor(whole, mine)
    torch.accelerator.synchronize()
    reset_counts()
    dist.all_gather_into_tensor(whole, mine)
    torch.accelerator.synchronize()
    assert counts()["pinned_bytes"] <= 512
    assert torch.equal(whole.cpu(), torch.arange(1.0, 5.0).repeat_interleave(CHUNK))


@on_direct_gpus(2, 4)
def test_sums_go_through_host_memory(rank, world):
    open_device()
    counted()
    both(scatter(dist.ReduceOp.SUM), values(rank, world * 100_001))
    both(lambda tensor: [dist.all_reduce(tensor), tensor][1:], values(rank, 1_333_333))
    assert counted() == [0, 0, 0]


@on_direct_gpus(2, fresh=True)
def test_replays_of_graphs_go_from_device_to_device(rank, world):
    open_device()
    mine, whole = torch.empty(1_333_333).to(GPU), torch.empty(world * 1_333_333, device=GPU)
    with captured() as graph:
        dist.all_gather_into_tensor(whole, mine)
    for turn in range(3):
        mine.fill_(rank + turn)
        torch.accelerator.synchronize()
        counted()
        graph.replay()
        torch.accelerator.synchronize()
        dist.barrier()
        assert counted()[0] == 4 * 1_333_333
        want = torch.tensor([turn, turn + 1.0]).repeat_interleave(1_333_333)
        assert torch.equal(whole.cpu(), want)
