"""NVX_AS and nvx.serve_as: groups that a program requests as gloo or nccl are nvx's."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import warm
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
def report(**facts):
    print(json.dumps(facts), flush=True)
"""


class Ended:
    def __init__(self, process):
        self.output, self.errors = process.communicate(timeout=120)
        self.status = process.returncode

    @property
    def report(self):
        assert self.status == 0, self.errors
        return json.loads(self.output)


@pytest.fixture
def launch(tmp_path):
    """Runs code in processes, one for each dict of environment variables that it is given. fresh: torch's import prints
    what the test looks for."""

    def run(code, *environments, fresh=False):
        base = {key: value for key, value in os.environ.items() if not key.startswith(("NVX_", "TORCH_"))}
        base |= {"STORE": str(tmp_path / "store"), "OMP_NUM_THREADS": "1"}
        processes = [
            (subprocess.Popen if fresh else warm.Popen)(
                [*[sys.executable] * fresh, "-c", START + code],
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
facts = dict(sum=x.tolist(), sums=sums, names=names, run=[runs(group) for group in groups])
facts["typed"] = [group._get_backend_name() for group in groups[:4]]  # torch's sharded tensors ask for it
own = dist.ProcessGroupGloo(dist.PrefixStore("own", dist.FileStore(os.environ["STORE"], world)), rank, world)
facts["by class"] = own.name()
import nvx
facts["served"] = nvx.stand_in.served()
dist.destroy_process_group()
report(**facts)
"""


def test_every_way_to_request_gloo_gives_nvx(launch):
    first, second = launch(EVERY_WAY, *[{"NVX_AS": "gloo"}] * 2)
    for ended in (first, second):
        report = ended.report
        assert report["sum"] == [3.0] * 3 and report["sums"] == [2.0] * 5
        assert report["names"] == [["gloo"] * 4, "cpu:gloo,cuda:gloo"]
        assert report["run"] == ["nvx"] * 5 and report["typed"] == ["gloo"] * 4
        assert report["by class"] == "gloo", "a ProcessGroupGloo that a user makes is one"
        assert report["served"] == [["gloo"], 4], "the mesh uses the default group"
    text = "nvx replaces gloo in this job"
    assert first.errors.count(text) == 1 and second.errors.count(text) == 0


def test_detail_keeps_its_gloo_helper(launch):
    code = """
init("gloo")
x = torch.ones(1)
dist.all_reduce(x)
wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
report(sum=x.item(), wrapper=type(wrapper).__name__, runs=wrapper.wrapped_pg.name())
dist.destroy_process_group()
"""
    for ended in launch(code, *[{"NVX_AS": "gloo", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}] * 2):
        assert ended.report == {"sum": 2.0, "wrapper": "_ProcessGroupWrapper", "runs": "nvx"}


def test_rpc_keeps_gloo(launch):
    code = """
import torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.environ["STORE"], num_worker_threads=2)
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(2), rank)).tolist()
rpc.shutdown()
import nvx
report(value=value, served=nvx.stand_in.served()[1])
"""
    reports = [ended.report for ended in launch(code, *[{"NVX_AS": "gloo"}] * 2)]
    assert reports == [{"value": [1.0, 1.0], "served": 0}, {"value": [2.0, 2.0], "served": 0}]


@pytest.mark.parametrize("requested", ["cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nvx", None])
def test_strings_by_device_and_no_name_at_all(launch, requested):
    """This torch may be without CUDA, but nvx then refuses the name nccl."""
    code = f"""
import nvx
torch.version.cuda = "13.0"
nvx.serve_as("gloo", "nccl")
init({requested!r})
x = torch.ones(1)
dist.all_reduce(x)
on_host = nvx._backend(dist.group.WORLD).options._barrier_on_host
report(sum=x.item(), name=dist.get_backend(), runs=runs(dist.group.WORLD), on_host=on_host)
dist.destroy_process_group()
"""
    for ended in launch(code, {}, {}):
        report = ended.report
        on_host = report.pop("on_host")
        assert report == {"sum": 2.0, "name": requested or "undefined", "runs": "nvx"}
        assert requested is None or not on_host, "the barrier of nccl and nvx waits for the device"


def test_the_device_of_gloo_comes_first(launch):
    """torch gives a backend of several devices the store of the first one, and gloo that of its own device."""
    code = """
import nvx
torch.version.cuda = "13.0"
nvx.serve_as("gloo", "nccl")
report(actual=[nvx.stand_in.translate(one) for one in ("cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl", "cuda:nccl")])
"""
    assert launch(code, {})[0].report == {"actual": ["cpu:nvx,cuda:nvx", "cpu:nvx,cuda:nvx", "cuda:nvx"]}


def test_serve_as_in_a_program(launch):
    code = """
