"""Torch's parts of `nvx gpucheck`, on the fake accelerator: what they find is right, and they find what is wrong."""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from collections import Counter

import fake_device
import nvx
import pytest
import torch
import torch.distributed as dist
from fake_device import counts, reset_counts
from nvx.gpucheck import exchange, torch_tests, workers
from nvx.gpucheck.uses import __main__ as uses_main
from nvx.gpucheck.uses import figures, graphs, pools, relay, surroundings, training
from nvx.gpucheck.uses.parts import PARTS
from nvx.gpucheck.uses.ranks import Rank, close, run_cases
from ranks import on_fake_gpus, on_played_gpus, on_ranks, on_relayed_gpus, one_host, only_nvx
from test_device import captured

PACKAGE = pathlib.Path(nvx.__file__).parents[1]
ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [one_host, only_nvx]


class Again:
    """A graph, played by calling once more what it is made of."""

    def __init__(self, run):
        self.replay = run


class Refused:
    def __init__(self, run):
        raise RuntimeError("this stream is being captured, which is refused\nand so on")


class Stale:
    """A graph of which no replay does anything."""

    def __init__(self, run):
        self.replay = lambda: None


def rank_here(told):
    kind = "fakegpu" if fake_device._loaded else "cpu"
    return Rank(torch.device(kind, 0) if kind != "cpu" else torch.device(kind), told.append)


def run(part, told, *names):
    cases = {name: case for name, case in PARTS[part].items() if not names or name in names}
    run_cases(rank_here(told), cases)
    return [line["case"] for line in told if "case" in line]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ddp", "fsdp2", "dtensor", "pipeline"])
@on_fake_gpus(2)
def test_uses(rank, world, part):
    told = []
    names = [name for name in PARTS[part] if name != "large buckets"]  # of which the CPU would take long
    done = run(part, told, *names)
    assert done == (names if rank == 0 else [])


@pytest.mark.slow
@pytest.mark.parametrize("part", ["fsdp2", "dtensor"])
@on_fake_gpus(4)
def test_uses_in_two_dimensions(rank, world, part):
    run(part, [], "hybrid", "two dimensions")


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("part", ["ddp", slow("fsdp2"), slow("dtensor"), slow("pipeline")])
@on_fake_gpus(2)
def test_the_first_use_of_each_part(rank, world, part):
    name = next(iter(PARTS[part]))
    told = []
    assert run(part, told, name) == ([name] if rank == 0 else [])


@on_ranks(2)
def test_uses_of_the_cpu(rank, world):
    """Where gloo serves the tensors too, its bits are asked for."""
    run("ddp", [], "small buckets", "unused parameters")
    run("fsdp1", [], "FULL_SHARD")


@pytest.mark.slow
@on_fake_gpus(2)
def test_compiled(rank, world):
    told = []
    run("compile", told)
    assert rank != 0 or {line["left_out_part"] for line in told if "left_out_part" in line} == {"inductor"}


@on_fake_gpus(2)
def test_staging(rank, world):
    here = rank_here([])
    close(training.weights(training.train(here, training.ddp(here))), training.alone(here), "staged")


@on_ranks(2)
def test_steps_and_host_times(rank, world):
    told = []
    here = rank_here(told)
    figures.step_times(here, width=64, layers=2, rounds=2, steps=2)
    figures.host_time(here, calls=5, rounds=2)
    if rank == 0:
        step, launch, *calls = told
        assert step["nvx_ms"] > 0 and step["gloo_ms"] > 0 and step["rounds"] == 2
        assert launch["host"] == "an empty launch" and len(calls) == 5
        assert all(call["us"] > 0 for call in calls)


