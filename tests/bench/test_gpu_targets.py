"""bench/gpu_targets.py: a target is met, missed, or not measured, for any contents of the file."""

import json

import gpu_targets
import pytest


def in_graph(algorithm, size, us, ranks=8):
    return {"bench": "all_reduce", "algorithm": algorithm, "ranks": ranks, "bytes": size, "graph_us": us}


def of_processes(algorithm, size, us, ranks=8):
    return {"bench": "all_reduce", "algorithm": algorithm, "ranks": ranks, "bytes": size, "launch_us": us}


def rounds(us):
    return {"control": "flag_round", "ranks": 8, "launch_2_us": us + 3.0, "graph_2_us": us}


def swept(backend, **times):
    return [{"backend": backend, "size": int(size[1:]), "time_us": us} for size, us in times.items()]


def of_gpus(size, us, busbw=0.0, backend="nvx"):
    row = {"backend": backend, "collective": "all_reduce", "ranks": 8, "size": size, "time_us": us}
    return row | {"busbw": busbw}


def document_of(**rows):
    parts = {part: {"state": "passed", "why": "", "mps": True, "rows": found} for part, found in rows.items()}
    return {"parts": parts, "commit": "0" * 40, "when": "now", "dry_run": False}


COPY = {"copy": "device_to_device", "bytes": 256 << 20, "gb_s": 1800.0}
START = {"start": "processes", "ranks": 8, "arena_bytes": 64 << 20, "init_ms": 90.0}
STEP = [
    {"kind": "ddp", "backend": name, "time_us": us, "gradient_bytes": 10_000_000}
    for name, us in (("nvx", 3e3), ("gloo", 5e3))
]
ONE_EACH = [
    *(of_gpus(size, us) for size, us in ((8, 5.9), (16 << 10, 6.0), (256 << 10, 9.0), (1 << 20, 14.0))),
    of_gpus(256 << 20, 1400.0, 335.0),
    of_gpus(256 << 20, 1300.0, 360.0, "nccl"),
]
GOOD = {
    "bench": [rounds(6.0), *(in_graph("one_shot", n, 5.0) for n in (8, 16 << 10)), in_graph("chunks", 16 << 20, 190.0)],
    "copies": [COPY, *(COPY | {"copy": way, "gb_s": 10.0} for way in ("device_to_host", "host_to_device"))],
    "two_processes": [START],
    "bench_processes": [of_processes("one_shot", 16 << 10, 5.0)],
    "symm_mem_8": swept("symm_mem", n16384=5.5),
    "symm_mem_graphs": [*swept("nvx", n64=5.0), *swept("symm_mem", n64=5.0)],
    "torch_calls": [{"profile": "all_reduce", "calls": 20}, {"host": "all_reduce", "over_launch_us": 3.9}],
    "train": STEP,
    "one_each": ONE_EACH,
}


def states(**changed):
    found = gpu_targets.judge(document_of(**(GOOD | changed)))
    return {check.__name__: verdict.state for check, verdict in zip(gpu_targets.CHECKS, found, strict=True)}


def test_all_are_met():
    assert set(states().values()) == {"met"}


def test_without_figures_nothing_is_measured():
    assert {one.state for one in gpu_targets.judge(document_of())} == {"not measured"}


@pytest.mark.parametrize(
    ("name", "part", "rows"),
    [
        ("one_shot", "bench", [rounds(6.0), in_graph("one_shot", 8, 5.0), in_graph("one_shot", 16 << 10, 6.1)]),
        ("two_shot", "bench", [in_graph("chunks", 16 << 20, 260.0)]),
        ("arena", "processes", [START | {"arena_bytes": (64 << 20) + 1}]),
        ("init", "processes", [START | {"init_ms": 201.0}]),
        ("under_mps", "symm_mem_8", swept("symm_mem", n16384=5.0)),
        ("replayed", "symm_mem_graphs", [*swept("nvx", n64=5.1, n4096=1), *swept("symm_mem", n64=5.0, n4096=2)]),
        ("host_time", "torch_calls", [{"host": "broadcast", "over_launch_us": 4.0}]),
        ("bus_bandwidth", "one_each", [of_gpus(256 << 20, 1500.0, 329.0), of_gpus(64 << 20, 300.0, 340.0)]),
        ("latency", "one_each", [*ONE_EACH[:3], of_gpus(1 << 20, 15.1)]),
        ("step", "train", [STEP[0], STEP[1] | {"time_us": 4.9e3}]),
    ],
)
def test_each_is_missed_by_a_figure_beyond_it(name, part, rows):
    assert states(**{part: rows})[name] == "missed"


def test_a_part_that_failed_is_no_measure():
    document = document_of(**GOOD)
    for part in ("torch_calls", "train"):
        document["parts"][part] |= {"state": "failed", "why": "20 calls waited"}
    document["parts"]["bench_processes"]["mps"] = False
    found = dict(zip((check.__name__ for check in gpu_targets.CHECKS), gpu_targets.judge(document), strict=True))
    assert (found["calls"].state, found["calls"].measured) == ("missed", "20 calls waited")
    assert {found[name].state for name in ("host_time", "step", "under_mps")} == {"not measured"}


def test_an_all_reduce_reads_and_writes_at_least_its_tensors():
    assert gpu_targets.moved_bytes(800, 1) == (1600.0, 1600.0)
    assert gpu_targets.moved_bytes(800, 8) == (800 * 8 * 5.5, 800 * 16.0)


@pytest.mark.parametrize("odd", [None, "x", [], {}, True, float("inf"), float("nan"), "absent"])
def test_an_odd_figure_counts_as_not_measured(odd):
    """The odd figure may be in any place of any row."""
    for part, found in GOOD.items():
        for at, row in enumerate(found):
            for name in row:
                changed = {key: value for key, value in row.items() if key != name}
                changed |= {} if odd == "absent" else {name: odd}
                assert len(states(**{part: [*found[:at], changed, *found[at + 1 :]]})) == len(gpu_targets.CHECKS)


def test_the_verdicts_of_a_file_are_printed(tmp_path, capsys):
    file = tmp_path / "found.json"
    file.write_text(json.dumps(document_of(**GOOD)))
    assert gpu_targets.main([str(file)]) == 0
    assert "met           set-up beyond CUDA's own: under 200 ms: 90 ms with 8 ranks" in capsys.readouterr().out
    assert gpu_targets.main([]) == 2
