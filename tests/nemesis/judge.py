"""The invariants of a world, judged from the histories of its ranks.

I1  No call succeeds with a wrong result, or without a rank that it needs.
I2  No call succeeds that a rank begins after its group has failed there.
I3  Every survivor ends within a bound, with errors that are nvx's and name a rank at fault: a rank, where ranks call
    differently or stop for long, since others may then fail first.
I4  Nothing is left behind: descriptors, threads, shared mappings, children. No rank ends otherwise than by its fault.
I5  Groups without a rank at fault do not notice. The survivors of deaths make a group without the dead.
"""

import re

from tests.nemesis.program import DEADLY, DIFFERING, HARMLESS
from tests.nemesis.rank import SETUP

STORE = ("DistStoreError: ", "DistNetworkError: ")  # torch's own, which may be what ends a set-up
ENDED = re.compile(r"\brank (\d+)(?: \((?:global rank (\d+), )?[^()]*\))? (?:has ended|is lost)")
PROMPT = 5.0  # seconds in which a death or a leave is noticed, on a busy machine
SLACK = 5.0  # beyond a timeout


def faulty_in(program, group):
    """The ranks whose faults the group may notice, but for ranks that are only late."""
    members = program.groups[group]
    ranks = set()
    for fault in program.faults:
        own = program.steps[fault.step].group == group or fault.kind in (*DEADLY, "leaves", "long stop")
        if fault.kind not in HARMLESS and own and fault.rank in members:
            ranks.add(fault.rank)
    return ranks


def judge(program, histories):
    """The violations that the histories show: lines of text. `histories`: lists of Events by rank."""
    kinds = {f.kind for f in program.faults}
    joins_late = kinds & {*DEADLY} and any(
        step.kind == "new_group" for step in program.steps
    )  # torch waits for the dead
    orderly = not kinds & {*DIFFERING, "long stop"} and not joins_late  # the others wait for no rank that never comes
    early_death = "SIGKILL from outside" in kinds
    found = []
    for rank, events in histories.items():
        for event in events:
            found += [
                f"{rule} rank {rank}, step {event.step}, g{event.group}: {text}"
                for rule, text in violations(program, event, orderly, early_death)
            ]
    return found


def violations(program, event, orderly, early_death):
    faulty = faulty_in(program, event.group)
    if event.outcome == "wrong":
        yield "I1", event.text
    elif event.outcome == "ok" and event.issued_after_failure:
        yield "I2", "succeeded after the group had failed"
    elif event.outcome == "error":
        yield from bad_errors(program, event, faulty, orderly, early_death)
    bound = PROMPT if orderly and not early_death else program.timeout + SLACK
    if makes_group(program, event):
        bound = 3 * program.timeout + SLACK
    if event.seconds > bound + sum(f.value for f in program.faults):
        yield "I3", f"took {event.seconds:.1f} s: {event.outcome} {event.text}"


def makes_group(program, event):
    return event.step == SETUP or program.steps[event.step].kind == "new_group"


def bad_errors(program, event, faulty, orderly, early_death):
    if orderly and not faulty and not (early_death and makes_group(program, event)):
        if not early_death:
            yield "I5", f"failed, and no rank of it is at fault: {event.text}"
        return
    if makes_group(program, event):
        yield from bad_set_up(program, event)
        return
    if not event.text.startswith("DistBackendError: nvx: "):
        yield "I3", f"not an error of nvx: {event.text}"
    members = program.groups[event.group]
    names = [members.index(rank) for rank in faulty]
    if not re.search(r"\branks? \d", event.text):
        yield "I3", f"names no rank: {event.text}"
    elif orderly and not early_death and not any(re.search(rf"\brank {index}\b", event.text) for index in names):
        yield "I3", f"names no rank at fault: {event.text}"


def bad_set_up(program, event):
    """All survivors name a rank that is dead, and none that lives."""
    if event.text.startswith(STORE):
        return
    if not event.text.startswith("DistBackendError: nvx: "):
        yield "I3", f"an error neither of nvx nor of the store: {event.text}"
    members = program.groups[event.group]
    dead = {f.rank for f in program.faults if f.kind in DEADLY}
    named = {int(world or index) for index, world in ENDED.findall(event.text)}
    if named - dead:
        yield "I3", f"says that rank {min(named - dead)} has ended, which lives: {event.text}"
    names = dead | {members.index(rank) for rank in dead if rank in members}
    only_deaths = all(f.kind in (*DEADLY, *HARMLESS) for f in program.faults)
    if only_deaths and not any(re.search(rf"\branks? (\d+, )*{name}\b", event.text) for name in names):
        yield "I3", f"names no rank that has ended: {event.text}"


def unexpected_ends(program, codes):
    """`codes`: exit codes of the processes that ended, by rank."""
    for rank, code in codes.items():
        if not any(f.rank == rank and f.kind in DEADLY for f in program.faults):
            yield f"I4 rank {rank} ended with exit code {code}"
