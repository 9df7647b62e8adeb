"""40 s of worlds, six at once, and whether the judge sees what it looks for."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.nemesis import program as programs
from tests.nemesis.judge import judge, unexpected_ends
from tests.nemesis.program import Fault, Program, Step, make
from tests.nemesis.rank import GROWTH, SETUP, WARM, Event, Held, differs

_C = pytest.importorskip("nvx._C", reason="nvx is not built")
ROOT = Path(__file__).parents[2]
SECONDS, JOBS, LEAST = 20, 6, 12  # for each number of hosts: the time, the worlds at once, the least number of worlds


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_worlds(hosts):
    """Worlds for 20 s, six at once because most of them wait. More: python -m tests.nemesis."""
    if hosts > 1 and not _C.build_info()["ucx"]:
        pytest.skip("this nvx was built without UCX")
    command = [sys.executable, "-m", "tests.nemesis", "--seed", 0, "--worlds", 1000 * JOBS, "--jobs", JOBS]
    command += ["--seconds", SECONDS, "--hosts", hosts, "--timeout", 8]
    run = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    counts = [int(line.split()[0]) for line in run.stdout.splitlines() if " worlds from seed " in line]
    assert run.returncode == 0 and len(counts) == JOBS and sum(counts) >= LEAST, run.stdout + run.stderr


def test_a_program_is_a_function_of_its_seed():
    made = [make(seed) for seed in range(200)]
    assert made == [make(seed) for seed in range(200)]
    assert len({str(program) for program in made}) == 200
    assert {f.kind for program in made for f in program.faults} == set(programs.FAULTS)
    kinds = {*programs.SYMMETRIC, *programs.ROOTED, *programs.MESSAGES, "wait", "new_group"}
    assert {s.kind for program in made for s in program.steps} == kinds


def test_a_fault_in_a_call_changes_it():
    for program in map(make, range(300)):
        for fault in program.faults:
            step = program.steps[fault.step]
            if fault.kind in programs.DIFFERING:
                assert programs.takes_effect(step, fault.kind, program.groups), str(program)
    symmetric, rooted = Step(0, "all_reduce", count=3), Step(0, "broadcast", count=3)
    assert not programs.takes_effect(symmetric, "root", [(0, 1)]) and programs.takes_effect(rooted, "root", [(0, 1)])
    assert not programs.takes_effect(rooted, "op", [(0, 1)]) and programs.takes_effect(symmetric, "op", [(0, 1)])


STEPS = (Step(0, "all_reduce", count=3), Step(1, "broadcast", count=3, root=1), Step(2, "send", count=2, peer=1))


def with_fault(kind, step):
    return Program(0, 2, 1, 6.0, ((0, 1),), 1, STEPS, (Fault(kind, 1, step),))


def test_expected_failures_follow_from_the_fault():
    """Rank 1 does not come to a step, or comes with another call: what needs it there cannot succeed."""
    for kind in ("SIGKILL", "leaves", "count", "dtype", "op", "kind"):
        assert not programs.Expected(with_fault(kind, 0)).of_collective(0, STEPS[0])[0], kind
    expected = programs.Expected(with_fault("skips", 0))
    assert not expected.of_collective(0, STEPS[0])[0], "its broadcast is matched with this all_reduce"
    unequal = (Step(0, "all_to_all_v", count=7), Step(1, "barrier"))
    program = Program(0, 2, 1, 6.0, ((0, 1),), 1, unequal, (Fault("count", 1, 0),))
    assert not programs.Expected(program).of_collective(0, unequal[0])[0], "it gets 7 elements, not 6"
    assert programs.Expected(program).of_collective(1, replace(unequal[0], count=8))[0], "it gets none, as it expects"
    possible, (total,) = programs.Expected(with_fault("SIGKILL", 1)).of_collective(0, STEPS[0])
    assert possible and total.tolist() == [3, 2, 6], total
    assert programs.Expected(with_fault("SIGKILL", 2)).of_collective(0, STEPS[1])[0]


def test_wrong_results_are_seen():
    assert "wrong result" in differs(STEPS[0], True, [torch.tensor([1, 2])], [torch.tensor([1, 3])])
    assert "made no such call" in differs(STEPS[0], False, [], [])
    assert differs(STEPS[0], True, [torch.tensor([1, 2])], [torch.tensor([1, 2])]) is None


NAMED = "DistBackendError: nvx: rank 1 (pid 7, host vm) has ended"
VIOLATIONS = {
    "I1": Event(0, 0, "wrong", "wrong result"),
    "I2": Event(1, 0, "ok", issued_after_failure=True),
    "I3 slow": Event(0, 0, "error", NAMED, seconds=30),
    "I3 unnamed": Event(0, 0, "error", "DistBackendError: nvx: something is wrong"),
    "I3 of torch": Event(0, 0, "error", "ValueError: rank 1"),
}


@pytest.mark.parametrize("rule", VIOLATIONS)
def test_each_violation_is_seen(rule):
    program = with_fault("SIGKILL", 0)
    fine = Event(0, 0, "error", NAMED)
    assert judge(program, {0: [fine]}) == []
    found = judge(program, {0: [fine, VIOLATIONS[rule]]})
    assert found and found[0].startswith(rule[:2]), found


SET_UPS = {
    NAMED + " (signal 9) while group 0 was being created": "",
    "DistBackendError: nvx: timed out after 6.00 s, waiting for the ranks of group 0: rank 1 has not joined": "",
    "DistBackendError: nvx: waiting for the ranks of group 0: ranks 0, 1 have not joined": "",
    "DistStoreError: wait timeout after 6000ms": "",
    "DistBackendError: nvx: timed out after 6.00 s, waiting for the ranks of group 0": "names no rank that has ended",
    "DistBackendError: nvx: rank 0 (pid 7, host vm) has ended, and rank 1 waits": "says that rank 0 has ended",
    "ValueError: rank 1 is missing": "an error neither of nvx nor of the store",
}


@pytest.mark.parametrize("text", SET_UPS)
def test_errors_of_a_set_up_are_judged(text):
    program = with_fault("SIGKILL from outside", 0)
    found = judge(program, {0: [Event(SETUP, 0, "error", text)]})
    assert (SET_UPS[text] in found[0] and found[0].startswith("I3")) if SET_UPS[text] else not found, found


def test_what_a_process_keeps_is_seen():
    held = Held()
    assert [held.grown() for _ in range(WARM + 1)] == [[]] * (WARM + 1)
    kept = [open(__file__) for _ in range(GROWTH["descriptors"] + 1)]
    (found,) = held.grown(patience=0)
    assert "descriptors in its world" in found
    for file in kept:
        file.close()
    assert held.grown() == []


def test_errors_of_unaffected_groups_and_unexpected_exits_are_seen():
    harmless = with_fault("late", 0)
    assert judge(harmless, {0: [Event(0, 0, "error", NAMED)]})[0].startswith("I5")
    assert list(unexpected_ends(harmless, {1: -11})) == ["I4 rank 1 ended with exit code -11"]
    assert not list(unexpected_ends(with_fault("SIGKILL", 0), {1: -9}))