@on_played_gpus(2)
def test_pools_beside_ordinary_tensors(rank, world):
    told = []
    here = rank_here(told)
    pools.beside_ordinary(here, counts=(1 << 19,), calls=2)
    pools.fsdp2(here)
    if rank == 0:
        *calls, training_told = told
        assert [line["pool"] for line in calls] == ["all_gather", "reduce_scatter", "all_reduce"]
        for line in calls:
            assert line["direct_pieces"] >= 1 and line["ordinary_ms"] > 0 and line["pool_ms"] > 0, line
            assert line["staging_bytes_saved"] == line["direct_pieces"] * line["piece_bytes"], line
        assert training_told["direct_pieces"] > 0


@on_played_gpus(2)
def test_pools_that_save_nothing_are_found(rank, world):
    pools.pooled, kept = pools.ordinary, pools.pooled
    try:
        with pytest.raises(AssertionError, match="all_gather: pieces that went without staging, by rank: .0, 0."):
            pools.beside_ordinary(rank_here([]), counts=(1 << 19,), calls=1)
    finally:
        pools.pooled = kept


@on_fake_gpus(2)
def test_their_part_is_left_out_where_tensors_go_through_the_host(rank, world):
    told = []
    pools.beside_ordinary(rank_here(told))
    assert [line["left_out_part"] for line in told] == (["pools"] if rank == 0 else [])


@on_relayed_gpus(4)
def test_relays_by_kernels(rank, world):
    reset_counts()
    relay.relayed(rank_here([]), asynchronous=False, counts=(relay.COUNTS[0],))
    relay.several(rank_here([]))
    relay.others(rank_here([]), counts=(5, 70_001))
    relay.host_goes_on(rank_here([]), count=70_001)
    assert counts()["launches"] >= 4


@pytest.mark.slow
def test_relays_of_the_cpu():
    module = str(nvx._load().__file__)
    if why := relay.obstacle(module):
        pytest.skip(why)
    lines, code = start("relay", "--device", "cpu", "--ranks", "4", "--module", module)
    assert code == 0 and lines[-1]["end"] == "passed" and lines[-1]["tried"] == len(PARTS["relay"]), lines


