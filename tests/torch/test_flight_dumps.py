"""`nvx trace --flight-recorder`: torch's analyzer reads the dumps and names the rank that has a fault."""

import logging
import os
import signal
import sys

import pytest
import warm
from nvx.commands import trace
from ranks import only_nvx
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import builder, config_manager, loader

pytestmark = only_nvx
ODD = 2  # the rank with the fault
WHOLE = 11  # the calls of group 0 before it

PROGRAM = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
import nvx
folder, rank, fault = sys.argv[1], int(sys.argv[2]), sys.argv[3]
limit = datetime.timedelta(seconds=3 if fault == "absent" else 60)
dist.init_process_group("nvx", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3, timeout=limit)
other = dist.new_group([0, 2])
def ones(count=8, dtype=torch.float32):
    return torch.ones(count, dtype=dtype)
def each():
    return [ones(3 + r) for r in range(3)]
calls = [
    lambda: dist.all_reduce(ones()), dist.barrier, lambda: dist.all_gather_single(ones(24), ones()),
    lambda: dist.reduce_scatter_single(ones(), ones(24)), lambda: dist.all_to_all_single(ones(24), ones(24)),
    lambda: dist.gather(ones(), [ones() for _ in range(3)] if rank == 0 else None),
    lambda: dist.scatter(ones(), [ones() for _ in range(3)] if rank == 1 else None, src=1),
    lambda: dist.all_gather(each(), ones(3 + rank)), lambda: dist.reduce_scatter(ones(3 + rank), each()),
    lambda: dist.reduce(ones(), 1), lambda: dist.all_reduce(ones(1 << 22)),
]
for name in ("all_gather_single", "reduce_scatter_single"):  # torch 2.11 and 2.12 have the older names only
    older = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}[name]
    setattr(dist, name, getattr(dist, name, getattr(dist, older)))
for call in calls:
    call()
if rank < 2:
    dist.send(ones(), 1) if rank == 0 else dist.recv(ones(), 0)
if rank != 1:
    dist.all_reduce(ones(), group=other)
if rank == 2:
    time.sleep(0.5)  # the others are in the call before it
faults = {
    "none": lambda: dist.all_reduce(ones()), "op": lambda: dist.broadcast(ones(), 0),
    "size": lambda: dist.all_reduce(ones(9)), "dtype": lambda: dist.all_reduce(ones(dtype=torch.float64)),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "absent": lambda: sys.stdin.read(),
}
try:
    faults[fault]() if rank == 2 else dist.all_reduce(ones())
except dist.DistBackendError:
    pass
os._exit(0)
"""


def traced(folder, fault):
    """The trace of a job of three ranks, whose last call has the fault."""
    environment = {**os.environ, "NVX_TRACE": str(folder / "trace")}
    arguments = [["-c", PROGRAM, folder, rank, fault] for rank in range(3)]
    ranks = [warm.Popen(each, env=environment, stdin=-1) for each in arguments]
    for rank in ranks[:ODD]:
        assert rank.wait(60) == 0
    ranks[ODD].communicate(timeout=60)  # closes its stdin, which ends one that is absent
    assert ranks[ODD].returncode == (-signal.SIGKILL if fault == "kill" else 0)
    return folder / "trace"


def analyzed(folder):
    """The collectives of torch's analyzer, with the dump of rank 0 as the right one."""
    args = config_manager.JobConfig().parse_args([str(folder), "--allow-incomplete-ranks"])
    details = {str(path): loader.read_dump("rank_", str(path)) for path in sorted(folder.iterdir())}
    return builder.build_db(details, args, next(iter(details.values()))["version"]).collectives


def of_group_0(collectives):
    return [c for c in collectives if c.pg_desc.endswith(":group 0")]


@pytest.mark.parametrize("fault", ["none", "op", "size", "dtype"])
def test_a_rank_that_calls_differently_is_the_culprit(tmp_path, capsys, fault):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "rank_7").write_text("of a larger job before")
    assert trace.main([str(traced(tmp_path, fault)), "--flight-recorder", str(dumps)]) == 0
    assert f"{dumps}: dumps of 3 ranks, for torchfrtrace" in capsys.readouterr().out
    found = analyzed(dumps)
    calls = of_group_0(found)
    assert [call.pass_check for call in calls] == [True] * WHOLE + [fault == "none"]
    names = "all_reduce all_reduce_barrier all_gather reduce_scatter all_to_all gather scatter"
    assert [call.collective_name for call in calls[:7]] == [f"nccl:{name}" for name in names.split()]
    assert [calls[2].input_sizes, calls[2].output_sizes] == [[[8]], [[24]]]
    assert [calls[3].input_sizes, calls[3].output_sizes] == [[[24]], [[8]]]
    assert [(c.pass_check, c.expected_ranks) for c in found if c not in calls] == [(True, {0, 2})]
    if fault != "none":
        assert set(calls[WHOLE].mismatch_collectives) == {ODD}


@pytest.mark.parametrize("fault", ["absent", "kill"])
def test_a_rank_that_does_not_call_is_missing_also_where_it_was_killed(tmp_path, caplog, fault):
    dumps = tmp_path / "dumps"
    assert trace.main([str(traced(tmp_path, fault)), "--flight-recorder", str(dumps)]) == 0
    assert of_group_0(analyzed(dumps))[WHOLE].missing_ranks == {ODD}
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(dumps)])
    assert f"missing ranks: {{{ODD}}}" in caplog.text, "the command reads the folder"


def test_calls_that_a_rank_has_lost_are_left_out_and_a_running_one_is_started(tmp_path, monkeypatch):
    """As a rank does that keeps its last records only, or that was killed in a call."""
    folder, dumps, rows = traced(tmp_path, "none"), tmp_path / "dumps", trace.Rank.rows

    def fewer(rank):
        kept = rows(rank)
        if rank.rank != 1:
            return kept
        kept = [row for row in kept if row["kind"] != trace.CALL or row["slot"] or 3 <= row["number"] <= WHOLE]
        group = rank.groups[0]
        group["ended"] = group["begun"] - 1
        return kept

    monkeypatch.setattr(trace.Rank, "rows", fewer)
    assert trace.main([str(folder), "--flight-recorder", str(dumps)]) == 0
    calls = of_group_0(analyzed(dumps))
    assert [call.collective_seq_id for call in calls] == list(range(3, WHOLE + 2))
    assert [call.pass_check for call in calls] == [True] * (WHOLE - 2) + [False]
    (stuck,) = calls[-1].mismatch_collectives.values()
    assert (stuck.collective_state, calls[-1].collective_state) == ("started", "completed")


def test_a_command_leaves_dumps_and_the_last_run_of_a_rank_counts(tmp_path, capsys):
    program = "import os, sys, torch.distributed as dist, nvx\n" + (
        "dist.init_process_group('nvx', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(int(os.environ.get('AGAIN', 2))): dist.barrier()\n"
        "if 'AGAIN' not in os.environ: os.environ['AGAIN'] = '3'; os.execv(sys.executable, sys.orig_argv)"
    )
    dumps = tmp_path / "dumps"
    assert trace.main(["--flight-recorder", str(dumps), "--", sys.executable, "-c", program]) == 0
    assert [path.name for path in dumps.iterdir()] == ["rank_0"]
    assert len(loader.read_dump("rank_", str(dumps / "rank_0"))["entries"]) == 3
    assert f"{dumps}: dumps of 1 rank," in capsys.readouterr().out
