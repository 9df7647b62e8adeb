"""The cases of `pytest -m gpu` on the fake accelerator: they pass on correct code and fail on injected errors."""

import contextlib
from collections import Counter

import fake_device
import pytest
import torch
import torch.distributed as dist
from fake_device import counts, reset_counts
from gpu import figures, graphs, messages, pools, proxy, training, visible
from gpu.parts import EXPANDABLE, PARTS, RELAY, STAGED
from gpu.rank import Rank, bytes_of, close
from ranks import on_fake_gpus, on_gpus, on_proxied_gpus, on_ranks, on_simulated_gpus, one_host, only_nvx
from test_device import captured

pytestmark = [one_host, only_nvx]


class Again:
    """Simulates a graph: a replay calls the captured function again."""

    def __init__(self, run):
        self.replay = run


class Refused:
    def __init__(self, run):
        raise RuntimeError("this stream is being captured, which is refused\nand so on")


class Stale:
    """A graph whose replay does nothing."""

    def __init__(self, run):
        self.replay = lambda: None


def rank_here(reported=None):
    kind = "fakegpu" if fake_device._loaded else "cpu"
    return Rank(torch.device(kind, 0) if kind != "cpu" else torch.device(kind), reported)


def run(part, reported, *names):
    here = rank_here(reported)
    for name, case in PARTS[part][1].items():
        if not names or name in names:
            case(here)
            here.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ddp", "fsdp2", "dtensor", "pipeline"])
@on_fake_gpus(2)
def test_uses(rank, world, part):
    run(part, [], *(name for name in PARTS[part][1] if name != "large buckets"))  # they take long on the CPU


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
    run(part, [], next(iter(PARTS[part][1])))


@on_ranks(2)
def test_uses_of_the_cpu(rank, world):
    """Where gloo serves the tensors too, the bits must equal gloo's."""
    run("ddp", [], "small buckets", "unused parameters")
    run("fsdp1", [], "FULL_SHARD")


@pytest.mark.slow
@on_fake_gpus(2)
def test_compiled(rank, world):
    reported = []
    run("compile", reported)
    assert rank != 0 or {line["left_out_part"] for line in reported if "left_out_part" in line} == {"inductor"}


@on_fake_gpus(2)
def test_staging(rank, world):
    here = rank_here([])
    close(training.weights(training.train(here, training.ddp(here))), training.alone(here), "staged")


@on_ranks(2)
def test_host_times(rank, world):
    reported = []
    figures.host_time(rank_here(reported), calls=5, rounds=2)
    if rank == 0:
        launch, torch_alone, _, *calls = reported
        assert launch["host"] == "an empty launch" and torch_alone["host"] == "torch alone" and len(calls) == 5
        assert all(call["us"] > 0 for call in calls)


@on_simulated_gpus(2)
def test_messages_both_ways_beside_kernels(rank, world):
    reported = []
    messages.both_ways(rank_here(reported), sizes=(4096, 300_000), calls=2)
    assert [line["message"] for line in reported] == ([4096, 300_000] if rank == 0 else [])
    assert all(line["us"] > 0 and line["copy_us"] > 0 for line in reported)


@on_simulated_gpus(2)
def test_pools_beside_ordinary_tensors(rank, world):
    reported = []
    here = rank_here(reported)
    pools.beside_ordinary(here, counts=(1 << 19,), calls=2)
    pools.fsdp2(here)
    if rank == 0:
        *calls, training_report = reported
        assert [line["pool"] for line in calls] == ["all_gather", "reduce_scatter", "all_reduce"]
        for line in calls:
            assert line["direct_pieces"] >= 1 and line["ordinary_ms"] > 0 and line["pool_ms"] > 0, line
            assert line["staging_bytes_saved"] == line["direct_pieces"] * line["piece_bytes"], line
        assert training_report["direct_pieces"] > 0


@on_simulated_gpus(2)
def test_pools_that_save_nothing_are_found(rank, world):
    pools.pooled, kept = pools.ordinary, pools.pooled
    try:
        with pytest.raises(AssertionError, match="all_gather: pieces that went without staging, by rank: .0, 0."):
            pools.beside_ordinary(rank_here([]), counts=(1 << 19,), calls=1)
    finally:
        pools.pooled = kept


@on_fake_gpus(2)
def test_their_part_is_left_out_where_tensors_go_through_the_host(rank, world):
    reported = []
    pools.beside_ordinary(rank_here(reported))
    assert [line["left_out_part"] for line in reported] == (["pools"] if rank == 0 else [])


@on_proxied_gpus(4)
def test_proxies_by_kernels(rank, world):
    reset_counts()
    proxy.proxied(rank_here([]), asynchronous=False, counts=(proxy.COUNTS[0],))
    proxy.several(rank_here([]))
    proxy.others(rank_here([]), counts=(5, 70_001))
    proxy.host_goes_on(rank_here([]), count=70_001)
    assert counts()["launches"] >= 4


def test_each_rank_sees_the_devices_in_an_order_of_its_own():
    seen = [visible.order(number, 4, None) for number in range(5)]
    assert seen == ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2", "0,1,2,3"]
    assert visible.order(1, 2, "GPU-a, GPU-b") == "GPU-b,GPU-a"
    assert visible.order(1, 1, None) == "0"


