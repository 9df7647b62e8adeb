"""The parts of the bench that need no ranks: sizes, factors, payloads, statistics, the printed table,
goals, the plot."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch")

import direct  # noqa: E402
import goals  # noqa: E402
import memory  # noqa: E402
import nvx.cli  # noqa: E402
import overlap  # noqa: E402
import plot  # noqa: E402
import results_file  # noqa: E402
import targets  # noqa: E402
from nvx.bench import (  # noqa: E402
    cli,
    collectives,
    contenders,
    machine,
    payload,
    report,
    runner,
    sizes,
    sweep,
)


@pytest.mark.parametrize(
    "text, size",
    [
        ("8", 8),
        ("64K", 65536),
        ("64k", 65536),
        ("1M", 1 << 20),
        ("1.5M", 3 << 19),
        ("2G", 2 << 30),
        ("4KiB", 4096),
        ("4611686018427387903", (1 << 62) - 1),  # no float
    ],
)
def test_sizes_are_read_as_nccl_tests_reads_them(text, size):
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-8", "8T", "0.3", "eight", "nan", "4611686018427387904"])
def test_malformed_size_is_refused(text):
    with pytest.raises(ValueError, match=r"size|bytes"):
        sizes.parse_size(text)


def test_sizes_are_shown_as_they_may_be_typed():
    assert [sizes.show_size(size) for size in (8, 4096, 3 << 19, 2 << 30)] == [
        "8 B",
        "4 KiB",
        "1.5 MiB",
        "2 GiB",
    ]
    for size in (8, 4096, 3 << 19, 64 << 20):
        assert sizes.parse_size(sizes.short_size(size)) == size


def test_a_scan_that_misses_its_end_is_reported():
    def complaint(*scanned, factor):
        return sizes.missed_end(sizes.scan(*scanned, factor=factor), scanned[1])

    assert complaint(8, 64 << 20, factor=8) == "64M is no step of this scan: the largest size is 16M"
    assert complaint(8, 100000, factor=2) == "100000 is no step of this scan: the largest size is 64K"
    assert complaint(8, 64 << 20, factor=2) == ""


def test_scan_by_factor_and_by_step():
    assert sizes.scan(8, 64 << 10, factor=8) == [8, 64, 512, 4096, 32768]
    assert sizes.scan(1 << 20, 4 << 20, step=1 << 20) == [n << 20 for n in (1, 2, 3, 4)]
    assert sizes.scan(8, 8, factor=2) == [8]
    assert sizes.scan(2, 9, factor=1.1) == [2, 3, 4, 5, 6, 7, 8, 9]  # each step advances
    with pytest.raises(ValueError, match="above the largest"):
        sizes.scan(16, 8, factor=2)
    with pytest.raises(ValueError, match="factor"):
        sizes.scan(8, 16, factor=1)


# Copied from the documentation of nccl-tests, not computed: name, ranks, busbw / algbw.
FACTORS = [
    ("all_reduce", 2, 1.0),
    ("all_reduce", 4, 1.5),
    ("all_reduce", 8, 1.75),
    ("all_gather", 2, 0.5),
    ("all_gather", 4, 0.75),
    ("reduce_scatter", 2, 0.5),
    ("reduce_scatter", 4, 0.75),
    ("all_to_all", 4, 0.75),
    ("gather", 4, 0.75),
    ("scatter", 8, 0.875),
    ("broadcast", 4, 1.0),
    ("reduce", 4, 1.0),
    ("sendrecv", 2, 1.0),
]


@pytest.mark.parametrize("name, ranks, factor", FACTORS)
def test_bus_bandwidth_factors(name, ranks, factor):
    algbw, busbw = collectives.bandwidth(collectives.find(name), 1 << 20, ranks, 1e-3)
    moved = 2 if name == "sendrecv" else 1  # a ping-pong moves the message twice
    assert algbw == pytest.approx(moved * (1 << 20) / 1e-3 / 1e9)
    assert busbw == pytest.approx(algbw * factor)


def test_every_collective_has_a_factor_in_the_table():
    assert {name for name, *_ in FACTORS} | {"barrier"} == set(collectives.COLLECTIVES)
    assert collectives.bandwidth(collectives.find("barrier"), 0, 4, 1e-3) == (0.0, 0.0)


def test_a_message_of_parts_holds_at_least_one_element_a_rank():
    assert collectives.elements(collectives.find("all_gather"), 8, 4, 4) == 4
    assert collectives.elements(collectives.find("all_to_all"), 100, 4, 4) == 24
    assert collectives.elements(collectives.find("all_reduce"), 8, 4, 4) == 2
    assert collectives.elements(collectives.find("barrier"), 8, 4, 4) == 0


def exact_reduction(op, rows):
    """Reduces one element at a time in Python's exact numbers."""
    out = []
    for column in zip(*rows, strict=True):
        result = column[0]
        for value in column[1:]:
            result = {
                "sum": result + value, "avg": result + value, "prod": result * value, "min": min(result,
                value), "max": max(result, value), "band": result & value, "bor": result | value, "bxor":
                result ^ value,
            }[op]  # fmt: skip
        out.append(result / len(rows) if op == "avg" else result)
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "name, op",
    [
        (name, op)
        for name, dtype in payload.DTYPES.items()
        for op in payload.OPS
        if name != "bool" and payload.meaningful(op, dtype)
    ],
)
def test_the_expected_result_is_exact(name, op, ranks):
    dtype = payload.DTYPES[name]
    rows = [payload.pattern(op, dtype, ranks, rank, salt=3)[:500].tolist() for rank in range(ranks)]
    got = payload.reduced(op, dtype, ranks, salt=3)[:500]
    wide = got.real if dtype.is_complex else got
    assert wide.double().tolist() == exact_reduction(op, rows)
    for rank, row in enumerate(rows):  # the inputs themselves are exact in the dtype
        held = payload.as_dtype(payload.pattern(op, dtype, ranks, rank, salt=3), dtype)[:500]
        assert (held.real if dtype.is_complex else held).double().tolist() == row


