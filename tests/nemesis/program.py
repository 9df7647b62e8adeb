"""A world's program: groups, calls and faults, as a pure function of the seed. And the results that calls must have.

All ranks go through the same steps; each makes the calls of the groups that it is in. `calls_of()` has the calls that a
rank makes in the end, with its faults. The k-th collective of a group on one rank matches the k-th on the others, as do
the k-th send and receive of a pair with one tag: that is how a result is known also where a rank left out a call.
"""

import random
from dataclasses import dataclass, replace

import torch

SYMMETRIC = ("all_reduce", "all_gather", "into_tensor", "reduce_scatter", "all_to_all", "all_to_all_v", "barrier")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MESSAGES = ("send", "exchange")
EXCHANGING = ("all_to_all", "all_to_all_v")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
DTYPES = ("float32", "int64", "bfloat16", "uint8", "float64", "int32")
OPS = ("sum", "min", "max")
COUNTS = (0, 1, 1, 7, 100, 100, 3000, 20_000, 70_001, 300_007)

DEADLY = ("SIGKILL", "SIGSEGV", "os._exit", "SIGKILL from outside")
LEAVING = ("leaves", "aborts", "destroys")
HARMLESS = ("late", "short stop", "short stop from outside", "bad argument")
DIFFERING = ("skips", "count", "dtype", "op", "root", "kind")
FAULTS = (*DEADLY, "SIGKILL", "os._exit", *LEAVING, *HARMLESS, *DIFFERING, "long stop")


@dataclass(frozen=True)
class Step:
    number: int
    kind: str
    group: int = 0
    count: int = 0
    dtype: str = "uint8"
    op: str = "sum"
    root: int = 0  # in the group; the source of a send
    peer: int = 0  # in the group; the target of a send
    tag: int = 0
    asynchronous: bool = False

    def alike(self):
        """All that ranks must call alike. A barrier has no data; an all-to-all has sizes of each pair's own."""
        if self.kind == "barrier":
            return (self.kind,)
        if self.kind in EXCHANGING:
            return "all_to_all", self.dtype
        kind = "all_gather" if self.kind == "into_tensor" else self.kind
        root = self.root if self.kind in ROOTED else 0
        return kind, self.count, self.dtype, self.op if self.kind in REDUCING else "", root

    def __str__(self):
        at = {"send": f"{self.root} -> {self.peer} tag {self.tag}", "exchange": f"tag {self.tag}"}
        rooted = f"root {self.root}" if self.kind in ROOTED else ""
        words = [self.kind, f"g{self.group}", f"{self.count} {self.dtype}", self.op if self.kind in REDUCING else ""]
        if self.kind in ("barrier", "wait", "new_group"):
            words = [self.kind, "" if self.kind == "wait" else f"g{self.group}"]
        words += [at.get(self.kind, rooted), "async" if self.asynchronous else ""]
        return f"{self.number:3}: " + " ".join(word for word in words if word)


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    step: int
    value: float = 0.0  # how many seconds it lasts
    after: float = 0.0  # for one from outside: so many seconds after the start, instead of at a step

    def __str__(self):
        when = f"{self.after * 1000:.0f} ms after the start" if "outside" in self.kind else f"at step {self.step}"
        return f"rank {self.rank}: {self.kind} {when}" + (f" for {self.value:.2f} s" if self.value else "")


@dataclass(frozen=True)
class Program:
    seed: int
    world: int
    hosts: int
    timeout: float
    groups: tuple  # of tuples of ranks; the first is the world. Those from `early` on are made by a step
    early: int
    steps: tuple
    faults: tuple

    def __str__(self):
        made = [f"g{i}: ranks {', '.join(map(str, m))}" for i, m in enumerate(self.groups)]
        head = f"seed {self.seed}: {self.world} ranks on {self.hosts} host(s), timeout {self.timeout:g} s"
        return "\n".join([head, *made, *map(str, self.faults), *map(str, self.steps)])

    def faults_of(self, rank, step):
        return [f for f in self.faults if f.rank == rank and f.step == step and "outside" not in f.kind]

    def surely_dead(self):
        """The ranks that die at a step, if the other faults are harmless."""
        dying = [f for f in self.faults if f.kind in DEADLY and "outside" not in f.kind]
        return sorted({f.rank for f in dying}) if all(f in dying or f.kind in HARMLESS for f in self.faults) else []


