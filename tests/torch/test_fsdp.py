"""FSDP1 and FSDP2 on CPU tensors, trained over nvx and over gloo to the same bits."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, OVER_NVX, on_ranks, only_nvx
from reference import assert_same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import WIDTH, assert_as_alone, assert_same_weights, batch, net, same_over_gloo, train, weights

CPU = torch.device("cpu")


def quiet(body):
    """Suppresses FSDP1's warning that it prefers an accelerator."""

    @functools.wraps(body)
    def inner(*args, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return body(*args, **kwargs)

    return inner


# --- FSDP1 --------------------------------------------------------------------------------------------------


def fsdp1(group, rank, strategy, precision=None):
    model = FullyShardedDataParallel(
        net(),
        process_group=group,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=precision,
        device_id=CPU,
    )
    train(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return weights(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
@quiet
def test_fsdp1(rank, world, strategy):
    same_over_gloo(lambda group: fsdp1(group, rank, getattr(ShardingStrategy, strategy)), strategy)


@on_ranks(2)
@quiet
def test_fsdp1_mixed_precision(rank, world):
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    same_over_gloo(lambda group: fsdp1(group, rank, ShardingStrategy.FULL_SHARD, half), "bf16 parameters")


@on_ranks(4)
@quiet
def test_fsdp1_hybrid_shard(rank, world):
    trained = {}
    for kind in (BACKEND, "gloo"):
        inner = dist.new_subgroups(2, backend=kind)[0]
        outer = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend=kind)[0]
        trained[kind] = fsdp1((inner, outer), rank, ShardingStrategy.HYBRID_SHARD)
    assert_same_weights(trained[BACKEND], trained["gloo"], "HYBRID_SHARD")


@on_ranks(2)
@quiet
def test_fsdp1_state_dicts(rank, world):
    model = FullyShardedDataParallel(net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU)
    train(model, rank)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full = model.state_dict()
    plain = net(seed=1)
    plain.load_state_dict(full)
    with FullyShardedDataParallel.summon_full_params(model):
        assert_same_weights(weights(plain), weights(model), "FULL_STATE_DICT")
    norm = model.clip_grad_norm_(1.0)
    assert norm.ndim == 0


# --- FSDP2 --------------------------------------------------------------------------------------------------


def fsdp2(mesh, rank, policy=None, factor=None, reshard=True):
    model = net()
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if policy is not None:
        options["mp_policy"] = policy
    for layer in (model.first, model.second):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if factor is not None:
        for module in (model.first, model.second, model):
            module.set_gradient_divide_factor(factor)
    train(model, rank)
    return [p.full_tensor().detach() for p in model.parameters()]


def mesh_of(group):
    return DeviceMesh.from_group(group, "cpu")


def on_group(group, **options):
    return fsdp2(mesh_of(group), **options)


@on_ranks(2)
def test_fsdp2(rank, world):
    for reshard in (True, False):
        run = functools.partial(on_group, rank=rank, reshard=reshard)
        same_over_gloo(run, f"fully_shard, reshard {reshard}")


@on_ranks(2)
def test_fsdp2_mixed_precision(rank, world):
    for reduce in (torch.float32, torch.bfloat16) if OVER_NVX else (torch.float32,):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        run = functools.partial(on_group, rank=rank, policy=policy)
        got = same_over_gloo(run, f"bf16, reduced in {reduce}")
        assert all(t.dtype == torch.float32 for t in got)


@on_ranks(2)
def test_fsdp2_is_ddp_with_less_memory(rank, world):
    """The weights equal those of plain training on the mean of the gradients, to rounding."""
    got = fsdp2(mesh_of(dist.group.WORLD), rank)
    assert_as_alone(got, world)


@only_nvx
@on_ranks(2, 3)
def test_fsdp2_divide_factor(rank, world):
    """A custom factor arrives as PREMUL_SUM. Twice the default factor halves the learning rate."""
    mesh = mesh_of(dist.group.WORLD)
    got = fsdp2(mesh, rank, factor=float(2 * world))
    assert_as_alone(got, world, 2 * world)


@on_ranks(4)
def test_fsdp2_hybrid(rank, world):
    """Sharded over columns, replicated over rows."""
    trained = {}
    for kind in (BACKEND, "gloo"):
        columns = dist.new_subgroups(2, backend=kind)[0]
        rows = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend=kind)[0]
        mesh = DeviceMesh.from_group(
            [rows, columns], "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("rows", "columns")
        )
        trained[kind] = fsdp2(mesh, rank)
    assert_same_weights(trained[BACKEND], trained["gloo"], "hybrid fully_shard")


@on_ranks(2)
def test_fsdp2_gradient_norm_and_accumulation(rank, world):
    def run(group):
        model = net()
        fully_shard(model, mesh=mesh_of(group))
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            x, y = batch(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return [norm.full_tensor().detach()] + [p.grad.full_tensor() for p in model.parameters()]

    same_over_gloo(run, "clip_grad_norm_")


@on_ranks(2)
def test_fsdp2_meta_initialisation(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 33), nn.Linear(33, 5))
    fully_shard(model, mesh=mesh_of(dist.group.WORLD))
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    assert_same(model[0].weight.full_tensor().detach(), torch.full((33, WIDTH), 0.5), "constant_")
