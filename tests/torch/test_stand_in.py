"""NVX_AS and nvx.serve_as: groups that a program asks for as gloo or nccl are nvx's."""

import json
import os
import subprocess
import sys

import pytest
from ranks import OVER_NVX

pytestmark = pytest.mark.skipif(not OVER_NVX, reason="nvx stands in for gloo, not the reverse")

START = """
import datetime, json, os, sys
import torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def init(backend=None, **more):
    store = dist.FileStore(os.environ["STORE"], world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **more)
def runs(group):
    device = torch.device(group._device_types[0])
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend).name()
def tell(**facts):
    print(json.dumps(facts), flush=True)
"""


class Ended:
    def __init__(self, process):
        self.said, self.errors = process.communicate(timeout=120)
        self.status = process.returncode

    @property
    def told(self):
        assert self.status == 0, self.errors
        return json.loads(self.said)


@pytest.fixture
def launch(tmp_path):
    """Runs code in fresh processes, one for each dict of environment variables that it is given."""

    def run(code, *environments):
        base = {key: value for key, value in os.environ.items() if not key.startswith(("NVX_", "TORCH_"))}
        base |= {"STORE": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", START + code],
                env=base | {"RANK": str(rank), "WORLD_SIZE": str(len(environments))} | more,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, more in enumerate(environments)
        ]
        try:
            return [Ended(process) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()

    return run


EVERY_WAY = """
init("gloo")
x = torch.full((3,), float(rank + 1))
dist.all_reduce(x)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
groups = [
    dist.group.WORLD, dist.new_group(), dist.new_group([0, 1], backend="gloo"), mesh.get_group(),
    dist.new_group(backend="cpu:gloo"),
]
dist.monitored_barrier()  # torch up to 2.13 allows it for the name gloo only
sums = []
for group in groups:
    y = torch.ones(1)
    dist.all_reduce(y, group=group)
    sums.append(y.item())
names = [dist.get_backend(group) for group in groups[:4]], dist.get_backend_config(groups[0])
told = dict(sum=x.tolist(), sums=sums, names=names, run=[runs(group) for group in groups])
own = dist.ProcessGroupGloo(dist.PrefixStore("own", dist.FileStore(os.environ["STORE"], world)), rank, world)
told["by class"] = own.name()
import nvx
told["served"] = nvx.stand_in.served()
dist.destroy_process_group()
tell(**told)
"""


def test_every_way_to_ask_for_gloo_gives_nvx(launch):
    first, second = launch(EVERY_WAY, *[{"NVX_AS": "gloo"}] * 2)
    for ended in (first, second):
        told = ended.told
        assert told["sum"] == [3.0] * 3 and told["sums"] == [2.0] * 5
        assert told["names"] == [["gloo"] * 4, "cpu:gloo,cuda:gloo"]
        assert told["run"] == ["nvx"] * 5
        assert told["by class"] == "gloo", "a ProcessGroupGloo that somebody makes is one"
        assert told["served"] == [["gloo"], 4], "the mesh uses the default group"
    said = "nvx serves the groups that are asked for as gloo"
    assert first.errors.count(said) == 1 and second.errors.count(said) == 0


def test_detail_keeps_its_gloo_helper(launch):
    code = """
init("gloo")
x = torch.ones(1)
dist.all_reduce(x)
wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
tell(sum=x.item(), wrapper=type(wrapper).__name__, runs=wrapper.wrapped_pg.name())
dist.destroy_process_group()
"""
    for ended in launch(code, *[{"NVX_AS": "gloo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}] * 2):
        assert ended.told == {"sum": 2.0, "wrapper": "_ProcessGroupWrapper", "runs": "nvx"}


def test_rpc_keeps_gloo(launch):
    code = """
import torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.environ["STORE"], num_worker_threads=2)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank)).tolist()
rpc.shutdown()
import nvx
tell(value=value, served=nvx.stand_in.served()[1])
"""
    told = [ended.told for ended in launch(code, *[{"NVX_AS": "gloo"}] * 2)]
    assert told == [{"value": [1.0, 1.0], "served": 0}, {"value": [2.0, 2.0], "served": 0}]


@pytest.mark.parametrize("asked", ["cpu:gloo,cuda:nccl", None])
def test_strings_by_device_and_no_name_at_all(launch, asked):
    code = f"""
init({asked!r})
x = torch.ones(1)
dist.all_reduce(x)
tell(sum=x.item(), name=dist.get_backend(), runs=runs(dist.group.WORLD))
dist.destroy_process_group()
"""
    for ended in launch(code, *[{"NVX_AS": "gloo,nccl"}] * 2):
        assert ended.told == {"sum": 2.0, "name": asked or "undefined", "runs": "nvx"}


def test_serve_as_in_a_program(launch):
    code = """
import nvx
nvx.serve_as("gloo")
init("gloo")
x = torch.ones(1)
dist.all_reduce(x)
tell(sum=x.item(), name=dist.get_backend(), runs=runs(dist.group.WORLD))
dist.destroy_process_group()
"""
    for ended in launch(code, {}, {}):
        assert ended.told == {"sum": 2.0, "name": "gloo", "runs": "nvx"}


def test_without_it_torch_is_as_it_was(launch):
    code = """
from torch.distributed import distributed_c10d as c10d
init("gloo")
tell(runs=runs(dist.group.WORLD), patched=hasattr(c10d._new_process_group_helper, "__wrapped__"))
"""
    assert launch(code, {})[0].told == {"runs": "gloo", "patched": False}


@pytest.mark.parametrize("served, late", [(0, 0), (1, 0)])
def test_ranks_that_differ_all_say_so(launch, served, late):
    code = f"""
import time
time.sleep(3 * (rank == {late}))
began = time.monotonic()
try:
    init("gloo", timeout=datetime.timedelta(seconds=60))
except Exception as error:
    tell(seconds=time.monotonic() - began, error=str(error))
"""
    environments = [{"NVX_AS": "gloo"} if rank == served else {} for rank in range(2)]
    told = [ended.told for ended in launch(code, *environments)]
    assert all(one["error"].startswith("nvx: NVX_AS differs between ranks: ") for one in told), told
    assert f"rank {1 - served} of group 0 uses gloo itself" in told[served]["error"]
    assert "this rank uses gloo itself" in told[1 - served]["error"]
    assert all(one["seconds"] < 30 for one in told)


def test_ranks_that_are_missing_are_named(launch):
    code = """
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=4, timeout=datetime.timedelta(seconds=1))
except dist.DistBackendError as error:
    tell(error=str(error))
"""
    error = launch(code, {"NVX_AS": "gloo"})[0].told["error"]
    assert "did not all come in 1 s: [0, 2, 3] are missing; this is rank 1" in error


def test_names_that_nvx_cannot_serve(launch):
    ended = launch("tell(alive=True)", {"NVX_AS": "gloo,mpi"})[0]
    assert ended.told == {"alive": True}
    assert "NVX_AS: nvx can serve gloo and nccl, not mpi" in ended.errors
    code = """
import nvx
try:
    nvx.serve_as("mpi")
except ValueError as error:
    tell(error=str(error))
"""
    assert "'mpi'" in launch(code, {})[0].told["error"]
