"""The protocols of the kernels hold in the PTX model, the model's programs are those of the source, and a bug in any of
them is found."""

import re

import protocols
import ptx
import pytest
import source
from protocols import ORDERS, PROTOCOLS, UNPROVED, program

PTX = source.instructions()
BROKEN = [(one, bug) for one in PROTOCOLS for bug in one.bugs]
USES = {"wait_for": "acquire", "await_packet": "peek_packet"}


def violation(text, protocol):
    """An execution with an outcome that the protocol excludes."""
    for outcome in (*protocol.never, *([] if protocol.races else ["race"])):
        if execution := ptx.find(text, outcome):
            return f"{outcome}:\n{execution}"
    return None


def narrowed():
    """(protocol, operation): each operation of system scope in each program."""
    for one in PROTOCOLS:
        if one.races:
            continue
        used = {USES.get(word, word) for word in re.findall(r"\w+", one.text)}
        yield from ((one, name) for name in sorted(used & PTX.keys()) if PTX[name].endswith(".sys"))


@pytest.mark.parametrize("one", PROTOCOLS, ids=lambda one: one.guarantee)
def test_holds(one):
    assert violation(program(one.text), one) is None
    assert ptx.find(program(one.text), "done"), "the program has no execution that ends"


@pytest.mark.parametrize("one, bug", BROKEN, ids=lambda it: it if isinstance(it, str) else it.guarantee[:40])
def test_fails_if(one, bug):
    assert violation(program(one.broken(bug)), one)


@pytest.mark.parametrize("one, name", list(narrowed()), ids=lambda it: it if isinstance(it, str) else it.guarantee[:40])
def test_needs_system_scope(one, name):
    assert violation(program(one.text, PTX | {name: PTX[name].replace(".sys", ".gpu")}), one)


@pytest.mark.parametrize("gap", UNPROVED, ids=lambda gap: gap.guarantee)
def test_is_not_proved(gap):
    """If the kernels change so that the model proves it, move it to PROTOCOLS."""
    assert ptx.find(program(gap.text), gap.outcome)


def differences():
    """In what the source is not what the programs model."""
    orders = source.orders()
    yield from (f"{name}: {steps}" for name, steps in orders.items() if ORDERS.get(name) != steps)
    yield from (f"{name} is gone" for name in ORDERS if name not in orders)
    yield from (
        f"{name}: {one}" for name, one in source.instructions().items() if protocols.INSTRUCTIONS.get(name) != one
    )
    # A fence orders the stores of its own lane only.
    if source.guards("publish", "fence") != ["if (uint32_t(ex_.lane()) < ranks_)"]:
        yield "other lanes fence"
    if LANES not in source.guards("publish", "signal_behind"):
        yield "other lanes signal"
    if set(re.findall(r"halves\[\d\]", source.body_of("gpu/packs.h", "is_stamped"))) != {"halves[0]", "halves[1]"}:
        yield "is_stamped() does not compare both halves"


LANES = "for (uint32_t p = uint32_t(ex_.lane()); p < ranks_; p += uint32_t(ex_.lanes()))"
FENCE = "if (uint32_t(ex_.lane()) < ranks_) ex_.fence();"
READY = "ex_.signal(counters_at(p).ready, stamp(epoch_, 1))"
CHANGES = {
    "no fence": ("gpu/push_channel.h", FENCE, ""),
    "a fence of one lane": ("gpu/push_channel.h", FENCE, "if (ex_.lane() == 0) ex_.fence();"),
    "a fence of the GPU": ("exec.h", "fence.acq_rel.sys", "fence.acq_rel.gpu"),
    "a flag of the GPU": ("exec.h", "system_ref<Stamp>(at)", "device_ref<Stamp>(at)"),
    "ready without release": ("gpu/push_channel.h", READY, READY.replace("signal", "signal_behind")),
    "packs that are gathered behind the barrier": (
        "gpu/push_channel.h",
        "ok = ok && receive();\n      if (!ex_.all(ok)) return false;",
        "if (!ex_.all(ok)) return false;\n      ok = ok && receive();",
    ),
    "no barrier before publishing": ("gpu/push_channel.h", "if (!ex_.all(ok) || !none", "if (!ok || !none"),
    "no barrier behind stamps": (
        "gpu/push_channel.h",
        "memory.restamp(lane);\n    lane.sync();",
        "memory.restamp(lane);",
    ),
    "a half that is not compared": ("gpu/packs.h", " && stamp_of(p.halves[1]) == stamp", ""),
    "a flag that no protocol has": ("gpu/packs.h", "  copy_unaligned<Unit>(ex, c);", "  ex.signal(c.flag, 1);"),
}


def test_source_is_what_the_programs_model():
    """After a change of a function, check that its programs still describe it; then change ORDERS."""
    assert not list(differences())


@pytest.mark.parametrize("file, old, new", CHANGES.values(), ids=CHANGES)
def test_change_of_the_source_is_noticed(monkeypatch, file, old, new):
    text = source.text_of(file)
    assert old in text
    monkeypatch.setattr(source, "text_of", lambda name: text.replace(old, new) if name == file else text_of(name))
    assert list(differences())


text_of = source.text_of


def test_each_function_with_order_is_in_a_protocol():
    modelled = {name for one in PROTOCOLS for name in one.models}
    assert modelled | set(protocols.UNORDERED) == set(ORDERS)
