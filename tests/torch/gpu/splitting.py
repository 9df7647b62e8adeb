"""Models split over ranks (DTensor, tensor parallel layers, pipelines) against the whole model in one process."""

from __future__ import annotations

import copy
import functools
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from .rank import Cases, Rank, close

SHAPES = ((8, 6), (7, 5), (2, 9))  # some have fewer rows than ranks
PLACEMENTS = (Shard(0), Shard(1), Replicate())


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, shape, generator=generator).float()


def mesh_of(rank: Rank) -> dist.device_mesh.DeviceMesh:
    return dist.init_device_mesh(rank.device.type, (rank.world,))


def redistribute(rank: Rank) -> None:
    mesh = mesh_of(rank)
    for shape in SHAPES:
        whole = numbers(0, *shape)
        for source, target in itertools.product(PLACEMENTS, repeat=2):
            moved = distribute_tensor(whole.to(rank.device), mesh, [source]).redistribute(mesh, [target])
            close([moved.full_tensor()], [whole], f"{shape} {source} to {target}", exact=True)


def partial_sums(rank: Rank) -> None:
    mesh = mesh_of(rank)
    for shape in SHAPES:
        every = [numbers(r, *shape) for r in range(rank.world)]
        ways = {"sum": sum(every), "max": torch.stack(every).amax(0), "min": torch.stack(every).amin(0)}
        for (op, want), target in itertools.product(ways.items(), PLACEMENTS):
            mine = DTensor.from_local(every[rank.number].to(rank.device), mesh, [Partial(op)])
            got = mine.redistribute(mesh, [target]).full_tensor()
            close([got], [want], f"{shape} {op} to {target}", exact=True)


def products(rank: Rank) -> None:
    mesh = mesh_of(rank)
    a, b = numbers(0, 9, 7), numbers(1, 7, 6)
    for left, right in ((Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0))):
        parts = [distribute_tensor(t.to(rank.device), mesh, [how]) for t, how in ((a, left), (b, right))]
        close([(parts[0] @ parts[1]).full_tensor()], [a @ b], f"{left} @ {right}", exact=True)


def two_dimensions(rank: Rank) -> None:
    if rank.world % 2 or rank.world < 4:
        rank.report(left_out_part="two dimensions", why=f"{rank.world} ranks")
        return
    mesh = dist.init_device_mesh(rank.device.type, (2, rank.world // 2), mesh_dim_names=("outer", "inner"))
    whole = numbers(0, 7, 6)
    for source in itertools.product(PLACEMENTS, repeat=2):
        for target in itertools.product(PLACEMENTS, repeat=2):
            moved = distribute_tensor(whole.to(rank.device), mesh, source).redistribute(mesh, target)
            close([moved.full_tensor()], [whole], f"{source} to {target}", exact=True)


class Block(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def tensor_parallel(rank: Rank, sequence: bool) -> None:
    world = rank.world
    single, split = Block().to(rank.device), Block().to(rank.device)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
        norms = [nn.Sequential(nn.LayerNorm(12).to(rank.device), block) for block in (single, split)]
        single, split = norms
        plan = {"0": SequenceParallel()} | {f"1.{name}": how for name, how in plan.items()}
    parallelize_module(split, mesh_of(rank), plan)
    x = torch.randn(2, 4 * world, 12, generator=torch.Generator().manual_seed(3)).to(rank.device)
    y = split(x.chunk(world, dim=1)[rank.number] if sequence else x)
    want = single(x)
    close([y], [want.chunk(world, dim=1)[rank.number] if sequence else want], "forward", near=10)
    y.sum().backward()
    want.sum().backward()
    block, reference = (split[1], single[1]) if sequence else (split, single)
    close([block.up.weight.grad.full_tensor()], [reference.up.weight.grad], "backward", near=10)


DTENSOR: Cases = {
    "redistribute": redistribute,
    "partial sums": partial_sums,
    "products": products,
    "two dimensions": two_dimensions,
    "tensor parallel": functools.partial(tensor_parallel, sequence=False),
    "sequence parallel": functools.partial(tensor_parallel, sequence=True),
}


# ---- pipelines

WIDTH, ROWS, CHUNKS = 12, 16, 8


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def pipeline(rank: Rank, name: str, per_rank: int) -> None:
    count, device = rank.world * per_rank, rank.device
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in range(2))
    parts = [part.to(device) for part in layers(count)]
    model = nn.Sequential(*copy.deepcopy(parts))
    for some, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        (nn.functional.mse_loss(model(some), target) / CHUNKS).backward()
    mine = list(range(rank.number, count, rank.world))
    stages = [pipelining.PipelineStage(parts[i], i, count, device) for i in mine]
    schedule = getattr(pipelining, f"Schedule{name}")(
        stages[0] if per_rank == 1 else stages, n_microbatches=CHUNKS, loss_fn=nn.functional.mse_loss
    )
    schedule.step(*((x,) if 0 in mine else ()), **({"target": y} if count - 1 in mine else {}))
    for i in mine:
        got = [p.grad for p in parts[i].parameters()]
        close(got, [p.grad for p in model[i].parameters()], f"stage {i}", near=10)


PIPELINE: Cases = {
    "GPipe": functools.partial(pipeline, name="GPipe", per_rank=1),
    "1F1B": functools.partial(pipeline, name="1F1B", per_rank=1),
    "interleaved 1F1B": functools.partial(pipeline, name="Interleaved1F1B", per_rank=2),
}
