"""Groups: all spellings and stores, subgroups, splits, the DETAIL wrapper; groups do not affect each other."""

import copy
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import BACKEND, OVER_NVX, SEVERAL_HOSTS, TORCH, make_backend, on_ranks, only_nvx, stderr_lines
from reference import assert_same

CPU = torch.device("cpu")


def sum_over(group, value=None):
    """An all_reduce of each member's global rank, as a plain number."""
    tensor = torch.tensor([float(dist.get_rank()) if value is None else value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def nvx_c():
    return importlib.import_module("nvx._C")


# --- spellings and stores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [BACKEND, BACKEND.upper(), f"cpu:{BACKEND}", f"cpu:{BACKEND},cuda:gloo"])
def test_spellings(ranks, spelling):
    ranks.run(spelled, world=2, backend=spelling, spelling=spelling)


def spelled(rank, world, spelling):
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.name() == BACKEND
    if OVER_NVX:
        assert isinstance(backend, nvx_c().ProcessGroupNVX)
        assert backend.rank() == rank
        assert backend.size() == world
    assert spelling.lower() in (dist.get_backend(), dist.get_backend_config(), dist.get_backend().lower())
    assert sum_over(None) == 1.0
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(world)]
    dist.barrier()


@pytest.mark.parametrize("store", ["file", "tcp", "prefix"])
@on_ranks(4)
def test_stores(rank, world, store):
    """Two groups over one store do not affect each other."""
    evens = dist.new_group([0, 2])
    of_all = dist.new_group()
    assert sum_over(of_all) == 6.0
    if rank % 2 == 0:
        assert sum_over(evens) == 2.0


class ForwardingStore(dist.Store):
    """A store written in Python, without check()."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set(self, key, value):
        self.inner.set(key, value)

    def get(self, key):
        return self.inner.get(key)

    def add(self, key, value):
        return self.inner.add(key, value)


class CheckingStore(ForwardingStore):
    def check(self, keys):
        return self.inner.check(keys)


@only_nvx
@on_ranks(2)
def test_a_store_in_python_needs_check(rank, world):
    inner = dist.PrefixStore("python", dist.distributed_c10d._get_default_store())
    with pytest.raises(RuntimeError, match=r'lacks a method: .*check".* Next: define set\(\)'):
        make_backend(ForwardingStore(inner), rank, world)
    group = make_backend(CheckingStore(inner), rank, world)
    x = torch.ones(3)
    group.allreduce([x]).wait()
    assert x.tolist() == [2.0] * 3


def env_method(rank, world, port):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the test run hosts the store, like torchrun
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(port)
    try:
        dist.init_process_group(BACKEND)
        assert sum_over(None) == 1.0
    finally:
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"):
            del os.environ[name]


def test_env_method(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(env_method, world=2, kind="bare", port=store.port)


def silent(port, server, interrupted):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set("x", "y")
    os.kill(server, signal.SIGSTOP)
    expected = dist.DistBackendError, r"the store at 127.0.0.1, .* has not answered for \d\.\d\d s"
    if interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        expected = KeyboardInterrupt, None
    began = time.monotonic()
    with stderr_lines() as lines, pytest.raises(expected[0], match=expected[1]):
        limit = timedelta(seconds=60 if interrupted else 2)
        dist.init_process_group(BACKEND, store=store, rank=0, world_size=2, timeout=limit)
    assert time.monotonic() - began < 8
    assert interrupted or not any("leaving a note" in line for line in lines), lines  # the error says the same
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ranks.py leaves it
    dist.distributed_c10d._world.group_count = 0  # torch counts the failed one, too, and names the next group by it


@only_nvx
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_store_whose_server_is_stopped_is_named(ranks, interrupted):
    """torch waits for an answer without a limit."""
    code = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)"
    serves = [sys.executable, "-c", code + "; print(s.port, flush=True); sys.stdin.read()"]
    with subprocess.Popen(serves, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            ranks.run(silent, world=1, kind="bare", port=port, server=server.pid, interrupted=interrupted)
        finally:
            server.kill()


def made_again(rank, world, port):
    """Under torchrun, every default group of a program uses the same prefix."""
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for life in range(4):
        dist.init_process_group(BACKEND, store=dist.PrefixStore("same", server), rank=rank, world_size=world)
        assert sum_over(None, float(life)) == world * life
        dist.destroy_process_group()


@only_nvx
def test_the_default_group_made_again_under_the_same_prefix(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run(made_again, world=3, kind="bare", port=store.port)


@only_nvx
@on_ranks(2)
def test_registered_names(rank, world):
    assert dist.is_backend_available("nvx")
    assert dist.Backend("nvx") == "nvx"
    assert "cpu" in dist.Backend.backend_capability["nvx"]
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


# --- subgroups ----------------------------------------------------------------------------------------------


@on_ranks(4)
def test_new_groups(rank, world):
    for members in ([0, 1], [1, 3], [0, 2, 3], [2], [3, 0]):
        group = dist.new_group(members)
        if rank in members:
            assert dist.get_world_size(group) == len(members)
            assert sum_over(group) == sum(members)
            assert dist.get_global_rank(group, dist.get_rank(group)) == rank
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER


@on_ranks(4)
def test_groups_that_only_their_members_make(rank, world):
    """`use_local_synchronization`: only members take part, and the two halves do not wait for each other."""
    members = [0, 1] if rank < 2 else [2, 3]
    for _ in range(3):
        group = dist.new_group(members, use_local_synchronization=True)
        assert sum_over(group) == sum(members)
    if rank == 3:
        alone = dist.new_group([3], use_local_synchronization=True)
        assert sum_over(alone) == 3.0


@only_nvx
@on_ranks(2)
def test_a_group_that_its_members_make_again(rank, world):
    """The new group has the name of the destroyed one, and so the same keys in the store."""
    for _ in range(3):
        group = dist.new_group([0, 1], use_local_synchronization=True)
        assert sum_over(group) == 1.0
        dist.destroy_process_group(group)


@on_ranks(4)
def test_new_subgroups(rank, world):
    group, _ = dist.new_subgroups(2)
    assert sum_over(group) == (1.0 if rank < 2 else 5.0)
    group, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert sum_over(group) == 3.0


@only_nvx
@on_ranks(3)
def test_a_rank_that_has_destroyed_the_job_is_named_by_new_group(rank, world):
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(2.5)
        return
    started = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"rank 1 \(pid \d+, .* has destroyed the group of the whole job"):
        dist.new_group()
    assert time.monotonic() - started < (2.2 if SEVERAL_HOSTS else 1.2)


@on_ranks(3)
def test_many_groups_come_and_go(rank, world):
    groups = [dist.new_group() for _ in range(20)]
    for number, group in enumerate(groups):
        assert sum_over(group, float(number)) == 3.0 * number
    for group in groups[::2]:
        dist.destroy_process_group(group)
    for group in reversed(groups[1::2]):
        assert sum_over(group) == 3.0
    assert sum_over(None) == 3.0


@only_nvx
@on_ranks(2)
def test_a_group_of_another_backend_beside(rank, world):
    gloo = dist.new_group(backend="gloo")
    mine = dist.new_group(backend="nvx")
    assert sum_over(gloo) == sum_over(mine) == 1.0
    assert dist.get_backend(gloo) == "gloo"
    assert dist.get_backend(mine) == "nvx"


@only_nvx
@on_ranks(2)
def test_options(rank, world):
    options = nvx_c().ProcessGroupNVX.Options(timeout=timedelta(seconds=17))
    assert repr(options).startswith(f"nvx.Options(timeout={timedelta(seconds=17)!r}, group_desc='"), repr(options)
    assert options.timeout == timedelta(seconds=17)
    group = dist.new_group(pg_options=options, timeout=timedelta(seconds=19))
    assert sum_over(group) == 1.0
    backend = group._get_backend(CPU)
    for seen in (backend.options, copy.deepcopy(backend.options), copy.copy(options)):
        assert isinstance(seen, nvx_c().ProcessGroupNVX.Options)
    copied = copy.deepcopy(options)
    copied._timeout = timedelta(seconds=1)
    assert options._timeout == timedelta(seconds=17)


@only_nvx
@on_ranks(2)
def test_options_for_kernels(rank, world):
    make = nvx_c().ProcessGroupNVX.Options
    assert [make(kernels=word).kernels for word in ("", "auto", "0", "1")] == ["", "auto", "0", "1"]
    with pytest.raises(ValueError, match='kernels="on" is none of'):
        make().kernels = "on"
    group = dist.new_group(pg_options=make(kernels="0"))
    assert sum_over(group) == 1.0
    with pytest.raises(dist.DistBackendError, match="differ in NVX_KERNELS: rank 0 has 0, rank 1 has 1"):
        dist.new_group(pg_options=make(kernels=str(rank)))


@only_nvx
@on_ranks(2)
def test_whose_timeout_counts(rank, world):
    def counts(**given):
        group = dist.new_group(**given)
        return group._get_backend(CPU).options._timeout.total_seconds()

    options = nvx_c().ProcessGroupNVX.Options
    seventeen, nineteen = timedelta(seconds=17), timedelta(seconds=19)
    assert counts(pg_options=options(timeout=seventeen), timeout=nineteen) == 17
    assert counts(pg_options=options(), timeout=nineteen) == 19
    assert counts(pg_options=options(timeout=seventeen)) == 17


@only_nvx
@on_ranks(2)
def test_foreign_options_are_ignored_with_a_warning(rank, world):
    with pytest.warns(UserWarning, match="nvx takes nvx.Options as pg_options; _Options is ignored"):
        group = dist.new_group(pg_options=dist.ProcessGroupGloo._Options())
    assert sum_over(group) == 1.0


@only_nvx
@on_ranks(1)
def test_a_group_of_one(rank, world):
    tensor = torch.arange(5.0)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    outputs = [torch.zeros(5)]
    dist.all_gather(outputs, tensor)
    dist.reduce_scatter(outputs[0], [tensor])
    dist.all_to_all_single(outputs[0], tensor)
    dist.broadcast(tensor, 0)
    dist.barrier()
    assert_same(tensor, torch.arange(5.0))
    assert_same(outputs[0], tensor)
    for count in (0, 1000, 70_001, 2_000_003):
        tensor = torch.arange(float(count))
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        whole, part = torch.zeros(count), torch.zeros(count)
        dist.all_gather_into_tensor(whole, tensor)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_to_all_single(whole, part)
        assert_same(whole, torch.arange(float(count)), f"count {count}")


# --- splits -------------------------------------------------------------------------------------------------


def split(ranks_lists, name, device=CPU):
    """`split_group` as this torch offers it on the CPU: up to 2.14 its Python part requires an accelerator."""
    if TORCH >= (2, 15):
        return dist.split_group(split_ranks=ranks_lists, group_desc=name)
    world = dist.group.WORLD
    mine = next((r for r in ranks_lists if dist.get_rank() in r), ranks_lists[0])
    options = copy.deepcopy(world._get_backend(device).options)
    return world.split_group(mine, timeout=timedelta(seconds=30), opts=options, group_name=f"{name}-{mine}")


def split_sum(group, value):
    tensor = torch.tensor([float(value)])
    group.allreduce([tensor]).wait()
    return tensor.item()


@only_nvx
@on_ranks(4)
def test_split(rank, world):
    assert dist.group.WORLD._get_backend(CPU).supports_splitting
    halves = split([[0, 1], [2, 3]], "halves")
    assert halves.size() == 2
    assert halves.rank() == rank % 2
    assert split_sum(halves, rank) == (1.0 if rank < 2 else 5.0)
    some = split([[1, 2, 3]], "some")
    if rank == 0:
        assert some in (None, dist.GroupMember.NON_GROUP_MEMBER)
    else:
        assert split_sum(some, rank) == 6.0
    again = split([[0, 1], [2, 3]], "again")
    assert split_sum(again, rank + 10) == (21.0 if rank < 2 else 25.0)
    assert split_sum(halves, rank) == (1.0 if rank < 2 else 5.0)
    assert sum_over(None) == 6.0


@only_nvx
@on_ranks(2)
def test_a_split_without_a_reference_is_gone(rank, world):
    """The parent group keeps no reference to the split."""

    class Hook:
        def __call__(self, info):
            pass

    for turn in range(3):
        hook = Hook()
        seen = weakref.ref(hook)
        part = split([[0, 1]], f"part {turn}")
        part._register_on_completion_hook(hook)
        del hook
        assert split_sum(part, 1) == 2.0
        if part in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(part)
        else:
            part.shutdown()
        del part
        end = time.monotonic() + 10
        while seen() is not None:
            gc.collect()
            assert time.monotonic() < end, "the hook of a group that is gone is still there"
            time.sleep(0.01)
    assert sum_over(None) == 1.0


@only_nvx
@on_ranks(2)
def test_no_color_split_is_harmless(rank, world):
    backend = dist.group.WORLD._get_backend(CPU)
    if rank == 1:
        backend.perform_nocolor_split(CPU)
    assert sum_over(None) == 1.0


@on_ranks(4)
def test_device_mesh(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert sum_over(mesh.get_group("rows")) == {0: 2.0, 1: 4.0}[rank % 2]
    assert sum_over(mesh.get_group("columns")) == (1.0 if rank < 2 else 5.0)
    assert dist.get_backend(mesh.get_group("rows")) == BACKEND
    flat = mesh._flatten("all")
    assert sum_over(flat.get_group()) == 6.0


@only_nvx
@on_ranks(3)
def test_groups_merged(rank, world):
    """Two groups become one of all their ranks."""
    parts = [dist.new_group([0, 1]), dist.new_group([2])]
    own = parts[rank // 2]
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    merged = own.merge_remote_group(store, world, timedelta(seconds=20), "merged", "of two")
    assert merged.size() == world
    total = torch.tensor([rank + 1.0])
    merged.allreduce([total]).wait()
    assert total.item() == 6.0
    assert sum_over(own) == (1.0 if rank < 2 else 2.0)


# --- the class itself ---------------------------------------------------------------------------------------


@only_nvx
@on_ranks(2)
def test_the_class_is_a_backend(rank, world):
    store = dist.PrefixStore("own", dist.distributed_c10d._get_default_store())
    backend = make_backend(store, rank, world)
    assert isinstance(backend, torch._C._distributed_c10d.Backend)
    assert backend.name() == "nvx"
    tensor = torch.ones(3)
    backend.allreduce([tensor]).wait()
    assert tensor.tolist() == [2.0] * 3
    backend.shutdown()
    backend.shutdown()


@only_nvx
@on_ranks(1)
def test_nonsense_is_refused_at_construction(rank):
    store = dist.HashStore()
    for size, wrong in ((0, 0), (2, 2), (2, -1), (-1, 0)):
        with pytest.raises(ValueError, match="rank|size"):
            make_backend(store, wrong, size)
    with pytest.raises(TypeError):
        nvx_c().ProcessGroupNVX(None, "0", 1)
    with pytest.raises(ValueError, match="store"):
        make_backend(None, 0, 1)
    with pytest.raises(ValueError, match="not nvx"):
        nvx_c().set_timeout(None, timedelta(seconds=1))
    with pytest.raises(ValueError, match="rank"):
        nvx_c().explain("all_reduce", 8, 0)