def test_without_a_way_between_hosts_there_are_no_relays(monkeypatch, capsys):
    """As a module says it that was built without UCX, or finds no library of it."""
    network = json.dumps({"link": "", "none": "this build has no UCX"})
    asked = types.SimpleNamespace(stdout=f"a word before it\n{network}\n")
    monkeypatch.setattr(relay.subprocess, "run", lambda *given, **more: asked)
    for name in ("NVX_DEBUG", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # which it sets
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    assert uses_main.main(["relay", "--device", "cpu"]) == 0
    end = json.loads(capsys.readouterr().out)
    assert (end["end"], end["why"]) == ("skipped", "this build has no UCX")
    asked.stdout = ""
    assert "does not say whether it reaches other hosts" in relay.obstacle("")


def test_half_of_the_ranks_of_relays_are_on_each_host():
    hosts = [surroundings.of_rank("relay", number, 1, {})["NVX_HOST_ID"] for number in range(4)]
    assert hosts == ["a", "a", "b", "b"]
    assert [surroundings.ranks_of("relay", gpus, 4) for gpus in (1, 2, 8)] == [4, 4, 4]
    assert [surroundings.ranks_of("ddp", gpus, 2) for gpus in (0, 1, 2, 16)] == [2, 2, 2, 8]


def test_each_rank_sees_the_devices_in_an_order_of_its_own():
    seen = [surroundings.visible_to(number, 4, None) for number in range(5)]
    assert seen == ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2", "0,1,2,3"]
    assert surroundings.visible_to(1, 2, "GPU-a, GPU-b,GPU-c") == "GPU-b,GPU-a"
    assert surroundings.visible_to(1, 1, None) == "0"
    assert surroundings.of_rank("ddp", 1, 4, {}) == {} and surroundings.devices_of("ddp", 4) == 4
    assert surroundings.of_rank("visible", 1, 2, {}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert surroundings.devices_of("visible", 4) == 1


def test_expandable_segments_are_asked_for_beside_what_was_set():
    assert surroundings.of_all("ddp", {}) == {}
    set_before = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:False"}
    both = "max_split_size_mb:64,expandable_segments:True"
    assert surroundings.of_all("expandable", set_before) == {
        "PYTORCH_ALLOC_CONF": both,
        "PYTORCH_CUDA_ALLOC_CONF": both,
    }


@pytest.mark.parametrize("graph", [Again, Refused])
@on_fake_gpus(2)
def test_replays(rank, world, graph):
    graphs.GRAPHS["fakegpu"] = graph
    told = []
    graphs.replay(rank_here(told), 100)
    if rank == 0:
        (line,) = told
        kinds = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "computing between")
        assert (line["served"], tuple(line["refused"])) == ((list(kinds), ()) if graph is Again else ([], kinds))
        state, why = uses_main.refusals(told)
        assert state == ("passed" if graph is Again else "skipped")
        assert why == "" or why.endswith("computing between: this stream is being captured, which is refused")


@on_fake_gpus(2)
def test_a_replay_that_does_nothing_is_found(rank, world):
    graphs.GRAPHS["fakegpu"] = Stale
    with pytest.raises(AssertionError, match="all_reduce, replay 0"):
        graphs.replay(rank_here([]), 100)
    graphs.SLEEPS["fakegpu"] = lambda rank: None
    with pytest.raises(AssertionError, match="graphs, then eager, rank 0 late, tensor 0"):
        graphs.across_streams(rank_here([]), 100)


@on_fake_gpus(2)
def test_captures_that_are_refused_are_not_tried_across_streams(rank, world):
    graphs.GRAPHS["fakegpu"] = Refused
    told = []
    graphs.across_streams(rank_here(told), 100)
    assert rank != 0 or uses_main.refusals(told)[0] == "skipped"


class Captured:
    """A graph of the accelerator's own."""

    def __init__(self, run):
        with captured() as graph:
            run()
        self.replay = graph.replay


def be_late(rank):
    fake_device.slow_fill(torch.empty(1, device=rank.device), 0, 200)


@on_played_gpus(2)
def test_graphs_and_calls_keep_their_order_across_streams_by_kernels(rank, world):
    graphs.GRAPHS["fakegpu"], graphs.SLEEPS["fakegpu"] = Captured, be_late
    told = []
    graphs.across_streams(rank_here(told), 100)
    if rank == 0:
        (line,) = told
        assert line["across_streams"] == ["graphs, then eager", "eager, then graphs"] and not line["refused"]


@on_played_gpus(2, 3)
def test_messages_cross_a_collective_that_waits_by_kernels(rank, world):
    graphs.crossed(rank_here([]), 1000)


@on_played_gpus(2)
def test_replayed_graphs_are_timed(rank, world):
    graphs.GRAPHS["fakegpu"] = Captured
    told = []
    graphs.replay_time(rank_here(told), sizes=(64, 4096), times=2, rounds=2)
    if rank == 0:
        assert [(line["replayed"], line["ranks"], line["bytes"]) for line in told] == [
            ("all_reduce", 2, 64),
            ("all_reduce", 2, 4096),
        ]
        assert all(line["us"] > 0 for line in told)


@on_fake_gpus(2)
def test_a_replay_that_was_refused_has_no_time(rank, world):
    graphs.GRAPHS["fakegpu"] = Refused
    told = []
    graphs.replay_time(rank_here(told))
    assert rank != 0 or [line["refused"] for line in told] == [
        {"all_reduce": "this stream is being captured, which is refused"}
    ]
    assert rank != 0 or uses_main.refusals(told)[0] == "skipped"


@on_fake_gpus(2)
def test_a_timed_replay_that_does_nothing_is_found(rank, world):
    graphs.GRAPHS["fakegpu"] = Stale
    with pytest.raises(AssertionError, match="64 bytes, after so many replays"):
        graphs.replay_time(rank_here([]), sizes=(64,), times=1, rounds=1)


@pytest.mark.parametrize(("total", "refused"), [(2.0, ""), (3.0, ""), (2.0, "not in a capture")])
def test_torchs_replays_are_told_refused_or_found_wrong(monkeypatch, capsys, total, refused):
    """Symmetric memory needs a device: here all that is of CUDA is played."""
    calls = []

    def one_shot(buffer, op, group):
        if refused:
            raise RuntimeError(refused)
        calls.append(op)
        return torch.full_like(buffer, total)

    space = types.SimpleNamespace
    cuda = space(CUDAGraph=lambda: space(replay=lambda: None), graph=contextlib.nullcontext, synchronize=lambda: None)
    ops = space(symm_mem=space(one_shot_all_reduce=one_shot))
    played = space(cuda=cuda, ops=ops, all=torch.all)
    group = space(WORLD=space(group_name="0"))
    job = space(group=group, barrier=lambda: None)
    monkeypatch.setattr(workers, "hear", lambda mine: [mine] * 2)
    monkeypatch.setattr(workers, "event_time_us", lambda torch, call, times: 40.0)
    arguments = argparse.Namespace(rank=0, ranks=2)
    with pytest.raises(RuntimeError, match="wrong sum") if total != 2 else contextlib.nullcontext():
        workers.tell_replays(arguments, played, job, torch.zeros(16), 64)
    told = capsys.readouterr().out
    if refused:
        assert json.loads(told) == {"part": "symm_mem", "left_out": "a graph, 64 bytes", "why": refused}
    elif total == 2:
        assert len(calls) == json.loads(told)["operations"] == 20 and json.loads(told)["us"] == 2.0


def test_replays_are_not_timed_where_ranks_take_turns():
    lines, code = start("replay_time", "--gpus", "1")
    assert code == 0 and lines[-1]["end"] == "skipped" and lines[-1]["why"] == workers.TURNS


@on_fake_gpus(2)
def test_gradients_that_are_not_averaged_are_found(rank, world):
    here = rank_here([])
    made = training.DistributedDataParallel

    def wrong(*given, **named):
        model = made(*given, **named)

        def only_summed(_, bucket):
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        model.register_comm_hook(None, only_summed)
        return model

    training.DistributedDataParallel = wrong
    try:
        with pytest.raises(AssertionError, match="against one process"):
            training.ddp_case(here)
    finally:
        training.DistributedDataParallel = made


@on_fake_gpus(2)
def test_ranks_that_differ_are_found(rank, world):
    with pytest.raises(AssertionError, match="do not have the same bits"):
        rank_here([]).agree([torch.full((3,), rank)], "weights")


@contextlib.contextmanager
def fake_calls(rank):
    """What is asked of the fake accelerator, as CUDA would be."""
    reset_counts()
    seen = Counter({"cudaLaunchKernel": 20})
    yield seen
    found = counts()
    syncs = ("stream_syncs", "event_syncs", "device_syncs")
    seen["cudaStreamSynchronize"] += sum(found[one] for one in syncs)
    seen["cudaHostAlloc"] += found["pinned_allocations"] + found["device_allocations"]
    seen += Counter()  # without what is 0


@on_fake_gpus(2)
def test_calls_that_wait_are_found(rank, world):
    """As those do that go through host memory."""
    figures.WATCHES["fakegpu"] = fake_calls
    with pytest.raises(AssertionError, match="all_reduce: 20 calls (waited|took memory)"):
        figures.per_call(rank_here([]))


@on_played_gpus(2)
def test_calls_by_kernels_wait_for_nothing(rank, world):
    figures.WATCHES["fakegpu"] = fake_calls
    figures.per_call(rank_here([]))


def test_what_calls_ask_of_cuda_is_judged():
    fine = {"cudaLaunchKernel": 20, "cudaEventRecordWithFlags": 40, "cudaStreamWaitEvent": 40, "cudaMemcpyAsync": 1}
    assert figures.breach(20, fine, 0) == ""
    assert "19 launches" in figures.breach(20, fine | {"cudaLaunchKernel": 19}, 0)
    for call in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuCtxSynchronize", "cudaMemcpy"):
        assert "waited" in figures.breach(20, fine | {call: 1}, 0), call
    for call in ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemAlloc_v2"):
        assert "took memory" in figures.breach(20, fine | {call: 1}, 0), call
    assert "allocator 3 times" in figures.breach(20, fine, 3)


def start(*arguments, code="", hiding=""):
    """The command's own ranks, over nvx and tensors of the CPU; what it has said, and how it ended. hiding: a folder
    that is looked into first."""
    what = ["-c", code] if code else ["-m", "nvx.gpucheck.uses"]
    command = [sys.executable, *what, *arguments]
    path = os.pathsep.join(filter(None, [str(hiding), str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    surroundings = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=surroundings)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stdout + done.stderr
    return lines, done.returncode


def test_a_part_with_ranks_of_its_own():
    lines, code = start("pipeline", "--device", "cpu", "--ranks", "3", "--module", str(nvx._load().__file__))
    assert code == 0 and lines[-1]["end"] == "passed" and lines[-1]["tried"] == len(PARTS["pipeline"]), lines
    assert {line["part"] for line in lines} == {"pipeline"}


@pytest.fixture
def without_numpy(tmp_path):
    """A folder that hides numpy from processes that look into it first."""
    hides = tmp_path / "numpy"
    hides.mkdir()
    (hides / "__init__.py").write_text("raise ModuleNotFoundError('numpy is hidden')\n")
    return tmp_path


@pytest.mark.parametrize("part", ["ddp", slow("fsdp1"), slow("dtensor"), slow("staging")])
def test_parts_do_without_numpy(part, without_numpy):
    module = str(nvx._load().__file__)
    lines, code = start(part, "--device", "cpu", "--ranks", "2", "--module", module, hiding=without_numpy)
    assert code == 0 and lines[-1]["end"] == "passed", lines
    assert lines[-1]["tried"] == len(PARTS[part])


@pytest.mark.parametrize("part", surroundings.WITH_NUMPY)
def test_parts_that_cannot_say_so(part, without_numpy):
    lines, code = start(part, "--device", "cpu", hiding=without_numpy)
    assert code == 0 and (lines[-1]["end"], lines[-1]["why"]) == ("skipped", surroundings.NO_NUMPY), lines


@on_ranks(3)
def test_what_ranks_tell_each_other_arrives(rank, world):
    mine = {"rank": rank, "text": "\u00fc" * 100 * rank, "pair": (1.5, None)}
    told = exchange.gather(mine)
    assert told == [{"rank": r, "text": "\u00fc" * 100 * r, "pair": [1.5, None]} for r in range(world)]


def test_the_bytes_of_a_tensor_are_those_in_its_order():
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert exchange.bytes_of(tensor.t()) == tensor.t().contiguous().numpy().tobytes()
    assert exchange.bytes_of(tensor[1:, 1:]) == tensor[1:, 1:].contiguous().numpy().tobytes()
    assert exchange.bytes_of(torch.empty(0)) == b""


BAD_RANKS = """
import os, time, json, sys
from nvx.gpucheck.uses.ranks import Layout, run_ranks
def fails(rank):
    if rank.number == 1:
        raise ValueError("a wrong sum")
    rank.hear(1)
def dies(rank):
    if rank.number == 1:
        os._exit(3)
    rank.hear(1)
def hangs(rank):
    time.sleep(600 if rank.number == 1 else 0)
for bad, seconds in ((fails, 60), (dies, 60), (hangs, 5)):
    began = time.monotonic()
    found = run_ranks(Layout("cpu", 2, 1, "", began + seconds), {bad.__name__: bad}, lambda **fields: None)
    print(json.dumps({bad.__name__: found.why, "seconds": time.monotonic() - began}), flush=True)
"""


LATE_RANKS = """
import json, time
from nvx.gpucheck.uses import ranks
init = ranks.dist.init_process_group
def late(*given, **named):
    init(*given, **named)
    time.sleep(3)
ranks.dist.init_process_group = late
def case(rank):
    rank.say(end=rank.end)
until = time.monotonic() + 20
found = ranks.run_ranks(ranks.Layout("cpu", 2, 1, "", until), {"case": case}, lambda **told: print(json.dumps(told)))
print(json.dumps({"why": found.why, "until": until}), flush=True)
"""


def test_ranks_that_are_late_end_no_later():
    """Their own end is before that of who started them, however long they took to begin."""
    lines, code = start(code=LATE_RANKS)
    until = lines[-1]["until"]
    assert code == 0 and lines[-1]["why"] == "", lines
    assert until - 3 < next(line["end"] for line in lines if "end" in line) < until - 1


def test_workers_that_are_late_end_no_later(monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: time.sleep(0.1))
    monkeypatch.setattr(workers, "collective", lambda arguments, torch, dist, device, end: found.append(end))
    monkeypatch.setattr(workers.os, "_exit", found.append)
    workers.main(["gloo", "--until", "1000", "--rank", "0", "--ranks", "1", "--meet", "nowhere"])
    assert found == [1000 - workers.OWN_END, 0]


def test_a_part_for_which_no_time_was_left_is_skipped():
    """As where torch took all of it to import."""
    end = str(time.monotonic() + 1)
    lines, code = start("ddp", "--device", "cpu", "--module", str(nvx._load().__file__), "--until", end)
    assert code == 0 and (lines[-1]["end"], lines[-1]["why"]) == ("skipped", "there was no time for it")


@pytest.mark.slow
def test_ranks_that_fail_die_and_hang():
    (fails, dies, hangs), code = start(code=BAD_RANKS)
    assert code == 0
    assert fails["fails"] == "rank 1: fails: ValueError: a wrong sum" and fails["seconds"] < 40
    assert dies["dies"] == "rank 1: its process ended with code 3" and dies["seconds"] < 40
    assert "had not ended in time" in hangs["hangs"] and hangs["seconds"] < 40


def test_without_a_gpu_it_is_said():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    lines, code = start("ddp")
    assert code == 0 and lines[-1]["end"] == "skipped" and lines[-1]["why"].startswith("there is no GPU here: ")


def test_torchs_own_tests_are_judged():
    told = []
    one = {"test": "test_a", "one": "gpu", "outcome": "passed", "text": "", "seconds": 1.0}
    late = one | {"outcome": "skipped", "text": "time ran out"}
    assert torch_tests.judge([one, late], 0, lambda **fields: told.append(fields)) == torch_tests.Ended(
        "passed", "1 of 2 were left out for want of time", 1
    )
    assert told == [{"passed": ["test_a"], "skipped": {"time ran out": 1}}]
    failed = torch_tests.judge([one, one | {"outcome": "failed", "text": "why"}], 1, lambda **fields: None)
    assert (failed.state, failed.tried, failed.failed) == ("failed", 2, 1)
    assert torch_tests.judge([late], 1, lambda **fields: None).state == "failed"


@pytest.mark.slow
def test_torchs_own_tests_on_a_device_that_ranks_share(monkeypatch, tmp_path):
    """Without expecttest, of which torch's test utilities take a few lines that nvx has too."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['expecttest'] = None\n")
    monkeypatch.setattr(torch_tests, "PASSES", ("gpu",))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PACKAGE), str(ROOT / "tests" / "torch")]))
    fake_device.build()
    told = []
    module = str(nvx._load().__file__)
    asked = argparse.Namespace(
        source=str(ROOT), ranks=2, device=fake_device.NAME, until=time.monotonic() + 200, module=module
    )
    names = ["test_ddp_join_model_equivalence", "test_ddp_zero_output_features", "test_DistributedDataParallelCPU"]
    more = [word for name in names for word in ("--exact", name)]
    ended = torch_tests.run(
        asked, 2, lambda **fields: told.append(fields), "--import", "fake_device.for_conformance", *more
    )
    assert (ended.state, ended.tried) == ("passed", 2), told
    assert told[0]["passed"] == names[:2], "the last one asks for no GPU"
