"""What `nvx gpucheck` makes of its figures: targets, tables, and files of several calls as one."""

import json
import re

import pytest
from gpucheck_runs import ONE_GPU, states
from nvx.commands import gpucheck
from nvx.gpucheck import join, judge, lines, run, table


def bench_line(algorithm, size, us, ranks=8, blocks=4):
    return {
        "bench": "all_reduce", "algorithm": algorithm, "ranks": ranks, "blocks": blocks, "bytes": size, "launch_us": us,
        "inside_us": us / 2,
    }  # fmt: skip


def rounds_line(two, blocks=4):
    return {
        "control": "flag_round", "ranks": 8, "blocks": blocks, "launch_0_us": 2.0, "launch_2_us": two, "round_us": 1.0
    }  # fmt: skip


def document_of(**lines):
    outcome = {part: run.Outcome("passed", lines=found).as_json() for part, found in lines.items()}
    return {"parts": outcome, "targets": [], "command": "nvx gpucheck", "when": "now", "versions": {}}


START = {"start": "processes", "ranks": 8, "arena_bytes": 64 << 20, "init_ms": 90.0}
COPY = {"copy": "device_to_device", "bytes": 256 << 20, "us": 150.0, "gb_s": 1800.0}


def verdicts(document, *checks):
    return [check(document).state for check in checks]


FUSED = (judge._one_shot, judge._two_shot, judge._arena, judge._init)


def test_targets_are_judged():
    fast = [rounds_line(6.0), rounds_line(9.0, 8), *(bench_line("one_shot", n, 5.0) for n in (8, 1024, 16 << 10))]
    ideal_us = judge.moved_bytes(16 << 20, 8)[0] / (2 * 1800e9) * 1e6
    chunks = [bench_line("chunks", 16 << 20, ideal_us / 0.85), bench_line("chunks", 16 << 20, 9e9, blocks=8)]
    good = document_of(bench=fast + chunks, copies=[COPY], processes=[START])
    assert verdicts(good, *FUSED) == ["met"] * 4
    slow = [rounds_line(6.0), bench_line("one_shot", 8, 5.0), bench_line("one_shot", 16 << 10, 6.1)]
    chunks = [bench_line("chunks", 16 << 20, ideal_us / 0.75)]
    late = START | {"init_ms": 201.0, "arena_bytes": (64 << 20) + 1}
    assert verdicts(document_of(bench=slow + chunks, copies=[COPY], processes=[START, late]), *FUSED) == ["missed"] * 4
    nothing = document_of(bench=slow[:2], processes=[])
    assert {verdict.state for verdict in judge.judge(nothing)} == {"not measured"}


def test_processes_under_mps_are_judged_beside_torchs():
    def judged(ours, theirs, mps=True, ranks=8):
        sizes = (64, 4096, 16 << 10, 64 << 10)
        found = {
            part: [bench_line("one_shot", n, us, ranks) for n, us in zip(sizes, times, strict=False)]
            for part, times in (("bench_processes", ours), ("symm_mem", theirs))
        }
        found["symm_mem"] += [bench_line("two_shot", n, 0.1, ranks) for n in sizes]
        document = document_of(**found)
        for part in document["parts"].values():
            part["mps"] = mps
        return judge._under_mps(document)

    assert judged((5, 5, 5, 99), (6, 6, 6, 6)).state == "met"  # beyond 16 KiB nothing was promised
    missed = judged((5, 6.5, 5), (6, 6, 6))
    assert missed.state == "missed" and missed.measured == "6.50 us at 4096 B, torch's 6.00 us"
    assert judged((6, 5, 5), (6, 6, 6)).state == "missed"
    assert judged((5, 5, 5), (6, 6, 6), mps=False).state == "not measured"
    assert judged((5, 5), (6, 6, 6)).state == "not measured"
    assert judged((5, 5, 5), (6, 6, 6), ranks=4).state == "not measured"


def test_the_hosts_time_is_judged():
    lines = [{"host": "an empty launch", "us": 2.0}, {"host": "all_reduce", "us": 5.9, "over_launch_us": 3.9}]
    met = judge._host_time(document_of(host_time=lines))
    assert met.state == "met" and met.measured == "3.90 us: all_reduce"
    slow = {"host": "broadcast", "us": 6.0, "over_launch_us": 4.0}
    document = document_of(host_time=[*lines, slow])
    assert verdicts(document, judge._host_time) == ["missed"]
    document["parts"]["host_time"]["state"] = "failed"
    assert verdicts(document, judge._host_time) == ["not measured"]


def test_replays_are_judged_beside_torchs():
    def judged(ours, theirs, **more):
        found = {
            part: [{"replayed": "all_reduce", "ranks": 2, "bytes": n, "us": us} | more for n, us in times.items()]
            for part, times in (("replay_time", ours), ("symm_mem", theirs))
        }
        document = document_of(**found)
        return judge._replayed(document), table.markdown(document)

    verdict, text = judged({64: 5.0, 4096: 6.0}, {64: 5.0, 1 << 20: 1.0})
    assert verdict.state == "met" and "| 2 | 64 B | 5.0 | 5.0 |" in text and "| 2 | 1 MiB | - | 1.0 |" in text
    verdict, _ = judged({64: 5.0, 4096: 6.1}, {64: 5.0, 4096: 6.0})
    assert verdict.state == "missed" and verdict.measured == "6.10 us at 4096 B, torch's 6.00 us"
    assert judged({64: 5.0}, {4096: 6.0})[0].state == "not measured"
    assert judged({64: 5.0}, {64: 6.0}, ranks=8)[0].state == "not measured"
    assert verdicts(document_of(), judge._replayed) == ["not measured"]


