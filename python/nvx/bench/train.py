"""`nvx bench train`: whole training steps of a model whose time is communication, over each contender in turn.

18 million parameters in six layers and a batch of four: the gradients of a step are 72 MB, its arithmetic is little.
`alone` is the same step without communication, the lower bound of all contenders."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import machine, report
from .contenders import enlist
from .peers import TorchContender
from .probe import flag_round
from .runner import Effort, Timing, measure
from .sizes import above, argument
from .world import World

WIDTHS = (512, 2048, 2048, 2048, 2048, 2048, 10)
BATCH = 4
KINDS = ("ddp", "fsdp2")
LENT = "fsdp2-lent"  # FSDP2 with buffers from the group's memory, where the backend has some
ALONE = "alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", type=argument(_kinds), default=KINDS, help=f"any of {', '.join((*KINDS, LENT))}")
    parser.add_argument("--iters", type=above(1), default=20, help="steps of each contender (default 20)")
    parser.add_argument("--blocks", type=above(1), default=5, help="blocks of each contender, taking turns (default 5)")


def _kinds(text: str) -> list[str]:
    if strange := set(text.split(",")) - {*KINDS, LENT}:
        raise ValueError(f"no kind {' or '.join(sorted(strange))}: there are {', '.join((*KINDS, LENT))}")
    return text.split(",")


def model() -> nn.Sequential:
    """Makes the same weights on every rank."""
    torch.manual_seed(20)
    layers: list[nn.Module] = []
    for narrow, wide in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def wrapped(kind: str, group: dist.ProcessGroup, device: torch.device) -> nn.Module:
    """The model as DDP or FSDP2 runs it over this group."""
    plain = model().to(device)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(plain, process_group=group)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    for layer in (*plain, plain):
        if isinstance(layer, nn.Linear) or layer is plain:
            fully_shard(layer, mesh=mesh).set_allocate_memory_from_process_group_for_comm(kind == LENT)
    return plain


def silent(kind: str, contender: TorchContender) -> nn.Module:
    """The model without communication: DDP with a hook that returns each bucket unchanged; for FSDP2 the bare model,
    because FSDP2 cannot skip its communication."""
    if kind != "ddp":
        return model().to(contender.world.device)

    def unchanged(_, bucket):  # torch refuses postponed annotations
        whole: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        whole.set_result(bucket.buffer())
        return whole

    trained = wrapped(kind, contender.group, contender.world.device)
    trained.register_comm_hook(None, unchanged)
    return trained


def stepper(trained: nn.Module, rank: int, device: torch.device, batches: int = 1, rate: float = 1e-3) -> Callable:
    """One step: forward, backward, SGD; returns the loss. Every rank has its own data, the same for every contender."""
    shape = torch.Generator().manual_seed(rank + 1)
    inputs = torch.randn(batches, BATCH, WIDTHS[0], generator=shape).to(device)
    wanted = torch.randint(WIDTHS[-1], (batches, BATCH), generator=shape).to(device)
    turns = itertools.cycle(zip(inputs, wanted, strict=True))
    optimizer = torch.optim.SGD(trained.parameters(), lr=rate)
    loss = nn.CrossEntropyLoss()

    def step() -> torch.Tensor:
        batch, labels = next(turns)
        optimizer.zero_grad()
        off = loss(trained(batch), labels)
        off.backward()
        optimizer.step()
        return off

    return step


def weights(trained: nn.Module) -> torch.Tensor:
    """Every weight this rank holds, in one vector."""
    parts = []
    for parameter in trained.parameters():
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        parts.append(held.detach().flatten())
    return torch.cat(parts)


def run(world: World, arguments: argparse.Namespace, command: str) -> int:
    """Times the steps, checks that all contenders end with the same weights; 1 if they do not."""
    contenders, refused = enlist([arguments.backend, *arguments.vs], world, arguments.timeout)
    usable = [each for each in contenders if isinstance(each, TorchContender) and each.exact]
    for each in contenders:
        if each not in usable:
            world.log(f"# {each.name}: left out, a step needs a group whose results are right")
    if arguments.backend in refused:
        world.log(f"nvx bench: {arguments.backend}: {refused[arguments.backend]}")
        return 2
    document = machine.document("train", command, {"backend": arguments.backend, "vs": arguments.vs})
    effort = Effort(arguments.blocks, arguments.iters, warmup=1)
    names = [contender.name for contender in usable]
    shown = f"{world.size} ranks, one thread each; {effort.blocks} blocks of {effort.calls()} steps"
    world.log(report.opening(command, document, shown, names))
    round_trip = flag_round(world)
    world.log(report.state(round_trip))
    world.log(f"# {'step':>10}  {'backend':>12}  {'time (ms)':>10}  {'p50':>8}  {'p99':>8}  {'times':>6}  weights")
    results: list[dict[str, Any]] = []
    for kind in arguments.kinds:
        results += _kind(world, kind, usable, effort)
    if arguments.json and world.rank == 0:
        rest = {"gradient_bytes": 4 * sum(p.numel() for p in model().parameters()), "results": results}
        machine.write(arguments.json, document | {"ranks": world.size, "flag_round_us": [round_trip]} | rest)
    for contender in contenders:
        contender.close()
    return 0 if all(result["same_weights"] is not False for result in results) else 1


def _kind(world: World, kind: str, usable: list[TorchContender], effort: Effort) -> list[dict[str, Any]]:
    models = [wrapped(kind, contender.group, world.device) for contender in usable]
    steps = [stepper(trained, world.rank, world.device) for trained in [*models, silent(kind, usable[0])]]
    *timings, alone = measure(world, steps, effort)
    ends = [weights(trained) for trained in models]
    out: list[dict[str, Any]] = []
    for contender, timing, end in zip(usable, timings, ends, strict=True):
        off = float((end - ends[0]).abs().max())
        off = world.largest([off])[0]
        same = off <= 1e-5
        compared = {"same_weights": same, "weights_differ_by": off}
        out.append({"kind": kind, "backend": contender.name, **compared, **timing.in_microseconds()})
        shown = f"the same as {usable[0].name}'s" if same else f"off by {off:.3g}"
        world.log(_row(kind, contender.name, timing, timings[0]) + shown)
    out.append({"kind": kind, "backend": ALONE, "same_weights": None, **alone.in_microseconds()})
    world.log(_row(kind, ALONE, alone, timings[0]) + "nothing sent: what all of them take at least")
    return out


def _row(kind: str, name: str, timing: Timing, first: Timing) -> str:
    return (
        f"  {kind:>10}  {name:>12}  {timing.time * 1e3:10.2f}  {timing.p50 * 1e3:8.2f}  "
        f"{timing.p99 * 1e3:8.2f}  {timing.time / first.time:6.2f}  "
    )
