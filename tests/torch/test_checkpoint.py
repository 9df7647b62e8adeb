"""Distributed checkpoints: across world sizes, and from a background thread while DDP trains."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from reference import assert_same
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from training import assert_same_weights, batch, net, train, weights


def sharded(world):
    model = net()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    return model


def full(model):
    return [p.full_tensor().detach() for p in model.parameters()]


def save_fsdp(rank, world, folder):
    model = sharded(world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, rank, optimizer=optimizer)
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)
    return [t.tolist() for t in full(model)]


def load_fsdp(rank, world, folder, want):
    model = sharded(world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state, moments = get_state_dict(model, optimizer)
    loaded = {"model": state, "optimizer": moments}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert_same_weights(full(model), [torch.tensor(t) for t in want], f"loaded by {world}")


@pytest.mark.parametrize("readers", [2, 3])
def test_saved_by_two_and_loaded_by(ranks, tmp_path, readers):
    saved = ranks.run(save_fsdp, world=2, folder=str(tmp_path))
    assert saved[0] == saved[1]
    ranks.run(load_fsdp, world=readers, folder=str(tmp_path), want=saved[0])


def dtensors(rank, world, folder):
    mesh = dist.init_device_mesh("cpu", (world,))
    whole = torch.arange(7 * 5.0).view(7, 5)
    dcp.save({"t": distribute_tensor(whole, mesh, [Shard(0)]), "n": rank * 0 + 5}, checkpoint_id=folder)
    state = {"t": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]), "n": 0}
    dcp.load(state, checkpoint_id=folder)
    assert_same(state["t"].full_tensor(), whole, "saved by rows, loaded by columns")
    assert state["n"] == 5


@pytest.mark.parametrize("world", [2, 4])
def test_resharded(ranks, tmp_path, world):
    ranks.run(dtensors, world=world, folder=str(tmp_path))


def save_while_training(rank, world, folder):
    """The checkpoint's collectives run on a background thread over their own group, those of DDP over another."""
    beside = dist.new_group()
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    snapshots = []
    for turn in range(3):
        state = {"model": get_model_state_dict(model)}
        snapshots.append([t.clone() for t in state["model"].values()])
        pending = dcp.async_save(state, checkpoint_id=os.path.join(folder, str(turn)), process_group=beside)
        steps, saving = 0, torch.tensor([1])
        while steps < 5 or saving.item():
            x, y = batch(rank, steps)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            saving.fill_(0 if pending.done() else 1)
            dist.all_reduce(saving, dist.ReduceOp.MAX)
        pending.result()
    dist.barrier()
    for turn, want in enumerate(snapshots):
        fresh = net(seed=9)
        state = {"model": get_model_state_dict(fresh)}
        dcp.load(state, checkpoint_id=os.path.join(folder, str(turn)))
        set_model_state_dict(fresh, state["model"])
        assert_same_weights(weights(fresh), want, f"checkpoint {turn}")


def test_async_save_while_ddp_trains(ranks, tmp_path):
    ranks.run(save_while_training, world=2, folder=str(tmp_path))


@on_ranks(2)
def test_broadcast_state_dict(rank, world):
    """Only rank 0 has the weights; `set_model_state_dict` broadcasts them."""
    model = sharded(world)
    source = net(seed=4).state_dict() if rank == 0 else {}
    set_model_state_dict(model, source, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same_weights(full(model), weights(net(seed=4)), "broadcast_from_rank0")