def test_a_step_is_judged_beside_gloos():
    def judged(nvx, gloo, copies=(), gpus=ONE_GPU, **more):
        step = {"step": "DDP", "ranks": 2, "gradient_bytes": 10_000_000, "nvx_ms": nvx, "gloo_ms": gloo} | more
        return judge._step(document_of(training=[step], copies=list(copies)) | {"gpus": gpus})

    ways = [{"copy": way, "bytes": 16 << 20, "gb_s": 10.0} for way in ("device_to_host", "host_to_device")]
    ways += [{"copy": "device_to_host", "bytes": 8, "gb_s": 0.1}]
    assert judged(3.0, 5.0, ways).state == "met" and "the copies are 2.00 ms" in judged(3.0, 5.0, ways).measured
    assert judged(3.1, 5.0, ways).state == "missed"
    assert judged(4.9, 5.0).state == "met" and "were not measured" in judged(4.9, 5.0).measured
    assert judged(5.0, 5.0).state == "missed"
    assert judged(3.0, 5.0, ranks=4).state == judged(3.0, 5.0, gpus=ONE_GPU * 2).state == "not measured"
    assert verdicts(document_of(), judge._step) == ["not measured"]


def test_what_an_all_reduce_moves():
    assert judge.moved_bytes(800, 1) == (1600.0, 1600.0)  # read once, written once
    assert judge.moved_bytes(800, 8) == (800 * 8 * 5.5, 800 * 16.0)


def test_the_tables_show_every_figure(tmp_path, capsys):
    facts = [{"gpu": 0, "name": "Imagined", "processors": 132}]
    torchs = [bench_line("one_shot", 1024, 11.0, ranks=2), bench_line("two_shot", 1024, 12.0, ranks=2)]
    document = document_of(facts=facts, bench=[rounds_line(6.0), bench_line("one_shot", 1024, 4.321)], symm_mem=torchs)
    document["targets"] = [verdict.as_json() for verdict in judge.judge(document)]
    text = table.markdown(document)
    assert "Imagined (132 processors)" in text
    assert "| 1 KiB | 4.3 (4) | - | - | 2.2 | - |" in text
    assert "| 2 | 1 KiB | 11.0 | 12.0 |" in text
    assert "of 2 6.0 us" in text
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document | {"schema": 1, "what": "gpucheck"}))
    assert gpucheck.main(["--table", str(file)]) == 0
    assert capsys.readouterr().out.strip() == text
    file.write_text(json.dumps(document | {"schema": 1, "what": "targets"}))
    assert gpucheck.main(["--table", str(file)]) == 2


def test_files_of_several_calls_are_judged_together(tmp_path, capsys):
    head = {"schema": 1, "what": "gpucheck", "gpus": ONE_GPU, "driver": "1", "minutes": 4.0}
    calls = [{"host": "all_reduce", "us": 5.9, "over_launch_us": 3.9}]
    skipped = run.Outcome("skipped", "time ran out").as_json()
    first, again = document_of(host_time=calls, facts=[]) | head, document_of(processes=[START], correct=[]) | head
    first["parts"]["correct"], again["parts"]["facts"] = skipped, skipped
    files = [tmp_path / "first.json", tmp_path / "again.json"]

    def table_of(*documents):
        for file, document in zip(files, documents, strict=True):
            file.write_text(json.dumps(document))
        return gpucheck.main(["--table", *map(str, files), "-J", str(tmp_path / "whole.json")])

    assert table_of(again, first) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert list(whole["parts"]) == ["facts", "correct", "processes", "host_time"]
    assert set(states(whole).values()) == {"passed"} and whole["minutes"] == 8.0
    assert [target["state"] for target in whole["targets"]].count("met") == 3
    assert "| set-up beyond CUDA's own: under 200 ms | met |" in capsys.readouterr().out
    assert table_of(first, again | {"driver": "2"}) == 2
    assert "differ in their driver: 1 and 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torch", "nvx", "commit", "cuda", "nccl", "nvcc", "compiler"])
def test_files_of_other_versions_are_not_judged_together(name):
    one, other, silent = (document_of() | {"versions": versions} for versions in ({name: "1"}, {name: "2"}, {}))
    with pytest.raises(ValueError, match=f"differ in their {name}: 1 and 2"):
        join.join([one, silent, other])
    assert "doubts" not in join.join([one, one])
    assert join.join([silent, one])["doubts"] == [f"not all of the files say their {name}: 1 is that of the others"]


