"""nvx's speed goals in one table, and their evaluation against measured figures.

A goal limits nvx's time relative to other backends in the same run: ratios hold on any machine, absolute times do
not. "The call" is torch's own overhead, measured over a backend that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nvx.bench.sizes import show_size

NVX = "nvx"
KI, MI = 1 << 10, 1 << 20
Find = Callable[[str], float | None]  # a contender's time in microseconds, None if it was not there


@dataclass(frozen=True)
class Bound:
    """The limit: call + plus_us + share x (the fastest of peers)."""

    share: float = 0.0
    peers: tuple[str, ...] = ()
    call: bool = False
    plus_us: float = 0.0

    def text(self) -> str:
        terms = ["the call"] if self.call else []
        terms += [f"{self.plus_us:g} us"] if self.plus_us else []
        if self.peers:
            whose = self.peers[0] if len(self.peers) == 1 else "the faster of " + " and ".join(self.peers)
            terms.append(whose if self.share == 1 else f"1/{1 / self.share:.3g} of {whose}")
        return " + ".join(terms)

    def reached(self, measured: float | None, find: Find) -> str:
        """The measured time in the terms of the bound."""
        there = [time for time in map(find, self.peers) if time is not None]
        call = find("null") if self.call else 0.0
        if measured is None or call is None or (self.peers and not there):
            return ""
        rest = measured - call
        terms = ["the call"] if self.call else []
        if self.peers:
            name = next(peer for peer in self.peers if find(peer) == min(there))
            share = rest / min(there)
            terms.append(f"1/{1 / share:.3g} of {name}" if 0 < share < 1 else f"{share:.3g} x {name}")
        else:
            terms.append(f"{rest:.2f} us")
        return " + ".join(terms)

    def microseconds(self, find: Find) -> tuple[float | None, str]:
        """(the limit, the missing contenders); None if the limit is not known."""
        total = self.plus_us
        if self.call:
            null = find("null")
            if null is None:
                return None, "null"
            total += null
        if not self.peers:
            return total, ""
        times = {peer: find(peer) for peer in self.peers}
        there = [time for time in times.values() if time is not None]
        missing = ", ".join(peer for peer, time in times.items() if time is None)
        return (total + self.share * min(there) if there else None), missing


@dataclass(frozen=True)
class Goal:
    """One goal, a line of the verdict."""

    what: str
    ranks: int
    size: int
    bound: Bound
    hosts: int = 1

    @property
    def title(self) -> str:
        size = "" if self.what == "barrier" else f", {show_size(self.size)}"
        return f"{self.what}, {self.ranks} ranks{f' {self.hosts} hosts' if self.hosts > 1 else ''}{size}"


def _against_gloo(what: Iterable[str], ranks: int, over: Mapping[int, float], hosts: int = 1) -> list[Goal]:
    return [
        Goal(name, ranks, size, Bound(1 / times, ("gloo",)), hosts) for name in what for size, times in over.items()
    ]


SMALL = (8, 4 * KI, 64 * KI)
FASTEST = ("deepspeed", "mpi")
COLLECTIVE_GOALS: tuple[Goal, ...] = (
    Goal("all_reduce", 2, 8, Bound(call=True, plus_us=1.5)),
    Goal("all_reduce", 2, 4 * KI, Bound(call=True, plus_us=3)),
    Goal("all_reduce", 2, 64 * KI, Bound(1, ("deepspeed",), call=True)),
    Goal("all_reduce", 2, MI, Bound(1 / 1.3, ("deepspeed",), call=True)),
    Goal("all_reduce", 2, 16 * MI, Bound(1 / 1.2, FASTEST)),
    Goal("all_reduce", 2, 16 * MI, Bound(1 / 5, ("gloo",))),
    Goal("all_reduce", 2, 64 * MI, Bound(1 / 1.6, FASTEST)),
    Goal("all_reduce", 2, 64 * MI, Bound(1 / 4, ("gloo",))),
    *_against_gloo(
        ("reduce", "all_gather", "reduce_scatter"), 2,
        dict.fromkeys(SMALL, 15) | {MI: 5, 16 * MI: 3, 64 * MI: 3},
    ),
    *_against_gloo(
        ("broadcast", "all_to_all", "scatter", "gather"), 2,
        dict.fromkeys(SMALL, 10) | {MI: 3, 16 * MI: 2, 64 * MI: 2},
    ),
    *_against_gloo(("sendrecv",), 2, dict.fromkeys(SMALL, 4) | {MI: 3, 16 * MI: 2, 64 * MI: 2}),
    *_against_gloo(("barrier",), 2, {0: 15}),
    *_against_gloo(
        ("all_reduce", "all_gather", "reduce_scatter"), 4, dict.fromkeys(SMALL, 15) | {MI: 10, 16 * MI: 3}
    ),
    *_against_gloo(("barrier",), 4, {0: 15}),
)  # fmt: skip

# Between hosts the kernel's TCP is the bound: a raw socket's rate over one connection, in both directions at once.
SOCKET = ("socket",)
HOST_GOALS: tuple[Goal, ...] = (
    *(Goal("all_reduce", 2, size, Bound(call=True, plus_us=15), 2) for size in (8, KI)),
    *_against_gloo(("all_reduce",), 2, {8: 6, KI: 6, 64 * KI: 2, MI: 1.5, 16 * MI: 1.3}, 2),
    Goal("all_reduce", 2, 16 * MI, Bound(1 / 0.85, SOCKET), 2),
    *_against_gloo(
        ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv"), 2,
        {8: 4, KI: 4, MI: 1.3, 16 * MI: 1.3}, 2,
    ),
    *_against_gloo(("all_reduce",), 4, {8: 4, KI: 4, 64 * KI: 4, 16 * MI: 1.5}, 2),
)  # fmt: skip

STEP_SHARE = 1 / 2  # of gloo's time, for a DDP and an FSDP2 step
INIT_SHARE = 1.0  # of gloo's time, for init_process_group and the first collective
GROUP_BYTES = MI  # resident a rank and group, before use, and after it when many groups share the staging
IDLE_CPU_SHARE = 0.001  # of a core: the error of reading the clock at both ends
SLOWED_ALLOWANCE = 0.0  # beyond the slowdown of a matrix product beside gloo's all_reduce


@dataclass(frozen=True)
class Verdict:
    """A goal and its result. `measured` and `limit` are in `unit`; `ok` is None if the goal cannot be judged."""

    title: str
    bound: str
    measured: float | None
    limit: float | None
    unit: str
    note: str = ""
    reached: str = ""

    @property
    def ok(self) -> bool | None:
        if self.measured is None or self.limit is None:
            return None
        return self.measured <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {
            "goal": self.title,
            "at_most": self.bound,
            "reached": self.reached,
            "measured": self.measured,
            "limit": self.limit,
            "unit": self.unit,
            "ok": self.ok,
            "note": self.note,
        }

    def line(self) -> str:
        word = {True: "ok", False: "short", None: "not judged"}[self.ok]
        numbers = ("-" if value is None else f"{value:,.2f}" for value in (self.measured, self.limit))
        measured, limit = numbers
        return (
            f"  {self.title:<38}  {measured:>12}  {limit:>12} {self.unit:<3}  {word:<10}  {self.bound:<40}  "
            f"{self.reached}{f' ({self.note})' if self.note else ''}"
        ).rstrip()


HEADER = f"# {'goal':<38}  {'measured':>12}  {'at most':>12} {'':<3}  {'verdict':<10}  {'which is':<40}  reached"


def _verdict(title: str, bound: Bound, find: Find, subject: str) -> Verdict:
    measured = find(subject)
    limit, missing = bound.microseconds(find)
    note = f"no {missing}" if missing else ""
    return Verdict(title, bound.text(), measured, limit, "us", note, bound.reached(measured, find))


def judge_collectives(
    results: list[dict[str, Any]], subject: str = NVX, table: tuple[Goal, ...] = COLLECTIVE_GOALS
) -> list[Verdict]:
    """Judges every goal of a table of collectives by the results of the sweeps."""
    times: dict[tuple[str, int, int, str], float] = {}
    for result in results:
        key = (result["collective"], result["ranks"], result["size"], result["backend"])
        times.setdefault(key, result["time_us"])  # the first variant is torch's usual call
    verdicts = []
    for goal in table:

        def find(backend: str, goal: Goal = goal) -> float | None:
            return times.get((goal.what, goal.ranks, _real_size(goal), backend))

        verdicts.append(_verdict(goal.title, goal.bound, find, subject))
    return verdicts


def _real_size(goal: Goal) -> int:
    """8 bytes are two floats. With four ranks, a message in blocks holds at least one float a rank."""
    return max(goal.size, 4 * goal.ranks) if goal.what in ("all_gather", "reduce_scatter") else goal.size


def _by_backend(results: list[dict[str, Any]], value: str, **where: str) -> Callable[[str], float | None]:
    chosen = [each for each in results if all(each[key] == wanted for key, wanted in where.items())]
    return lambda backend: next((each[value] for each in chosen if each["backend"] == backend), None)


def judge_steps(results: list[dict[str, Any]], subject: str = NVX) -> list[Verdict]:
    """Judges training steps against gloo's."""
    out = []
    for kind in ("ddp", "fsdp2"):
        find = _by_backend(results, "time_us", kind=kind)
        out.append(_verdict(f"{kind} step, 2 ranks", Bound(STEP_SHARE, ("gloo",)), find, subject))
    return out