@pytest.mark.parametrize("ranks", [2, 3, 5, 9, 12, 17, 100])
def test_sums_of_many_ranks_stay_exact(ranks):
    """In any order, and in the type."""
    for dtype, op in itertools.product(set(payload.DTYPES.values()) - {torch.bool}, ("sum", "avg")):
        exact = payload._EXACT.get(dtype, 1 << 31)
        total = sum(payload.pattern(op, dtype, ranks, rank) for rank in range(ranks))
        assert 0 <= total.min() and total.max() <= exact, (dtype, op)
        assert total.max() > 0 or op == "avg" and ranks > exact, (dtype, op)


def test_patterns_of_ranks_and_salts_differ():
    seen = [payload.pattern("sum", torch.float32, 4, rank, salt) for rank in range(4) for salt in (1, 2)]
    for i, one in enumerate(seen):
        assert all((one != other).float().mean() > 0.9 for other in seen[:i])


@pytest.mark.parametrize("name", list(payload.DTYPES))
@pytest.mark.parametrize("count", [1, 7, payload.PERIOD, 2 * payload.PERIOD + 5])
def test_wrong_elements_are_counted_one_by_one(name, count):
    dtype = payload.DTYPES[name]
    period = payload.as_dtype(payload.pattern("sum", dtype, 2, 0), dtype)
    tensor = torch.zeros(count + 1, dtype=dtype)[1:]
    payload.fill(tensor, period, offset=3)
    assert payload.wrong(tensor, period, offset=3) == 0
    payload.poison(tensor[count // 2 : count // 2 + 1])
    assert payload.wrong(tensor, period, offset=3) == 1


def test_data_in_the_wrong_place_is_wrong():
    period = payload.pattern("sum", torch.float32, 2, 0).float()
    tensor = torch.zeros(4096)
    payload.fill(tensor, period)
    swapped = torch.cat([tensor[1024:2048], tensor[:1024], tensor[2048:]])
    assert payload.wrong(swapped, period) > 2000


def test_outputs_that_torch_leaves_undefined_are_not_checked():
    def expected(name, rank):
        return payload.expected(collectives.find(name), "sum", torch.float32, 3, rank, 1, 10, 0)

    assert expected("reduce", 0) is None and expected("reduce", 1) is not None
    assert expected("gather", 2) is None and len(expected("gather", 1)) == 3
    assert expected("sendrecv", 2) is None  # the rank has no neighbour
    assert expected("barrier", 0) is None


def test_blocks_have_no_fewer_calls_than_were_asked_for():
    effort = runner.Effort(blocks=7, iterations=10)
    assert runner._calls_per_block(None, None, effort) == 2
    assert sweep._shown_effort(effort) == "7 blocks of 2 iterations a contender, 1 warm-up calls a block"


def test_percentiles_are_nearest_rank():
    values = [float(value) for value in range(1, 101)]
    assert runner.percentile(values, 0.5) == 50
    assert runner.percentile(values, 0.99) == 99
    assert runner.percentile([7.0], 0.99) == 7
    timing = runner.summarize([2.0, 9.0, 3.0], values)
    assert (timing.time, timing.p50, timing.p99, timing.least, timing.most) == (3, 50, 99, 1, 100)
    assert timing.calls == 100


def result(backend="nvx", time=10.0, **rest):
    base = {
        "collective": "all_reduce", "size": 8, "count": 2, "type": "float", "redop": "sum", "root": -1,
        "ranks": 2, "variant": "in-place", "time_us": time, "p50_us": time, "p99_us": 2 * time, "min_us":
        time / 2, "max_us": 3 * time, "cv_percent": 5.0, "calls": 20, "blocks_us": [time, time * 1.1],
        "algbw": 1.0, "busbw": 1.0, "wrong": 0,
    }  # fmt: skip
    return {**base, "backend": backend, **rest}


def test_the_header_is_nccl_tests_and_the_row_stands_under_it():
    table = report.Table("nvx", ["gloo"], ("out-of-place", "in-place"), checked=True, per_call=False)
    top, names, units = table.header().splitlines()
    assert top.split() == ["#", "out-of-place", "in-place", "|", "gloo", "x", "nvx"]
    figures = ["time", "algbw", "busbw", "#wrong", "p50", "p99"]
    fixed = ["size", "count", "type", "redop", "root"]
    assert names.replace("|", "").split()[1:] == [*fixed, *figures, *figures, "time"]
    assert units.split()[:3] == ["#", "(B)", "(elements)"]
    ours, theirs = result(), result("gloo", 250.0)
    row = table.row(ours, {("nvx", "in-place"): ours, ("gloo", "in-place"): theirs})
    cells = row.replace("|", "").split()
    assert cells[:5] == ["8", "2", "float", "sum", "-1"]
    assert cells[5:11] == ["N/A"] * 6, "torch has the variant, and the backend refuses it"
    assert cells[11:17] == ["10.00", "1.00", "1.00", "0", "10.00", "20.00"]
    assert cells[17:] == ["250.00", "25"]
    assert row.index("250.00") + len("250.00") == units.rindex("(us)") + len("(us)") - 1


def test_columns_without_a_figure_are_left_out():
    table = report.Table("nvx", ["gloo"], ("in-place",), checked=False, per_call=True)
    top, names, _ = table.header().splitlines()
    assert top.split() == ["#", "in-place", "|", "gloo", "x", "nvx"]
    figures = ["time", "algbw", "busbw", "p50", "p99", "i_min", "i_max", "i_p99", "i_cv%"]
    assert names.replace("|", "").split()[1:] == ["size", "count", "type", "redop", "root", *figures, "time"]
    ours = result(wrong=None)
    row = table.row(ours, {("nvx", "in-place"): ours, ("gloo", "in-place"): result("gloo")})
    figures = ["10.00", "1.00", "1.00", "10.00", "20.00", "5.00", "30.00", "20.00", "5.00"]
    assert row.split()[5:] == [*figures, "|", "10.00", "1"]
    assert row.index(" |") == names.index(" |"), "the row stands under the header"


def test_a_peers_wrong_result_is_marked():
    table = report.Table("nvx", ["gloo"], ("in-place",), checked=True, per_call=False)
    ours = result()
    row = table.row(ours, {("nvx", "in-place"): ours, ("gloo", "in-place"): result("gloo", 20.0, wrong=3)})
    assert "20.00!" in row
    assert "N/A" in table.row(ours, {("nvx", "in-place"): ours}).split("|")[1]


@pytest.mark.parametrize("value, text", [(1.234, "   1.23"), (123456.7, "123457"), (99999.94, "99999.9")])
def test_figures_keep_to_their_width(value, text):
    assert report.number(value, 7).strip() == text.strip()
    assert len(report.number(value * 1e9, 7)) <= 7


@pytest.mark.parametrize(
    "line, error",
    [
        ("all_redux", "no collective 'all_redux': there are all_reduce"),
        ("", "name a collective, or --all"),
        ("all_reduce -b 1M -e 8 -f 2", "above the largest"),
        ("broadcast -r 5", "a root is outside 0..1"),
        ("all_reduce -o sub", "no reduction 'sub': there are sum"),
        ("all_reduce -d float128", "no dtype 'float128': there are float, double"),
        ("all_reduce -n 2 --hosts 4", "--hosts 4 with -n 2: every host needs a rank"),
        ("train -n 2 --hosts 3", "--hosts 3 with -n 2"),
        ("all_reduce --vs gloo,glo", "--vs: unknown contender 'glo'; beside nvx there are null, "),
        ("all_reduce --backend gloo --vs glo", "beside gloo there are nvx, null, "),
        ("train --vs foo", "unknown contender 'foo'"),
        ("all_reduce -g 1", "nccl-tests' -g is not supported: each rank is a process, and -n sets their number"),
        ("all_reduce -b 8 -z 0 -e 64", "nccl-tests' -z is not supported: every call is waited for"),
        ("all_reduce --average 1", "nccl-tests' --average is not supported: a call's time is that of its slowest rank"),
        ("train --kinds ddp,DDP", "no kind DDP: there are ddp, fsdp2, fsdp2-lent"),
        ("train --blocks 0", "argument --blocks: 0 is below 1"),
        ("all_reduce -n 1048577", "argument -n/--ranks: 1048577 is not at most 1048576"),
        ("all_reduce -f inf -b 8 -e 64", "argument -f/--stepfactor: inf is not at most 4611686018427387903"),
        ("all_reduce -f nan -b 8 -e 64", "argument -f/--stepfactor: nan is not at most"),
        ("all_reduce -T 1e30", "argument -T/--timeout: 1e30 is not at most 31536000"),
        ("all_reduce -T nan", "argument -T/--timeout: nan is not at most"),
        ("all_reduce --block-ms nan", "argument --block-ms: nan is not at most"),
        ("all_reduce -u 99999999999999999999", "argument -u/--unalign: 99999999999999999999 is not at most 1048576"),
        ("all_reduce -b lots", "'lots' is not a size: write 8, 64K, 1M or 2G"),
    ],
)
def test_invalid_command_lines_end_with_2_and_state_why(capsys, line, error):
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    assert error in capsys.readouterr().err


def test_a_results_file_that_cannot_be_written_is_refused_before_the_ranks_start(tmp_path, capsys):
    assert nvx.cli.main(["bench", "all_reduce", "-J", "/proc/results.json"]) == 2
    assert capsys.readouterr().err == "nvx bench: -J: [Errno 2] No such file or directory: '/proc/results.json'\n"
    os.mkfifo(tmp_path / "pipe")
    machine.check_writable(str(tmp_path / "pipe"))


def test_all_has_sizes_of_its_own_unless_one_is_given():
    assert cli.parse_sweep(["--all"]).sizes == cli.ALL_SIZES
    for given in (["-b8"], ["-b", "8"], ["--minbytes=8"]):
        parsed = cli.parse_sweep(["--all", *given, "-e8"])
        assert (parsed.sizes, parsed.minbytes) == (None, 8)
    parsed = cli.parse_sweep(["--all", "-e", "1M"])
    assert (parsed.sizes, parsed.minbytes, parsed.maxbytes, parsed.stepfactor) == (None, 8, 1 << 20, 2)
    assert cli.parse_sweep(["--all", "-f", "4"]).stepfactor == 4
    parsed = cli.parse_sweep(["all_reduce"])
    assert (parsed.minbytes, parsed.maxbytes, parsed.stepfactor, parsed.stepbytes) == (32 << 20, 32 << 20, 0, 1 << 20)


def test_a_wrong_contender_lists_the_contenders_and_those_installed(monkeypatch):
    """The list leaves out the backend under test and backends without CPU tensors."""
    monkeypatch.setattr(contenders.dist, "is_gloo_available", lambda: False)
    here, _, missing = contenders.peers_of("nvx").partition("; not in this torch: ")
    assert {"null", "socket", "symm_mem"} <= set(here.split(", "))
    assert "gloo" in missing.split(", ")
    assert not {"nvx", "nccl", "fake"} & {*here.split(", "), *missing.split(", ")}


def test_the_shown_command_is_the_one_that_was_typed():
    from nvx.bench.world import shown_command

    typed = ["all_reduce", "-b", "8", "--vs", "gloo"]
    assert shown_command([*typed, "--rendezvous", "file:///tmp/x"]) == "nvx bench all_reduce -b 8 --vs gloo"


@pytest.mark.parametrize("version, options", [
    ("mpirun (Open MPI) 5.0.11", ["-n", "999", "--bind-to", "none", "--oversubscribe"]),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1", ["-n", "999"]),
])  # fmt: skip
def test_each_mpi_gets_options_that_it_accepts(version, options, tmp_path, monkeypatch):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"""#!/bin/sh
[ "$1" = --version ] && echo "{version}" && exit
echo "$I_MPI_PIN" "$@" >{tmp_path}/given
""")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert direct.launch_by_mpi(["all_reduce"], 999) == 0
    given = (tmp_path / "given").read_text().split()
    assert given[: given.index(sys.executable)] == ["0", *options]
    assert "all_reduce" in given


def test_bounds_follow_the_times_of_other_backends():
    times = {"null": 5.0, "deepspeed": 50.0, "mpi": 80.0, "gloo": 1500.0}
    assert goals.Bound(call=True, plus_us=1.5).microseconds(times.get) == (6.5, "")
    assert goals.Bound(0.5, ("deepspeed", "mpi")).microseconds(times.get) == (25.0, "")
    assert goals.Bound(1, ("deepspeed",), call=True).microseconds(times.get) == (55.0, "")
    assert goals.Bound(0.5, ("deepspeed", "mpi")).microseconds({"mpi": 80.0}.get) == (40.0, "deepspeed")
    assert goals.Bound(0.5, ("deepspeed",)).microseconds({}.get) == (None, "deepspeed")
    assert goals.Bound(call=True).microseconds({}.get) == (None, "null")


def test_verdicts():
    results = [result(time=6.0), result("null", 5.0), result("gloo", 200.0)]
    first = goals.judge_collectives(results)[0]
    assert (first.title, first.limit, first.ok) == ("all_reduce, 2 ranks, 8 B", 6.5, True)
    assert first.reached == "the call + 1.00 us"
    times = {"nvx": 25.0, "null": 5.0, "deepspeed": 50.0, "mpi": 40.0}
    assert goals.Bound(0.5, ("deepspeed", "mpi")).reached(25.0, times.get) == "1/1.6 of mpi"
    assert goals.Bound(1, ("deepspeed",), call=True).reached(25.0, times.get) == "the call + 1/2.5 of deepspeed"
    assert goals.judge_collectives([result(time=7.0), result("null", 5.0)])[0].ok is False
    assert goals.judge_collectives([result(time=7.0)])[0].ok is None
    assert "not judged" in goals.judge_collectives([result(time=7.0)])[0].line()


def test_every_goal_can_be_met_by_what_the_parts_measure():
    """bench/targets.py measures every size and peer of every goal."""
    measured = set()
    for part in ("all_reduce", "others", "four", "far", "far_others", "far_four"):
        parsed = cli._sweep_parser().parse_args(targets.PARTS[part].split())
        for name in parsed.collectives:
            for size in parsed.sizes:
                real = collectives.elements(collectives.find(name), size, 4, parsed.ranks) * 4
                measured |= {(name, parsed.ranks, parsed.hosts, real, peer) for peer in ["nvx", *parsed.vs]}
    for goal in goals.COLLECTIVE_GOALS + goals.HOST_GOALS:
        needed = ["nvx", *goal.bound.peers, *(["null"] if goal.bound.call else [])]
        for peer in needed:
            assert (goal.what, goal.ranks, goal.hosts, goals._real_size(goal), peer) in measured, goal


def test_the_table_of_goals_covers_every_collective():
    covered = {(goal.what, goal.ranks) for goal in goals.COLLECTIVE_GOALS}
    assert {what for what, ranks in covered if ranks == 2} == set(collectives.COLLECTIVES)
    crowded = {"all_reduce", "all_gather", "reduce_scatter", "barrier"}
    assert {what for what, ranks in covered if ranks == 4} == crowded


def test_targets_replaces_the_committed_file_only_without_options(tmp_path, capsys):
    assert targets.read_arguments([]).json == str(targets.DEFAULT_FILE) and targets.DEFAULT_FILE.is_file()
    for line in (["--quick"], ["--parts", "far"], ["--backend", "gloo"]):
        assert targets.read_arguments(line).json is None
    with pytest.raises(SystemExit):
        targets.read_arguments(["-J", str(tmp_path / "none" / "targets.json")])
    assert "No such file or directory" in capsys.readouterr().err


def test_overlap_counts_the_timed_rounds():
    """Two blocks of two rounds, each after one that is not timed; before them, those that find the number."""
    rounds = overlap.Round(None, torch.zeros(1), lambda: None)
    rounds.marks = [(0, time * 10**9) for time in (9, 9, 9, 1, 2, 9, 3, 4)]
    assert rounds.products(blocks=2, calls=4) == [1, 2, 3, 4]


def test_memory_verdicts():
    measured = {
        "backend": "nvx", "group_bytes": 2e6, "used_small_group_bytes": 1e3, "used_group_bytes": 1e3,
        "idle_cpu_s": 0.0, "used_idle_cpu_s": 0.5,
    }  # fmt: skip
    oks = [verdict.ok for verdict in goals.judge_memory([measured], idle_seconds=2.0)]
    assert oks == [False, True, True, True, False]


@pytest.mark.parametrize("counted", [True, False])
def test_idle_time_is_of_the_threads_that_are_not_others(counted):
    ends = threading.Event()

    def work():
        while not ends.is_set():
            pass

    thread = threading.Thread(target=work)
    before = set(memory.cpu_by_thread())
    thread.start()
    try:
        others = before if counted else {*before, thread.native_id}
        assert (memory.idle_cpu(0.3, others) > 0.01) == counted
    finally:
        ends.set()
        thread.join()


def test_results_take_the_place_of_files_alone(tmp_path):
    """A pipe or a link is not replaced."""
    pipe, link = tmp_path / "pipe", tmp_path / "link.json"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    machine.write(str(pipe), {"written": 1})
    assert json.loads(reader.communicate(timeout=60)[0]) == {"written": 1} and pipe.is_fifo()
    link.symlink_to("there.json")
    machine.write(str(link), {"written": 2})
    assert link.is_symlink() and json.loads((tmp_path / "there.json").read_text()) == {"written": 2}


def test_results_are_written_in_place_where_no_file_can_take_the_place(tmp_path, monkeypatch):
    """Such as a file that a container mounts alone."""
    path = tmp_path / "results.json"
    path.write_text("old")

    def busy(self, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(machine.Path, "replace", busy)
    machine.write(str(path), {"written": 1})
    assert json.loads(path.read_text()) == {"written": 1} and list(tmp_path.iterdir()) == [path]

    write = machine.Path.write_text

    def read_only(self, *text):
        if not text or self != path:
            raise OSError(errno.EROFS, "Read-only file system")
        return write(self, *text)

    monkeypatch.setattr(machine.Path, "write_text", read_only)
    monkeypatch.setattr(machine.Path, "unlink", read_only)
    machine.write(str(path), {"written": 2})
    assert json.loads(path.read_text()) == {"written": 2}


def test_results_have_a_row_a_line():
    rows = [{"size": 8, "blocks_us": [1.5, 2]}, {"size": 64}]
    contents = {"schema": 1, "machine": {"cpu": "x"}, "empty": [], "parts": {"a": {"results": rows}}}
    text = machine.as_text(contents)
    assert json.loads(text) == contents
    assert text.splitlines()[6:9] == ['   "results": [', '    {"size": 8, "blocks_us": [1.5, 2]},', '    {"size": 64}']


def test_results_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "results.json"
    machine.write(str(path), machine.document("sweep", "nvx bench all_reduce", {}, results=[]))
    again = results_file.read(str(path))
    assert again["machine"]["cpu"] and again["machine"]["kernel"]
    assert again["versions"]["torch"] == torch.__version__
    assert list(path.parent.iterdir()) == [path]
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        results_file.read(str(path))
    path.write_text(json.dumps({"schema": 0}))
    with pytest.raises(ValueError, match="not written by this nvx"):
        results_file.read(str(path))


def write_results(path, sizes_=(8, 4096, 1 << 20)):
    results = []
    for position, size in enumerate(sizes_):
        results += [result(size=size, time=10.0 * (position + 1)), result("gloo", 100.0, size=size)]
    machine.write(str(path), machine.document("sweep", "nvx bench all_reduce", {}, ranks=2, results=results))


def test_plot_chooses_the_lines(tmp_path):
    path = tmp_path / "results.json"
    write_results(path)
    drawn = plot.lines(plot.sweeps(results_file.read(str(path))), "all_reduce")
    assert {name: [point["size"] for point in points] for name, points in drawn.items()} == {
        "nvx": [8, 4096, 1 << 20],
        "gloo": [8, 4096, 1 << 20],
    }


def test_plot_keeps_a_dot_in_a_name(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    write_results(path)
    figure = types.SimpleNamespace(savefig=lambda name, dpi: None)
    monkeypatch.setattr(plot, "draw", lambda *given: figure)
    for given, stem in (([], tmp_path / "results"), (["-o", "nvx-0.1"], "nvx-0.1"), (["-o", "run.png"], "run")):
        assert plot.main(["plot", str(path), *given]) == 0
        assert capsys.readouterr().out.split() == [f"{stem}.png", f"{stem}.svg"]


def test_plot_names_what_it_cannot_draw(tmp_path, capsys):
    path = tmp_path / "other.json"
    machine.write(str(path), machine.document("init", "nvx bench init", {}, results=[]))
    assert plot.main(["plot", str(path)]) == 2
    assert "has no sizes to plot" in capsys.readouterr().err


def test_the_reason_against_a_contender_has_one_prefix(monkeypatch):
    def fails(base, name, world, timeout):
        raise RuntimeError("nvx: the ranks did not all come\nmore")

    printed, why = [], "rank 0: the ranks did not all come"
    alone = types.SimpleNamespace(agreed=lambda reason: reason and f"rank 0: {reason}", log=printed.append)
    monkeypatch.setattr(contenders, "_make", fails)
    assert contenders.enlist(["nvx", "gloo"], alone, 1.0) == ([], {"nvx": why, "gloo": why})
    assert printed == [f"# left out: gloo ({why})"]