def test_nested_parts_contain_only_cases_of_parts():
    cases = [case for _, part in PARTS.values() for case in part.values()]
    assert all(case in cases for part in (EXPANDABLE, STAGED) for case in part.values())
    assert len(RELAY) == 5


@pytest.mark.parametrize("graph", [Again, Refused])
@on_fake_gpus(2)
def test_replays(rank, world, graph):
    graphs.GRAPHS["fakegpu"] = graph
    reported = []
    graphs.replay(rank_here(reported), 100)
    if rank == 0:
        (line,) = reported
        kinds = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "computing between")
        assert (line["served"], tuple(line["refused"])) == ((list(kinds), ()) if graph is Again else ([], kinds))


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
    reported = []
    graphs.across_streams(rank_here(reported), 100)
    assert rank != 0 or (reported[0]["served"] == [] and reported[0]["refused"])


class Captured:
    """A graph of the fake accelerator."""

    def __init__(self, run):
        with captured() as graph:
            run()
        self.replay = graph.replay


def be_late(rank):
    fake_device.slow_fill(torch.empty(1, device=rank.device), 0, 200)


@on_simulated_gpus(2)
def test_graphs_and_calls_keep_their_order_across_streams_by_kernels(rank, world):
    graphs.GRAPHS["fakegpu"], graphs.SLEEPS["fakegpu"] = Captured, be_late
    reported = []
    graphs.across_streams(rank_here(reported), 100)
    if rank == 0:
        (line,) = reported
        assert line["across_streams"] == ["graphs, then eager", "eager, then graphs"] and not line["refused"]


@on_simulated_gpus(2, 3)
def test_messages_cross_a_collective_that_waits_by_kernels(rank, world):
    graphs.crossed(rank_here([]), 1000)


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
    """Counts the calls of the fake accelerator, in place of CUDA's."""
    reset_counts()
    seen = Counter({"cudaLaunchKernel": 20})
    yield seen
    found = counts()
    syncs = ("stream_syncs", "event_syncs", "device_syncs")
    seen["cudaStreamSynchronize"] += sum(found[one] for one in syncs)
    seen["cudaHostAlloc"] += found["pinned_allocations"] + found["device_allocations"]
    seen += Counter()  # drops zero counts


@on_fake_gpus(2)
def test_calls_that_wait_are_found(rank, world):
    """Calls that go through host memory wait, and the case reports them."""
    figures.WATCHES["fakegpu"] = fake_calls
    with pytest.raises(AssertionError, match="all_reduce: 20 calls (waited|took memory)"):
        figures.per_call(rank_here([]))


@on_simulated_gpus(2)
def test_calls_by_kernels_wait_for_nothing(rank, world):
    figures.WATCHES["fakegpu"] = fake_calls
    figures.per_call(rank_here([]))


def test_breach_names_waits_and_allocations_of_calls():
    fine = {"cudaLaunchKernel": 20, "cudaEventRecordWithFlags": 40, "cudaStreamWaitEvent": 40, "cudaMemcpyAsync": 1}
    assert figures.breach(20, fine, 0) == ""
    assert "19 launches" in figures.breach(20, fine | {"cudaLaunchKernel": 19}, 0)
    for call in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cuCtxSynchronize", "cudaMemcpy"):
        assert "waited" in figures.breach(20, fine | {call: 1}, 0), call
    for call in ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cuMemAlloc_v2"):
        assert "took memory" in figures.breach(20, fine | {call: 1}, 0), call
    assert "allocator 3 times" in figures.breach(20, fine, 3)


@on_ranks(3)
def test_all_gather_returns_the_values_of_all_ranks(rank, world):
    reported = rank_here().all_gather({"rank": rank, "text": "\u00fc" * 100 * rank, "pair": (1.5, None)})
    assert reported == [{"rank": r, "text": "\u00fc" * 100 * r, "pair": [1.5, None]} for r in range(world)]


def test_the_bytes_of_a_tensor_are_those_in_its_order():
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert bytes_of(tensor.t()) == tensor.t().contiguous().numpy().tobytes()
    assert bytes_of(tensor[1:, 1:]) == tensor[1:, 1:].contiguous().numpy().tobytes()
    assert bytes_of(torch.empty(0)) == b""


@on_gpus(2)
def a_test_on_gpus(rank, world):
    pass


class Reports:
    """A pool whose rank 0 returns these figures."""

    def __init__(self, figures):
        self.figures = figures

    def run(self, test, **given):
        assert given["backend"].startswith("cpu:nvx,cuda:nvx")
        return [self.figures, None]


@pytest.mark.parametrize(
    ("reported", "why"),
    [
        ([{"left_out_part": "pools", "why": "no kernels"}], "pools: no kernels"),
        ([{"served": ["broadcast"], "refused": {}}, {"us": 1.5}], ""),
        (None, ""),
    ],
)
def test_gpu_test_that_cannot_run_is_skipped_with_the_reason(reported, why):
    with pytest.raises(pytest.skip.Exception, match=why) if why else contextlib.nullcontext():
        a_test_on_gpus(gpus=Reports(reported), world=2)


@pytest.mark.parametrize("served", [[], ["broadcast"]])
def test_gpu_test_fails_if_a_request_was_refused(served):
    with pytest.raises(AssertionError, match="not now"):
        a_test_on_gpus(gpus=Reports([{"served": served, "refused": {"all_reduce": "not now"}}]), world=2)
