"""Pipeline schedules: the losses and gradients of the same model in one process."""

import os

import pytest
import torch
import torch.distributed as dist
from ranks import TORCH, on_ranks
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

WIDTH, ROWS, CHUNKS = 12, 16, 8


def layers(count, width=WIDTH):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]


def alone(count, x, y):
    """One process runs the micro-batches one by one, like the schedules."""
    model = nn.Sequential(*layers(count, x.shape[-1]))
    losses = []
    for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        loss = nn.functional.mse_loss(model(part), target)
        (loss / CHUNKS).backward()
        losses.append(loss.detach())
    return model, losses


def run_schedule(name, rank, world, per_rank, device="cpu", width=WIDTH):
    count = world * per_rank
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, width, generator=generator) for _ in range(2))
    model, want = alone(count, x, y)
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    mine = [rank, count - 1 - rank] if v_shaped else list(range(rank, count, world))
    parts = [part.to(device) for part in layers(count, width)]
    x, y = x.to(device), y.to(device)
    stages = [PipelineStage(parts[i], i, count, torch.device(device)) for i in mine]
    schedule = getattr(pipelining, f"Schedule{name}")(
        stages[0] if per_rank == 1 else stages, n_microbatches=CHUNKS, loss_fn=nn.functional.mse_loss
    )
    losses = []
    has_last = count - 1 in mine
    arguments = (x,) if 0 in mine else ()
    if has_last:
        schedule.step(*arguments, target=y, losses=losses)
        torch.testing.assert_close(torch.stack(losses).detach().cpu(), torch.stack(want))
    else:
        schedule.step(*arguments)
    for i in mine:
        for got, expected in zip(parts[i].parameters(), model[i].parameters(), strict=True):
            torch.testing.assert_close(got.grad.cpu(), expected.grad)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@on_ranks(2, 3)
def test_one_stage_a_rank(rank, world, name):
    run_schedule(name, rank, world, 1)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
@on_ranks(2)
def test_two_stages_a_rank(rank, world, name):
    run_schedule(name, rank, world, 2)


@on_ranks(4)
def test_interleaved_on_four(rank, world):
    run_schedule("Interleaved1F1B", rank, world, 2)


@on_ranks(4)
def test_pipelines_beside_data_parallel(rank, world):
    """Two pipelines of two stages each, and gradients averaged across them."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group = mesh.get_group("pp")
    parts = layers(2)
    place = mesh.get_local_rank("pp")
    stage = PipelineStage(parts[place], place, 2, torch.device("cpu"), group=group)
    schedule = pipelining.Schedule1F1B(stage, n_microbatches=CHUNKS, loss_fn=nn.functional.mse_loss)
    inputs = [torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    x, y = inputs[mesh.get_local_rank("dp")]
    schedule.step(x) if place == 0 else schedule.step(target=y)
    for parameter in parts[place].parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
    models = [alone(2, *inputs[r])[0] for r in range(2)]
    for number, parameter in enumerate(parts[place].parameters()):
        want = sum(list(m[place].parameters())[number].grad for m in models)
        torch.testing.assert_close(parameter.grad, want)


@pytest.mark.skipif(TORCH < (2, 15), reason="one group an edge came with 2.15")
@on_ranks(2)
def test_one_group_an_edge(rank, world):
    os.environ["TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P"] = "1"
    try:
        run_schedule("1F1B", rank, world, 1)
    finally:
        del os.environ["TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P"]