def make(seed, hosts=1, timeout=6.0, faults=None):
    """The program of a seed. `faults`: how many, instead of none to two by chance."""
    chance = random.Random(f"nvx {seed}")
    world = chance.choice([2, 2, 3, 3, 4])
    groups = [tuple(range(world))]
    for _ in range(chance.randint(0, 2)):
        groups.append(tuple(sorted(chance.sample(range(world), chance.randint(2, world)))))
    early, later = len(groups), chance.random() < 0.25
    if later:
        groups.append(groups[chance.randrange(early)])
    length = chance.randint(4, 30)
    made_at = chance.randrange(length // 2) if later else -1
    steps = []
    for number in range(length):
        known = early if number <= made_at or not later else len(groups)
        step = Step(number, "new_group", early) if number == made_at else random_step(chance, number, groups[:known])
        steps.append(step)
    count = chance.choices([0, 1, 2], [15, 70, 15])[0] if faults is None else faults
    chosen = tuple(random_fault(chance, steps, groups, timeout) for _ in range(count))
    return Program(seed, world, hosts, timeout, tuple(groups), early, tuple(steps), chosen)


def random_step(chance, number, groups):
    kind = chance.choice([*SYMMETRIC, "all_reduce", *ROOTED, *MESSAGES, "send", "wait"])
    group = chance.randrange(len(groups))
    root, peer = chance.sample(range(len(groups[group])), 2)
    return Step(
        number,
        kind,
        group,
        chance.choice(COUNTS),
        chance.choice(DTYPES),
        chance.choice(OPS),
        root,
        peer,
        chance.randrange(3),
        chance.random() < 0.4,
    )


def random_fault(chance, steps, groups, timeout):
    kind = chance.choice(FAULTS)
    rank = chance.randrange(len(groups[0]))
    own = [s for s in steps if rank in groups[s.group] and s.kind not in ("wait", "new_group")]
    if kind in DIFFERING and not any(takes_effect(s, kind, groups) for s in own):
        kind = "late"
    felt = [s.number for s in own if kind not in DIFFERING or takes_effect(s, kind, groups)]
    step = chance.choice(felt) if felt else 0
    lasts = {"short stop": (0.05, 0.5), "long stop": (timeout + 2, timeout + 2), "late": (0.02, 0.4)}
    value = chance.uniform(*lasts.get(kind.removesuffix(" from outside"), (0, 0)))
    after = chance.choice([0.02, 0.06, 0.25]) * chance.random() if "outside" in kind else 0.0
    return Fault(kind, rank, step, value, after)


# --- what a rank calls in the end ---------------------------------------------------------------------------


def changed(step, kind, size):
    """The step as a rank with that fault calls it."""
    if kind == "count":
        return replace(step, count=step.count + 1)
    if kind == "dtype":
        return replace(step, dtype="int32" if step.dtype != "int32" else "float32")
    if kind == "op":
        return replace(step, op="max" if step.op != "max" else "min")
    if kind == "root" and step.kind in ROOTED:
        return replace(step, root=(step.root + 1) % size)
    if kind == "kind" and step.kind in (*SYMMETRIC, *ROOTED):
        return replace(step, kind="all_reduce" if step.kind != "all_reduce" else "all_gather")
    return step


def takes_effect(step, kind, groups):
    """Whether a rank with that fault calls it differently."""
    other = changed(step, kind, len(groups[step.group]))
    sizes = step.kind in EXCHANGING and other.count != step.count
    return kind == "skips" or other.alike() != step.alike() or sizes


def calls_of(program, rank):
    """The steps that the rank begins, changed by its faults; after its end there are none."""
    gone = set()
    for step in program.steps:
        faults = program.faults_of(rank, step.number)
        if any(f.kind in (*DEADLY, "leaves") for f in faults):
            return
        if any(f.kind in ("aborts", "destroys") for f in faults):
            gone.add(step.group)
        if rank not in program.groups[step.group] or step.group in gone or any(f.kind == "skips" for f in faults):
            continue
        for fault in faults:
            step = changed(step, fault.kind, len(program.groups[step.group]))
        yield step


class Expected:
    """The results of the calls that succeed."""

    def __init__(self, program):
        self.program = program
        self.collectives, self.places, self.sends, self.receives = {}, {}, {}, {}
        for rank in range(program.world):
            for step in calls_of(program, rank):
                members = program.groups[step.group]
                if step.kind in (*SYMMETRIC, *ROOTED):
                    calls = self.collectives.setdefault((step.group, rank), [])
                    self.places[rank, step.number] = len(calls)
                    calls.append(step)
                elif step.kind in MESSAGES:
                    for source, target in transfers(step, members.index(rank), len(members)):
                        table = self.sends if members[source] == rank else self.receives
                        table.setdefault((step.group, source, target, step.tag), []).append(step)

    def of_collective(self, rank, step):
        """(whether success is possible, the result): a list of tensors."""
        members = self.program.groups[step.group]
        me, place = members.index(rank), self.places[rank, step.number]
        matched = {}
        for index in needed(step, me, len(members)):
            calls = self.collectives.get((step.group, members[index]), [])
            if place >= len(calls) or calls[place].alike() != step.alike():
                return False, []
            matched[index] = calls[place]
        if step.kind in EXCHANGING and any(
            len(part_of(matched[m], m, me)) != len(part_of(step, m, me)) for m in matched
        ):
            return False, []
        return True, result(step, me, matched, len(members))

    def of_receive(self, rank, step, source):
        members = self.program.groups[step.group]
        pair = step.group, source, members.index(rank), step.tag
        place = [s.number for s in self.receives[pair]].index(step.number)
        sent = self.sends.get(pair, [])
        if place >= len(sent) or (sent[place].count, sent[place].dtype) != (step.count, step.dtype):
            return False, []
        return True, [numbers(sent[place], source)]


def transfers(step, me, size):
    """(source, target) of the messages of a step at one member of the group. Of one to itself: none here."""
    if step.kind == "send":
        return [(step.root, step.peer)] if me in (step.root, step.peer) else []
    return [(me, (me + 1) % size), ((me - 1) % size, me)]


def needed(step, me, size):
    """The members without whose part this one's call cannot succeed."""
    if step.kind in SYMMETRIC or (step.kind in ("reduce", "gather") and me == step.root):
        return range(size)
    return [me, step.root] if step.kind in ("broadcast", "scatter") else [me]


def numbers(step, member, parts=1, salt=0):
    """A member's input: small whole numbers, so that sums are exact in every type and order."""
    count = step.count * parts
    return ((torch.arange(count) * 7 + member * 3 + step.number + salt) % 5).to(getattr(torch, step.dtype))


def part_of(step, source, target):
    """A member's part for another one in an all-to-all."""
    if step.kind == "all_to_all":
        return numbers(step, source, target + 1)[target * step.count :]
    return numbers(step, source, salt=target)[: (step.count * (source + 1) + target) % (step.count + 1)]


def total(step, matched, parts=1):
    all_of_them = torch.stack([numbers(matched[m], m, parts) for m in sorted(matched)])
    if step.op == "sum":
        return all_of_them.sum(0, dtype=all_of_them.dtype)
    return all_of_them.amin(0) if step.op == "min" else all_of_them.amax(0)


def result(step, me, matched, size):
    mine = slice(me * step.count, (me + 1) * step.count)
    if step.kind == "all_reduce" or (step.kind == "reduce" and me == step.root):
        return [total(step, matched)]
    if step.kind == "broadcast":
        return [numbers(matched[step.root], step.root)]
    if step.kind == "all_gather" or (step.kind == "gather" and me == step.root):
        return [numbers(matched[m], m) for m in range(size)]
    if step.kind == "into_tensor":
        return [torch.cat([numbers(matched[m], m) for m in range(size)])]
    if step.kind == "scatter":
        return [numbers(matched[step.root], step.root, size)[mine]]
    if step.kind == "reduce_scatter":
        return [total(step, matched, size)[mine]]
    if step.kind in EXCHANGING:
        parts = [part_of(matched[m], m, me) for m in range(size)]
        return [torch.cat(parts)] if step.kind == "all_to_all" else parts
    return []
