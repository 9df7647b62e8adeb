"""torch's flight recorder on groups of nvx: torch's own analyzer names the rank that has a fault.

torch 2.14's recorder for any backend writes names that torch's analyzer refuses, so `readable()` translates them.
test_flight_dumps.py has the dumps that nvx itself writes, for each torch.
"""

import logging
import os
import pickle
import re
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import OVER_NVX, sync
from reference import ones

c10d = torch._C._distributed_c10d
pytestmark = pytest.mark.skipif(
    not (OVER_NVX and hasattr(c10d, "FlightRecorderHook")), reason="torch records other backends from 2.14 on"
)
ODD = 2  # the rank with the fault


def trace():
    return pickle.loads(c10d._dump_fr_trace())


def readable(dump, after):
    """The dump in the words of torch's analyzer, without the entries of earlier tests."""
    dump["entries"] = [entry for entry in dump["entries"] if entry["record_id"] > after]
    for number, entry in enumerate(dump["entries"]):
        name = entry["profiling_name"].partition(":")[2]
        entry["profiling_name"] = "gloo:" + re.sub("^all(?!_)", "all_", name)
        for field in ("sizes", "dtypes"):
            entry[f"output_{field}"] = entry[f"output_{field}"] or entry[f"input_{field}"]
        entry["record_id"] = number
    return dump


def in_other_order(odd):
    calls = [lambda: dist.all_reduce(ones()), lambda: dist.all_gather_into_tensor(ones(30), ones())]
    for call in reversed(calls) if odd else calls:
        call()


FAULTS = {
    "op": lambda: dist.broadcast(ones(), 0),
    "dtype": lambda: dist.all_reduce(ones(dtype=torch.float64)),
    "size": lambda: dist.all_reduce(ones(9)),
    "root": lambda: dist.broadcast(ones(), 1),
    "order": lambda: in_other_order(True),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "absent": lambda: None,
}
OTHERS = {"root": lambda: dist.broadcast(ones(), 0), "order": lambda: in_other_order(False)}


def run_fault(rank, world, fault):
    """The entries that a rank has at the end; the last collective of the others fails."""
    before = max((entry["record_id"] for entry in trace().get("entries", [])), default=-1)
    hook = c10d.FlightRecorderHook.attach(dist.group.WORLD)
    for _ in range(3):
        dist.all_reduce(ones())
    try:
        FAULTS[fault]() if rank == ODD else OTHERS.get(fault, lambda: dist.all_reduce(ones()))()
        if fault == "root":
            dist.all_reduce(ones())  # a root may return before it learns that another rank names another one
    except dist.DistBackendError:
        pass
    else:
        assert rank == ODD and fault == "absent"
    dump = readable(trace(), before)
    hook.remove()
    if fault == "absent":
        sync("the others have timed out")
    return dump


def analyzed(dumps, folder):
    """The collectives of torch's analyzer, which takes the first dump that it reads as the right one."""
    from torch.distributed.flight_recorder.components import builder, config_manager

    args = config_manager.JobConfig().parse_args([str(folder), "--allow-incomplete-ranks"])
    details = {f"trace_{rank}": dump | {"rank": rank} for rank, dump in enumerate(dumps) if dump}
    return builder.build_db(details, args, details["trace_0"]["version"]).collectives


@pytest.mark.parametrize("fault", ["op", "dtype", "size", "order"])
def test_a_rank_that_calls_differently_is_the_culprit(ranks, tmp_path, fault):
    found = analyzed(ranks.run(run_fault, world=3, fault=fault), tmp_path)
    assert [collective.pass_check for collective in found[:4]] == [True, True, True, False]
    assert set(found[3].mismatch_collectives) == {ODD}, found[3]


def test_a_rank_that_never_calls_is_missing(ranks, tmp_path):
    found = analyzed(ranks.run(run_fault, world=3, fault="absent", op_timeout=4.0), tmp_path)
    assert found[3].missing_ranks == {ODD}, found[3]


def test_a_rank_without_a_dump_is_reported(ranks, tmp_path, caplog):
    """After SIGKILL; a rank that stays stopped leaves no dump either."""
    dumps = ranks.run(run_fault, world=3, fault="kill", dies={ODD})
    with caplog.at_level(logging.INFO):
        analyzed(dumps, tmp_path)
    assert f"we missed FR dumps from ranks ({{{ODD}}})" in caplog.text


def test_roots_are_not_recorded(ranks, tmp_path):
    """If this fails, torch records them: let the analyzer name the rank, and docs/debugging.md state it."""
    dumps = ranks.run(run_fault, world=3, fault="root")
    assert not any("root" in field for dump in dumps for entry in dump["entries"] for field in entry)
    assert [collective.pass_check for collective in analyzed(dumps, tmp_path)[:4]] == [True] * 4
