"""Litmus programs with known outcomes under the PTX model: what ptx.py must reproduce.

Sources: ISA, the litmus tests in the section "Axioms" of the PTX ISA's memory consistency model; Dat3M, the program of
this name under litmus/PTX of the verifier Dat3M, with the outcome that its tests expect of its PTX 7.5 model; axioms,
a classic shape whose outcome follows from the axioms that are named. The texts are our own.
"""

from typing import NamedTuple


class Litmus(NamedTuple):
    name: str
    source: str
    text: str
    outcome: str
    allowed: bool


def two(a, b, scope="gpu"):
    """Two threads: of two GPUs, of two CTAs of a GPU, or of one CTA."""
    return f"P 0.0: {a}\nQ {dict(sys='1.0', gpu='0.1', cta='0.0')[scope]}: {b}"


MP = "st.weak x 1; st.{0} y 1", "ld.{1} r y; ld.weak s x"
SB = "st.weak x 1; fence.{0}; ld.weak r y", "st.weak y 1; fence.{1}; ld.weak s x"


def filled(shape, *words, scope="gpu"):
    return two(*(one.format(*words) for one in shape), scope)


PROGRAMS = [
    # Message passing
    Litmus(
        "MP, release and acquire of the GPU",
        "Dat3M Manual/MP-gpu",
        filled(MP, "release.gpu", "acquire.gpu"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "MP, release and acquire of the system",
        "Dat3M Manual/MP-sys",
        filled(MP, "release.sys", "acquire.sys", scope="sys"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "MP inside a CTA",
        "Dat3M Manual/MP-cta",
        filled(MP, "release.cta", "acquire.cta", scope="cta"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "MP inside a CTA, two scopes",
        "Dat3M Manual/MP-cta-gpu",
        filled(MP, "release.cta", "acquire.gpu", scope="cta"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "MP between CTAs by release.cta",
        "axioms: morally strong",
        filled(MP, "release.cta", "acquire.gpu"),
        "r=1 s=0",
        True,
    ),
    Litmus(
        "MP between GPUs by scope gpu",
        "axioms: morally strong",
        filled(MP, "release.gpu", "acquire.gpu", scope="sys"),
        "r=1 s=0",
        True,
    ),
    Litmus("MP, relaxed", "Dat3M Manual/MP-relaxed", filled(MP, "relaxed.gpu", "relaxed.gpu"), "r=1 s=0", True),
    Litmus(
        "MP, release without acquire",
        "axioms: acquire pattern",
        filled(MP, "release.gpu", "relaxed.gpu"),
        "r=1 s=0",
        True,
    ),
    Litmus(
        "MP, acquire without release",
        "axioms: release pattern",
        filled(MP, "relaxed.gpu", "acquire.gpu"),
        "r=1 s=0",
        True,
    ),
    Litmus(
        "MP by fences and relaxed accesses",
        "ISA Causality; Dat3M Manual/MP-sys-fence",
        two(
            "st.weak x 1; fence.acq_rel.sys; st.relaxed.sys y 1",
            "ld.relaxed.sys r y; fence.acq_rel.sys; ld.weak s x",
            "sys",
        ),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "MP by fences and weak accesses",
        "axioms: a release pattern ends in a strong write",
        two("st.weak x 1; fence.acq_rel.sys; st.weak y 1", "ld.weak r y; fence.acq_rel.sys; ld.weak s x", "sys"),
        "r=1 s=0",
        True,
    ),
    Litmus(
        "MP by fence.sc and weak accesses",
        "axioms: Fence-SC, Causality",
        two("st.weak x 1; fence.sc.sys; st.weak y 1", "ld.weak r y; fence.sc.sys; ld.weak s x", "sys"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "a relaxed write behind a release of the same location",
        "Dat3M Nvidia/Release-acquire-pattern",
        two(
            "st.weak y 1; st.release.sys x 1; st.relaxed.sys x 2", "ld.relaxed.sys r x; fence.acq_rel.sys; ld.weak s y"
        ),
        "r=2 s=0",
        False,
    ),
    Litmus(
        "MP through a read-modify-write of another thread",
        "Dat3M Manual/MP+RMW",
        "P 0.0: st.weak x 1; st.release.gpu y 1\nQ 0.1: atom.relaxed.gpu q y 1\nR 0.2: ld.acquire.gpu r y; ld.weak s x",
        "q=1 r=2 s=0",
        False,
    ),
    Litmus(
        "ISA2, causality over three threads and two scopes",
        "Dat3M Manual/MP-3-transitive",
        "P 0.0: st.weak x 1; st.release.cta y 1\nQ 0.0: ld.acquire.cta q y; st.release.gpu z 1\n"
        "R 0.1: ld.acquire.gpu r z; ld.weak s x",
        "q=1 r=1 s=0",
        False,
    ),
    Litmus(
        "WRC by release and acquire",
        "axioms: observation, causality",
        "P 0.0: st.relaxed.sys x 1\nQ 1.0: ld.relaxed.sys q x; st.release.sys y 1\n"
        "R 2.0: ld.acquire.sys r y; ld.relaxed.sys s x",
        "q=1 r=1 s=0",
        False,
    ),
    Litmus(
        "WRC, weak accesses between fences",
        "Dat3M Memalloy/WRC1",
        "P 0.0: st.weak x 1\nQ 0.1: ld.weak q x; fence.sc.cta; st.weak y 1\n"
        "R 0.1: ld.weak r x; fence.sc.gpu; ld.weak s y",
        "q=1 r=1 s=0",
        True,
    ),
    # Store buffering
    Litmus(
        "SB, weak", "Dat3M Manual/SB-weak", two("st.weak x 1; ld.weak r y", "st.weak y 1; ld.weak s x"), "r=0 s=0", True
    ),
    Litmus(
        "SB, fence.sc of the GPU",
        "ISA Fence-SC; Dat3M Manual/SB+sc-gpu",
        filled(SB, "sc.gpu", "sc.gpu"),
        "r=0 s=0",
        False,
    ),
    Litmus(
        "SB, fence.sc of two scopes", "Dat3M Manual/SB+sc-sys-gpu", filled(SB, "sc.sys", "sc.gpu"), "r=0 s=0", False
    ),
    Litmus(
        "SB, fence.sc out of scope", "Dat3M Manual/SB+sc-cta-outScope", filled(SB, "sc.cta", "sc.cta"), "r=0 s=0", True
    ),
    Litmus(
        "SB, fence.acq_rel", "Dat3M Manual/SB+acq_rel-cta", filled(SB, "acq_rel.gpu", "acq_rel.gpu"), "r=0 s=0", True
    ),
    Litmus(
        "SB by atomic additions",
        "Dat3M Nvidia/Atom-SB",
        two("atom.acq_rel.gpu p x 1; atom.acq_rel.gpu r y 1", "atom.acq_rel.gpu q y 1; atom.acq_rel.gpu s x 1"),
        "r=0 s=0",
        False,
    ),
    Litmus(
        "SB over a barrier",
        "Dat3M Manual/SB+bar-const-equal",
        two("st.weak x 1; bar 0; ld.weak r y", "st.weak y 1; bar 0; ld.weak s x", "cta"),
        "r=0",
        False,
    ),
    Litmus(
        "SB, two barriers",
        "Dat3M Manual/SB+bar-const-diff",
        two("st.weak x 1; bar 0; ld.weak r y", "st.weak y 1; bar 1; ld.weak s x", "cta"),
        "r=0 s=0",
        True,
    ),
    Litmus(
        "SB, a barrier's number in two CTAs",
        "Dat3M Manual/SB+bar-diff-cta",
        two("st.weak x 1; bar 0; ld.weak r y", "st.weak y 1; bar 0; ld.weak s x"),
        "r=0 s=0",
        True,
    ),
    Litmus(
        "MP over a barrier",
        "Dat3M Barrier/barrier-inscope",
        two("st.weak x 1; bar 0", "bar 0; ld.weak r x", "cta"),
        "r=0",
        False,
    ),
    Litmus(
        "a load before a barrier, a store behind it",
        "Dat3M Manual/PC-bar-sync-sync-1",
        two("ld.weak r x; bar 0", "bar 0; st.weak x 1", "cta"),
        "r=1",
        False,
    ),
    Litmus(
        "a barrier that one thread does not reach",
        "axioms: none is needed",
        two("bar 0", "poll.relaxed.cta r x =1; bar 0", "cta"),
        "stuck",
        True,
    ),
    # Load buffering
    Litmus(
        "LB, relaxed",
        "axioms: no thin air needs dependencies",
        two("ld.relaxed.gpu r x; st.relaxed.gpu y 1", "ld.relaxed.gpu s y; st.relaxed.gpu x 1"),
        "r=1 s=1",
        True,
    ),
    Litmus(
        "LB, release and acquire",
        "axioms: causality",
        two("ld.acquire.gpu r x; st.release.gpu y 1", "ld.acquire.gpu s y; st.release.gpu x 1"),
        "r=1 s=1",
        False,
    ),
    Litmus(
        "LB with data dependencies",
        "ISA No-Thin-Air; Dat3M Manual/LB+NoThinAir-register",
        two("ld.weak r x; st.weak y $r", "ld.weak s y; st.weak x $s"),
        "r!=0",
        False,
    ),
    Litmus(
        "LB with branches",
        "ISA No-Thin-Air",
        two("ld.weak r x; use r; st.weak y 1", "ld.weak s y; use s; st.weak x 1"),
        "r=1 s=1",
        False,
    ),
    # Coherence
    Litmus(
        "CoRR, relaxed",
        "ISA SC-per-Location",
        two("st.relaxed.gpu x 1", "ld.relaxed.gpu r x; ld.relaxed.gpu s x"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "CoRR, weak",
        "Dat3M Manual/CoRR-weak-weak",
        two("st.release.gpu x 1", "ld.weak r x; ld.weak s x"),
        "r=1 s=0",
        True,
    ),
    Litmus(
        "CoRR, acquire and weak",
        "Dat3M Manual/CoRR-acquire-weak",
        two("st.release.gpu x 1", "ld.acquire.gpu r x; ld.weak s x"),
        "r=1 s=0",
        False,
    ),
    Litmus(
        "CoRW",
        "Dat3M Manual/CoRW-R",
        two("st.release.sys x 1", "ld.acquire.sys r x; st.weak x 2; ld.weak s x"),
        "r=1 s=1",
        False,
    ),
    Litmus(
        "CoWW, read by weak loads",
        "Dat3M Manual/CoWW-RR",
        two("st.weak x 1; st.weak x 2", "ld.weak r x; ld.weak s x", "cta"),
        "r=2 s=1",
        True,
    ),
    Litmus(
        "CoWW, the last value", "Dat3M Manual/CoWW_", two("st.weak x 1; st.weak x 2", "ld.weak r x"), "[x]=1", False
    ),
    Litmus(
        "two readers agree on the order of strong writes",
        "Dat3M Manual/Coherence",
        "P 0.0: st.relaxed.sys x 1\nQ 0.0: st.relaxed.sys x 2\nR 0.0: ld.acquire.sys a x; ld.acquire.sys b x\n"
        "S 0.0: ld.acquire.sys c x; ld.acquire.sys d x",
        "a=1 b=2 c=2 d=1",
        False,
    ),
    Litmus(
        "two readers need not agree on the order of weak writes",
        "Dat3M Manual/Coherence-weak",
        "P 0.0: st.weak x 1\nQ 0.0: st.weak x 2\nR 0.0: ld.acquire.sys a x; ld.acquire.sys b x\n"
        "S 0.0: ld.acquire.sys c x; ld.acquire.sys d x",
        "a=1 b=2 c=2 d=1",
        True,
    ),
    # Others
    Litmus(
        "IRIW by acquire",
        "axioms: none orders two independent writes",
        "P 0.0: st.relaxed.sys x 1\nQ 1.0: st.relaxed.sys y 1\nR 2.0: ld.acquire.sys a x; ld.acquire.sys b y\n"
        "S 3.0: ld.acquire.sys c y; ld.acquire.sys d x",
        "a=1 b=0 c=1 d=0",
        True,
    ),
    Litmus(
        "IRIW by fence.sc",
        "axioms: Fence-SC, Causality",
        "P 0.0: st.relaxed.sys x 1\nQ 1.0: st.relaxed.sys y 1\n"
        "R 2.0: ld.relaxed.sys a x; fence.sc.sys; ld.relaxed.sys b y\n"
        "S 3.0: ld.relaxed.sys c y; fence.sc.sys; ld.relaxed.sys d x",
        "a=1 b=0 c=1 d=0",
        False,
    ),
    Litmus(
        "2+2W, relaxed",
        "axioms: Coherence is of one location",
        two("st.relaxed.gpu x 1; st.relaxed.gpu y 2", "st.relaxed.gpu y 1; st.relaxed.gpu x 2"),
        "[x]=1 [y]=1",
        True,
    ),
    Litmus(
        "2+2W by fence.sc",
        "axioms: Fence-SC, Coherence",
        two(
            "st.relaxed.gpu x 1; fence.sc.gpu; st.relaxed.gpu y 2",
            "st.relaxed.gpu y 1; fence.sc.gpu; st.relaxed.gpu x 2",
        ),
        "[x]=1 [y]=1",
        False,
    ),
    Litmus(
        "two additions in scope",
        "ISA Atomicity, 1",
        two("atom.relaxed.sys r x 1", "atom.relaxed.sys s x 1"),
        "[x]=1",
        False,
    ),
    Litmus(
        "two additions out of scope",
        "ISA Atomicity, 2",
        two("atom.relaxed.cta r x 1", "atom.relaxed.gpu s x 1"),
        "[x]=1",
        True,
    ),
]