def test_files_of_changed_sources_are_doubted(tmp_path, capsys):
    head = {"schema": 1, "what": "gpucheck", "versions": {"commit": "1", "dirty": True}}
    files = [tmp_path / "first.json", tmp_path / "again.json"]
    for file in files:
        file.write_text(json.dumps(document_of(facts=[]) | head))
    assert gpucheck.main(["--table", *map(str, files)]) == 0
    assert "the sources differ from their commit" in capsys.readouterr().err


def test_the_tables_of_torchs_parts():
    training = [
        {"step": "DDP", "ranks": 2, "gradient_bytes": 16 << 20, "nvx_ms": 3.21, "gloo_ms": 40.0, "alone_ms": 2.5}
    ]
    host = [{"host": "an empty launch", "us": 2.0}, {"host": "all_reduce", "us": 7.5, "over_launch_us": 5.5}]
    seen = {"cudaLaunchKernel": 20, "cudaEventRecord": 40}
    profile = [{"profile": "all_reduce", "calls": 20, "seen": seen, "device_allocations": 0}]
    graphs = [{"graphs": 4000, "served": ["all_reduce"], "refused": {"broadcast": "not yet"}}]
    line = {"pool": "all_gather", "piece_bytes": 1 << 20, "direct_pieces": 2, "staging_bytes_saved": 2 << 20}
    pools = [line | {"ordinary_ms": 1.5, "pool_ms": 1.25}, {"pool": "FSDP2, 4 steps", "direct_pieces": 9}]
    document = document_of(training=training, host_time=host, profile=profile, replay=graphs, pools=pools)
    document["targets"] = [verdict.as_json() for verdict in judge.judge(document)]
    assert judge._calls(document).state == "met"
    text = table.markdown(document)
    assert "| kernels | 2 | 16 MiB | 3.2 | 40.0 | 2.5 |" in text
    assert "| all_reduce | 7.5 | 5.5 | 2 cudaEventRecord, 1 cudaLaunchKernel |" in text
    assert "| 3 KiB | all_reduce | broadcast: not yet |" in text
    assert re.search(r"\| all_gather \| 1 MiB \| 2 MiB \| 1.5\d* \| 1.2\d* \|", text), text
    document["parts"]["profile"] |= {"state": "failed", "why": "20 calls waited"}
    assert judge._calls(document).state == "missed"


EVERY_LINE = {
    "facts": [{"gpu": 0, "name": "Imagined", "processors": 132}],
    "bench": [
        rounds_line(6.0), bench_line("one_shot", 8, 5.0), bench_line("one_shot", 16 << 10, 5.0),
        bench_line("chunks", 16 << 20, 90.0), {"part": "bench", "end": "passed", "tried": 3, "failed": 0},
    ],
    "copies": [COPY, *({"copy": way, "bytes": 8, "gb_s": 1.0} for way in ("device_to_host", "host_to_device"))],
    "processes": [START],
    "bench_processes": [START, bench_line("one_shot", 16 << 10, 5.0)],
    "symm_mem": [bench_line("one_shot", 16 << 10, 5.0), {"replayed": "all_reduce", "ranks": 2, "bytes": 64, "us": 5.0}],
    "replay_time": [{"replayed": "all_reduce", "ranks": 2, "bytes": 64, "us": 5.0}],
    "host_time": [{"host": "all_reduce", "us": 5.9, "over_launch_us": 3.9}],
    "profile": [{"profile": "all_reduce", "calls": 20, "seen": {"cudaLaunchKernel": 20}, "device_allocations": 0}],
    "replay": [{"graphs": 4000, "served": ["all_reduce"], "refused": {"broadcast": "not yet"}}],
    "training": [{"step": "DDP", "ranks": 2, "gradient_bytes": 8, "nvx_ms": 3.2, "gloo_ms": 40.0, "alone_ms": 2.5}],
    "pools": [
        {"pool": "all_gather", "piece_bytes": 8, "staging_bytes_saved": 8, "ordinary_ms": 1.5, "pool_ms": 1.2},
    ],
}  # fmt: skip


@pytest.mark.parametrize("odd", [None, "x", [], {}, True, 0, -1, 0.5, float("inf"), float("nan"), [[1]], "absent"])
def test_no_odd_figure_is_more_than_not_measured(odd):
    """In any place of any line."""
    whole = document_of(**EVERY_LINE)
    for part in whole["parts"].values():
        part["mps"] = True
    assert "not measured" not in {verdict.state for verdict in judge.judge(whole)}
    for part, found in EVERY_LINE.items():
        for number, line in enumerate(found):
            for name in line:
                changed = {key: value for key, value in line.items() if key != name}
                changed |= {} if odd == "absent" else {name: odd}
                told = [*found[:number], changed, *found[number + 1 :]]
                document = whole | {"parts": whole["parts"] | {part: whole["parts"][part] | {"lines": told}}}
                document["targets"] = [verdict.as_json() for verdict in judge.judge(document)]
                assert table.markdown(document)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a": ' * 100_000, '{"a":' + "[" * 100 + "]" * 100 + "}", "[1]", "1"])
def test_what_is_no_object_or_too_deep_is_no_line(line):
    assert lines.read(line) is None