import nvx
nvx.serve_as("gloo")
init("gloo")
x = torch.ones(1)
dist.all_reduce(x)
backends = [nvx._backend(dist.group.WORLD)]
dist.barrier()
if rank == 0:
    backends.append(backends[0].shrink([1], 0, None))
on_host = all(backend.options._barrier_on_host for backend in backends)
report(sum=x.item(), name=dist.get_backend(), runs=runs(dist.group.WORLD), on_host=on_host)
dist.destroy_process_group()
"""
    for ended in launch(code, {}, {}):
        assert ended.report == {"sum": 2.0, "name": "gloo", "runs": "nvx", "on_host": True}


def test_without_it_torch_is_as_it_was(launch):
    code = """
from torch.distributed import distributed_c10d as c10d
init("gloo")
report(runs=runs(dist.group.WORLD), patched=hasattr(c10d._new_process_group_helper, "__wrapped__"))
"""
    assert launch(code, {})[0].report == {"runs": "gloo", "patched": False}


@pytest.mark.parametrize("served, late", [(0, 0), (1, 0)])
def test_ranks_that_differ_all_report_it(launch, served, late):
    code = f"""
import time
time.sleep(3 * (rank == {late}))
began = time.monotonic()
try:
    init("gloo", timeout=datetime.timedelta(seconds=60))
except Exception as error:
    report(seconds=time.monotonic() - began, error=str(error))
"""
    environments = [{"NVX_AS": "gloo"} if rank == served else {} for rank in range(2)]
    reports = [ended.report for ended in launch(code, *environments)]
    assert all(one["error"].startswith("nvx: NVX_AS differs between ranks: ") for one in reports), reports
    assert f"rank {1 - served} of group 0 uses gloo itself" in reports[served]["error"]
    assert "this rank uses gloo itself" in reports[1 - served]["error"]
    assert all(one["seconds"] < 30 for one in reports)


def test_ranks_that_are_missing_are_named(launch):
    code = """
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=4, timeout=datetime.timedelta(seconds=1))
except dist.DistBackendError as error:
    report(error=str(error))
"""
    error = launch(code, {"NVX_AS": "gloo"})[0].report["error"]
    assert re.search(r"timed out after 1\.\d+ s, waiting for the ranks of group 0: ranks 0, 2, 3 have", error), error
    assert "; this is rank 1" in error


def test_a_rank_that_ends_before_all_have_come_is_named(launch):
    code = """
import signal, threading, time
begun = [f"{os.environ['STORE']}.{r}" for r in range(world)]  # imports take seconds on a loaded machine
open(begun[rank], "w").close()
while not all(map(os.path.exists, begun)):
    time.sleep(0.01)
if rank == 2:
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()  # once it has announced itself
time.sleep(4 * (rank == 1))
began = time.monotonic()
try:
    init("gloo", timeout=datetime.timedelta(seconds=20))
except dist.DistBackendError as error:
    report(seconds=time.monotonic() - began, error=str(error))
"""
    for one in launch(code, *[{"NVX_AS": "gloo"}] * 3)[:2]:
        assert re.search(r"rank 2 \(pid \d+, host .*\) has ended \(signal 9\)", one.report["error"])
        assert one.report["seconds"] < 8, "the timeout is 20 s"


def test_missing_ranks_are_logged_from_time_to_time(launch):
    code = """
try:
    init("gloo", timeout=datetime.timedelta(seconds=11))
except dist.DistBackendError as error:
    report(error=str(error))
"""
    ended = launch(code, {"NVX_AS": "gloo", "WORLD_SIZE": "2"})[0]
    assert "rank 1 has not joined" in ended.report["error"]
    assert "group 0 of 2 ranks is not complete after 10" in ended.errors


def test_names_that_nvx_cannot_serve(launch):
    ended = launch("report(alive=True)", {"NVX_AS": "gloo,mpi"}, fresh=True)[0]
    assert ended.report == {"alive": True}
    assert re.search("NVX_AS: nvx can replace gloo( and nccl)?, not mpi", ended.errors)
    code = """
import nvx
try:
    nvx.serve_as("mpi")
except ValueError as error:
    report(error=str(error))
"""
    assert "'mpi'" in launch(code, {})[0].report["error"]


def test_torchft_is_reached_by_attribute(launch):
    code = """
import nvx
try:
    name = nvx.torchft.ProcessGroupNVX.__name__
except ModuleNotFoundError as error:
    name = error.name
report(name=name)
"""
    assert launch(code, {})[0].report["name"] in ("ProcessGroupNVX", "torchft")


def test_nccl_needs_a_torch_with_cuda(launch):
    code = """