def judge_init(results: list[dict[str, Any]], subject: str = NVX) -> list[Verdict]:
    find = _by_backend(results, "fresh_us")
    return [_verdict("init and first collective", Bound(INIT_SHARE, ("gloo",)), find, subject)]


def judge_overlap(results: list[dict[str, Any]], subject: str = NVX) -> list[Verdict]:
    find = _by_backend(results, "product_us")
    gloo = find("gloo")
    limit = None if gloo is None else gloo * (1 + SLOWED_ALLOWANCE)
    return [Verdict("product beside all_reduce", "the product beside gloo's", find(subject), limit, "us")]


def judge_memory(results: list[dict[str, Any]], idle_seconds: float, subject: str = NVX) -> list[Verdict]:
    rows = (
        ("group_bytes", "an idle group, unused"),
        ("used_small_group_bytes", "an idle group, after 8 B"),
        ("used_group_bytes", "an idle group, after large use"),
    )
    out = []
    for key, title in rows:
        measured = _by_backend(results, key)(subject)
        kib = None if measured is None else measured / KI
        out.append(Verdict(title, "resident a rank and group", kib, GROUP_BYTES / KI, "KiB"))
    for key, title in (("idle_cpu_s", "idle groups, unused"), ("used_idle_cpu_s", "idle groups, used")):
        measured = _by_backend(results, key)(subject)
        share = None if measured is None else 100 * measured / idle_seconds
        out.append(Verdict(title, "CPU time of its threads", share, 100 * IDLE_CPU_SHARE, "%"))
    return out
