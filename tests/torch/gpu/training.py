"""Data parallel training: the weights match those of the same steps in one process, and those of gloo bit for bit where
gloo serves the device."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from .rank import Cases, Rank, close

WIDTH, OUT, STEPS = 24, 5, 4


class Net(nn.Module):
    """Uneven layers, so that shards and buckets have odd sizes."""

    def __init__(self, middle: int = 37) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first = nn.Linear(WIDTH, middle)
        self.second = nn.Linear(middle, 19)
        self.last = nn.Linear(19, OUT, bias=False)
        self.aside = nn.Linear(WIDTH, OUT)

    def forward(self, x: torch.Tensor, aside: bool = True) -> torch.Tensor:
        y = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        return y + self.aside(x) if aside else y


def batch(rank: int, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(6, WIDTH, generator=generator), torch.randn(6, OUT, generator=generator)
    return x.to(device), y.to(device)


def loss_of(model: nn.Module, rank: int, step: int, device: torch.device, **how: Any) -> torch.Tensor:
    x, y = batch(rank, step, device)
    return (model(x, **how).float() - y).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


def alone(rank: Rank, how: Callable[[int, int], dict[str, Any]] = lambda r, step: {}, middle: int = 37, every: int = 1):
    """Trains in one process on all ranks' batches, with an optimizer step every `every` steps."""
    model = Net(middle).to(rank.device)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for r in range(rank.world):
            (loss_of(model, r, step, rank.device, **how(r, step)) / rank.world).backward()
        if (step + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def train(rank: Rank, model: nn.Module, how: Callable[[int, int], dict[str, Any]] = lambda r, step: {}):
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, rank.number, step, rank.device, **how(rank.number, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- DDP


def ddp(rank: Rank, group: Any = None, middle: int = 37, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        Net(middle).to(rank.device), process_group=group or dist.group.WORLD, bucket_cap_mb=options.pop("cap", 0.001),
        **options,
    )  # fmt: skip


def ddp_case(rank: Rank, how: Any = lambda r, step: {}, middle: int = 37, **options: Any) -> None:
    got = weights(train(rank, ddp(rank, middle=middle, **options), how))
    rank.agree(got, "DDP")
    close(got, alone(rank, how, middle), "against one process", near=10 if middle > 100 else 1)
    if rank.serves_gloo and rank.world == 2:  # the sum of two ranks has one order
        over_gloo = weights(train(rank, ddp(rank, dist.new_group(backend="gloo"), middle, **options), how))
        close(got, over_gloo, "against gloo", exact=True)


def ddp_hook(rank: Rank) -> None:
    """Gradients travel as half precision; only their rounding differs."""

    def run(group: Any, hook: Any) -> list[torch.Tensor]:
        model = ddp(rank, group)
        model.register_comm_hook(group, hook)
        return weights(train(rank, model))

    got = run(dist.group.WORLD, default_hooks.fp16_compress_hook)
    rank.agree(got, "fp16_compress_hook")
    close(got, alone(rank), "against one process", near=1000)


def ddp_accumulates(rank: Rank) -> None:
    model = ddp(rank)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        with contextlib.nullcontext() if step % 2 else model.no_sync():
            loss_of(model, rank.number, step, rank.device).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    close(weights(model), alone(rank, every=2), "against one process")


def by_rank(r: int, step: int) -> dict[str, Any]:
    """Uses a layer on some ranks in some steps, and on no rank in the last step."""
    return {"aside": (r + step) % 2 == 0 and step != STEPS - 1}


DDP: Cases = {
    "small buckets": ddp_case,
    "large buckets": functools.partial(ddp_case, middle=16_000, cap=25),
    "unused parameters": functools.partial(ddp_case, how=by_rank, find_unused_parameters=True),
    "static graph": functools.partial(ddp_case, static_graph=True),
    "gradients as views": functools.partial(ddp_case, gradient_as_bucket_view=True),
    "halves on the way": ddp_hook,
    "accumulation": ddp_accumulates,
}


# ---- FSDP


def fsdp1(rank: Rank, strategy: ShardingStrategy) -> None:
    model = FullyShardedDataParallel(
        Net().to(rank.device),
        process_group=dist.group.WORLD,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=rank.device,
        use_orig_params=True,
    )
    train(rank, model)
    with FullyShardedDataParallel.summon_full_params(model):
        got = weights(model)
    rank.agree(got, strategy.name)
    close(got, alone(rank), "against one process")


FSDP1: Cases = {
    strategy.name: functools.partial(fsdp1, strategy=strategy)
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
}


def shard(rank: Rank, model: nn.Module, **options: Any) -> nn.Module:
    options.setdefault("mesh", dist.init_device_mesh(rank.device.type, (rank.world,)))
    for part in (model.first, model.second):
        fully_shard(part, **options)
    return fully_shard(model, **options)


def fsdp2(rank: Rank, **options: Any) -> None:
    got = weights(train(rank, shard(rank, Net().to(rank.device), **options)))
    rank.agree(got, "fully_shard")
    close(got, alone(rank), "against one process")


def fsdp2_mixed(rank: Rank) -> None:
    """Parameters travel as bfloat16; gradients are summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    got = weights(train(rank, shard(rank, Net().to(rank.device), mp_policy=policy)))
    rank.agree(got, "mixed precision")
    model = Net().to(rank.device)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for r in range(rank.world):
            half = copy.deepcopy(model).bfloat16()
            x, y = batch(r, step, rank.device)
            (half(x.bfloat16()).float() - y).square().mean().backward()
            for p, h in zip(model.parameters(), half.parameters(), strict=True):
                p.grad = (0 if p.grad is None else p.grad) + h.grad.float() / rank.world
        optimizer.step()
        optimizer.zero_grad()
    close(got, weights(model), "against one process", near=100)


def fsdp2_hybrid(rank: Rank) -> None:
    if rank.world % 2 or rank.world < 4:
        rank.report(left_out_part="hybrid", why=f"{rank.world} ranks")
        return
    shape = (2, rank.world // 2)
    fsdp2(rank, mesh=dist.init_device_mesh(rank.device.type, shape, mesh_dim_names=("outer", "inner")))


def fsdp2_norm(rank: Rank) -> None:
    model = shard(rank, Net().to(rank.device))
    single = Net().to(rank.device)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss_of(model, rank.number, step, rank.device).backward()
        for r in range(rank.world):
            (loss_of(single, r, step, rank.device) / rank.world).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
    want = nn.utils.clip_grad_norm_(single.parameters(), 0.01)
    close([norm], [want], "the norm of gradients")
    got = [p.grad.full_tensor() for p in model.parameters()]
    close(got, [p.grad for p in single.parameters()], "clipped gradients")


FSDP2: Cases = {
    "resharded": functools.partial(fsdp2, reshard_after_forward=True),
    "kept": functools.partial(fsdp2, reshard_after_forward=False),
    "mixed precision": fsdp2_mixed,
    "hybrid": fsdp2_hybrid,
    "accumulation and norm": fsdp2_norm,
}