import nvx
report(served=nvx.stand_in.served()[0], cuda=torch.version.cuda)
"""
    ended = launch(code, {"NVX_AS": "gloo,nccl"}, fresh=True)[0]
    with_cuda = bool(ended.report["cuda"])
    assert ended.report["served"] == (["gloo", "nccl"] if with_cuda else ["gloo"])
    text = "NVX_AS: nvx can replace gloo, not nccl (this torch is built without CUDA)"
    assert (text in ended.errors) == (not with_cuda)


MANY_TIMES = """
import nvx
store = dist.FileStore(os.environ["STORE"], world) if {store!r} == "file" else dist.TCPStore(
    "localhost", int(os.environ["PORT"]), world, rank == 0)
def again(late):
    import time
    time.sleep(0.5 * (rank == late))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    x = torch.ones(1)
    dist.all_reduce(x)
    run.append(runs(dist.group.WORLD))
    sums.append(x.item())
    dist.destroy_process_group()
run, sums = [], []
again(0)
nvx.serve_as("gloo")
for late in (0, 1, 0):  # a late rank has the address that gloo gave it, or none
    again(late)
report(run=run, sums=sums)
"""


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_groups_are_made_again_over_one_store(launch, store):
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    for ended in launch(MANY_TIMES.format(store=store), *[{"PORT": port}] * 2):
        assert ended.report == {"sums": [2.0] * 4, "run": ["gloo"] + ["nvx"] * 3}


def test_a_rank_joins_a_larger_world_over_a_store_with_entries_of_gloo(launch):
    code = """
import nvx, pathlib, time
def make(world):
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 5), rank=rank, world_size=world)
over = pathlib.Path(os.environ["STORE"] + " has served gloo")
if rank < 2:
    make(2)
    dist.barrier()
    dist.destroy_process_group()
    over.touch()
    time.sleep(2)  # rank 2 comes first
while not over.exists():
    time.sleep(0.01)
nvx.serve_as("gloo")
make(3)
x = torch.ones(1)
dist.all_reduce(x)
report(sum=x.item(), runs=runs(dist.group.WORLD))
"""
    assert all(ended.report == {"sum": 3.0, "runs": "nvx"} for ended in launch(code, {}, {}, {}))


def test_a_setup_after_one_that_failed(launch):
    code = """
import pathlib, time
failed, errors = pathlib.Path(os.environ["STORE"] + " has failed"), []
while rank == 1 and not failed.exists():
    time.sleep(0.1)
while not dist.is_initialized():
    try:
        init("gloo", timeout=datetime.timedelta(seconds=20 if errors or rank else 1))
    except dist.DistBackendError as error:
        errors.append(str(error))
        failed.touch()
x = torch.ones(1)
dist.all_reduce(x)
report(sum=x.item(), runs=runs(dist.group.WORLD), errors=errors)
dist.destroy_process_group()
"""
    reports = [ended.report for ended in launch(code, *[{"NVX_AS": "gloo"}] * 2)]
    assert all(one["sum"] == 2.0 and one["runs"] == "nvx" for one in reports)
    assert "rank 1 has not joined" in reports[0]["errors"][0]
    assert not any("differs" in error for one in reports for error in one["errors"])


@pytest.mark.parametrize(
    "argument, environment, seconds",
    [
        ("timeout=limit(1)", {}, 1),
        ("pg_options=nvx.Options(timeout=limit(1))", {}, 1),
        ("", {"NVX_TIMEOUT_S": "1.5"}, 1.5),
    ],
)
def test_the_setup_ends_within_the_timeout_of_the_group(launch, argument, environment, seconds):
    code = f"""
import nvx
def limit(seconds):
    return datetime.timedelta(seconds=seconds)
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=1, world_size=30, {argument})
except dist.DistBackendError as error:
    report(error=str(error))
"""
    error = launch(code, {"NVX_AS": "gloo", **environment})[0].report["error"]
    waited = re.search(r"timed out after ([\d.]+) s, waiting for the ranks of group 0: ranks 0, 2, 3", error)
    assert waited and seconds <= float(waited[1]) < seconds + 5, error


def test_options_of_another_backend_are_ignored(launch):
    code = """
import nvx, warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    init("gloo", timeout=datetime.timedelta(seconds=77), pg_options=dist.ProcessGroupGloo._Options())
seconds = nvx._backend(dist.group.WORLD).options._timeout.total_seconds()
report(seconds=seconds, warnings=[str(one.message) for one in warned])
"""
    report = launch(code, {"NVX_AS": "gloo"})[0].report
    assert report["seconds"] == 77
    assert "nvx takes nvx.Options as pg_options; _Options is ignored." in report["warnings"]


def test_torchs_log_keeps_one_handler():
    count = "from torch.distributed import c10d_logger as log; print(len(log._c10d_logger.handlers))"
    done = warm.run(["-c", f"import torch, nvx; {count}"], capture_output=True, text=True)
    assert done.stdout == "1\n", done
