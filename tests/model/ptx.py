"""The memory model of PTX (ISA 8.x and later, "Memory Consistency Model"), decided exhaustively for small programs.

A program is text, a line a thread: `NAME gpu.cta: instruction; instruction`. Values are numbers or words; `init x=1`
sets other initial values than 0. Instructions, where SEM is weak, relaxed, acquire or release, SCOPE cta, gpu or sys,
and TEST =1, >=1 or :1 (a stamp, as in a:1):

    st.SEM.SCOPE x 1          st ... x $r stores a register
    ld.SEM.SCOPE r x          poll.SEM.SCOPE r x TEST repeats the load until the test holds
    atom.SEM.SCOPE r x 1      adds; SEM may be acq_rel
    fence.SEM.SCOPE           acq_rel or sc
    bar 0                     the barrier 0 of the threads of this CTA that name it
    use r                     a branch that depends on r
    if r TEST                 the thread ends here if the test does not hold

find() looks for an execution with an outcome. Outcomes beside values: `stuck`, a poll or a barrier never ends; `done`,
all threads come to their ends; `race`, a read sees a write that is neither morally strong with it nor before it in
causality order, so it may see parts of it only.
"""

import itertools
import re
from dataclasses import dataclass

WIDTH = {"cta": 2, "gpu": 1, "sys": 0}  # how many parts of the place gpu.cta two threads of a scope have in common


@dataclass
class Event:
    thread: int
    kind: str  # R, W, F, B
    text: str
    sem: str = "weak"
    scope: str = "sys"
    loc: str = ""
    value: object = None  # of a write: a constant, or ("reg", name), or ("add", event of the read, number)
    register: str = ""
    test: str = ""
    is_last_poll: bool = True  # false: a poll that never ends

    def is_strong(self):
        return self.kind in "FB" or (self.kind in "RW" and self.sem != "weak")


@dataclass
class Thread:
    name: str
    place: tuple
    code: list  # instructions, each a list of words


def parse(text):
    """(threads, initial values) of a program."""
    threads, init = [], {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("init "):
            init |= {name: number(value) for name, value in (pair.split("=") for pair in line.split()[1:])}
            continue
        head, _, body = line.partition(":")
        name, place = head.split()
        code = [one.split() for one in body.split(";") if one.strip()]
        threads.append(Thread(name, tuple(place.split(".")), code))
    return threads, init


def number(word):
    return int(word) if re.fullmatch(r"-?\d+", word) else word


def holds(test, value):
    """Whether a poll with this test ends with this value."""
    if test.startswith(":"):
        return str(value).rpartition(":")[2] == test[1:]
    if test.startswith(">="):
        return value >= number(test[2:])
    return value == number(test[1:])


class Path:
    """The operations of the threads, some of which end early. `stops` has for each thread the index of a poll that
    never ends or of an `if` that does not hold, or None."""

    def __init__(self, threads, init, stops):
        self.threads, self.events, self.stops = threads, [], stops
        self.po, self.dep, self.barriers, self.rmw = [], [], [], {}
        self.last = {}  # register -> event of its read
        self.branches = []  # (event of a read, test, whether it holds)
        self.inits = {}
        accesses = [words for t in threads for words in t.code if words[0].startswith(("st", "ld", "poll", "atom"))]
        names = {words[1 if words[0].startswith("st") else 2] for words in accesses}
        for loc in sorted(names | set(init)):
            self.inits[loc] = self.add(Event(-1, "W", "init", loc=loc, value=init.get(loc, 0)), 0)
        self.own = [0] * len(threads)  # the events of a thread so far
        self.gates = [0] * len(threads)  # the reads that decide whether it goes on
        self.at = [0] * len(threads)
        self.ended = [False] * len(threads)
        self.complete = self.walk()

    def add(self, event, dep):
        self.events.append(event)
        self.po.append(0)
        self.dep.append(dep)  # by the dependent event: what it depends on
        return len(self.events) - 1

    def put(self, t, event, dep=0):
        i = self.add(event, self.gates[t] | dep)
        for j in bits(self.own[t]):
            self.po[j] |= 1 << i
        self.own[t] |= 1 << i
        return i

    def walk(self):
        """Runs all threads as far as they go. Returns whether all come to their ends; None if a stop is not met."""
        moved = True
        while moved:
            for t in range(len(self.threads)):
                self.advance(t)
            moved = self.pass_barriers()
        if any(s is not None and s != at for s, at in zip(self.stops, self.at, strict=True)):
            return None
        return all(
            self.at[t] == len(thread.code) or thread.code[self.at[t]][0] == "if"
            for t, thread in enumerate(self.threads)
        )

    def advance(self, t):
        code = self.threads[t].code
        while not self.ended[t] and self.at[t] < len(code) and code[self.at[t]][0] != "bar":
            self.ended[t] = self.stops[t] == self.at[t]
            self.execute(t, code[self.at[t]], not self.ended[t])
            self.at[t] += not self.ended[t]

    def execute(self, t, words, goes_on):
        what, *rest = words[0].split(".")
        text = " ".join(words)
        if what in ("use", "if"):
            self.gates[t] |= 1 << self.last[words[1]]
            self.branches += [(self.last[words[1]], words[2], goes_on)] if what == "if" else []
            return
        sem, scope = rest[0], rest[1] if len(rest) > 1 else "sys"
        if what == "fence":
            self.put(t, Event(t, "F", text, sem, scope))
        elif what == "st":
            value, dep = number(words[2]), 0
            if words[2].startswith("$"):
                value, dep = ("reg", self.last[words[2][1:]]), 1 << self.last[words[2][1:]]
            self.put(t, Event(t, "W", text, sem, scope, words[1], value), dep)
        else:
            reads = {"acq_rel": "acquire", "release": "relaxed"}.get(sem, sem)
            test = words[3] if what == "poll" else ""
            r = self.put(t, Event(t, "R", text, reads, scope, words[2], None, words[1], test, goes_on))
            if goes_on:
                self.last[words[1]] = r
            if what == "poll":
                self.gates[t] |= 1 << r
            if what == "atom":
                writes = {"acq_rel": "release", "acquire": "relaxed"}.get(sem, sem)
                value = ("add", r, number(words[3]))
                self.rmw[r] = self.put(t, Event(t, "W", text, writes, scope, words[2], value), 1 << r)

    def pass_barriers(self):
        passed = False
        groups = {}
        for t, thread in enumerate(self.threads):
            for words in thread.code:
                if words[0] == "bar":
                    groups.setdefault((thread.place, words[1]), set()).add(t)
        for (_, name), group in groups.items():
            here = [t for t in group if self.threads[t].code[self.at[t] :][:1] == [["bar", name]]]
            if len(here) == len(group):
                gate = 0
                for t in here:
                    gate |= self.gates[t]
                self.barriers.append([self.put(t, Event(t, "B", f"bar {name}")) for t in here])
                for t in here:
                    self.gates[t] = gate
                    self.at[t] += 1
                passed = True
        return passed


def bits(mask):
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def close(relation):
    """The transitive closure, in place."""
    for k in range(len(relation)):
        for i in range(len(relation)):
            if relation[i] >> k & 1:
                relation[i] |= relation[k]
    return relation


def is_cyclic(relation):
    return any(successors >> i & 1 for i, successors in enumerate(close(list(relation))))


class Judge:
    """Decides which choices of a path's reads-from and coherence orders the axioms allow."""

    def __init__(self, path):
        self.path, self.events, self.n = path, path.events, len(path.events)
        e = self.events
        self.reads = [i for i in range(self.n) if e[i].kind == "R"]
        self.writes = [i for i in range(self.n) if e[i].kind == "W"]
        self.strong = [[self.morally_strong(i, j) for j in range(self.n)] for i in range(self.n)]
        self.static = list(path.po)
        for group in path.barriers:
            for i, j in itertools.permutations(group, 2):
                self.static[i] |= 1 << j
        self.scs = [(i, j) for i, j in itertools.combinations(range(self.n), 2) if self.are_sc(i, j)]
        self.sources = {r: self.sources_of(r, close(list(self.static))) for r in self.reads}
        self.releases = [(a, w) for a in range(self.n) for w in self.writes if self.is_release(a, w)]
        self.acquires = {r: [b for b in range(self.n) if self.is_acquire(r, b)] for r in self.reads}

    def morally_strong(self, i, j):
        a, b = self.events[i], self.events[j]
        if i == j or (a.loc and b.loc and a.loc != b.loc):
            return False
        if a.thread == b.thread and a.thread >= 0:
            return True
        if not (a.is_strong() and b.is_strong()):
            return False
        places = [self.path.threads[x.thread].place for x in (a, b)]
        width = max(WIDTH[a.scope], WIDTH[b.scope])
        return places[0][:width] == places[1][:width]

    def are_sc(self, i, j):
        return self.events[i].sem == self.events[j].sem == "sc" and self.strong[i][j]

    def sources_of(self, r, before):
        """The writes that a read may read from, by barriers and program order."""
        read, found = self.events[r], []
        for w in self.writes:
            write = self.events[w]
            if write.loc != read.loc or before[r] >> w & 1 or w == self.path.rmw.get(r):
                continue
            is_over = [v for v in self.writes if self.events[v].loc == read.loc and before[v] >> r & 1]
            if any(before[w] >> v & 1 or (w == self.path.inits[read.loc] and v != w) for v in is_over):
                continue
            if read.test and not isinstance(write.value, tuple) and holds(read.test, write.value) != read.is_last_poll:
                continue
            found.append(w)
        return found

    def is_release(self, a, w):
        """Whether a release at a, and the write w behind it, form a release pattern."""
        return self.events[w].is_strong() and self.is_pattern(self.events[a], "W", "release", a, w, self.events[w].loc)

    def is_acquire(self, r, b):
        return self.events[r].is_strong() and self.is_pattern(self.events[b], "R", "acquire", r, b, self.events[r].loc)

    def is_pattern(self, one, kind, sem, first, last, loc):
        """A fence, or an operation of this kind at the same location; `first` is it or comes before `last`."""
        follows = bool(self.path.po[first] >> last & 1)
        if one.kind == "F":
            return follows
        return one.kind == kind and one.sem == sem and one.loc == loc and (follows or first == last)

    def values(self, rf):
        """The value of each read; None if a value depends on itself (no thin air)."""
        graph = [0] * self.n
        for i, causes in enumerate(self.path.dep):
            for j in bits(causes):
                graph[j] |= 1 << i
        for r, w in rf.items():
            graph[w] |= 1 << r
        if any(w > r for r, w in rf.items()) and is_cyclic(graph):
            return None
        known = {}

        def written(w):
            value = self.events[w].value
            if not isinstance(value, tuple):
                return value
            return read(value[1]) if value[0] == "reg" else read(value[1]) + value[2]

        def read(r):
            if r not in known:
                known[r] = written(rf[r])
            return known[r]

        for r in self.reads:
            read(r)
        self.written = written
        return known

    def causes(self, rf, sc):
        """(base causality, causality) under an order of the fence.sc, a tuple of pairs."""
        observed = [0] * self.n
        for r, w in rf.items():
            if self.strong[w][r]:
                observed[w] |= 1 << r
        for r, w in self.path.rmw.items():
            observed[r] |= 1 << w
        close(observed)
        base = list(self.static)
        for a, w in self.releases:
            for r in bits(observed[w]):
                for b in self.acquires.get(r, ()):
                    if self.strong[a][b]:
                        base[a] |= 1 << b
        for a, b in sc:
            base[a] |= 1 << b
        close(base)
        cause = list(base)
        for w in self.writes:
            for r in bits(observed[w]):
                cause[w] |= base[r]
        return cause

    def orders_of_fences(self):
        for flips in itertools.product((False, True), repeat=len(self.scs)):
            yield tuple((b, a) if flip else (a, b) for (a, b), flip in zip(self.scs, flips, strict=True))

    def is_allowed(self, rf, wanted, race):
        """Whether an execution with these reads, the wanted last values, and a race if it is wanted, satisfies all
        axioms."""
        for sc in self.orders_of_fences():
            cause = self.causes(rf, sc)
            if any(cause[r] >> w & 1 for r, w in rf.items()):
                continue  # Causality: a read of what it causes
            if any(cause[b] >> a & 1 for a, b in sc):
                continue  # Fence-SC
            if race and not any(self.is_race(r, w, cause) for r, w in rf.items()):
                continue
            if all(self.is_coherent(loc, rf, cause, wanted.get(loc)) for loc in self.path.inits):
                return True
        return False

    def is_race(self, r, w, cause):
        return self.events[w].thread >= 0 and not self.strong[w][r] and not cause[w] >> r & 1

    def is_coherent(self, loc, rf, cause, last):
        """Whether a coherence order of a location satisfies the axioms. They concern each location by itself."""
        first = self.path.inits[loc]
        writes = [w for w in self.writes if self.events[w].loc == loc]
        forced, free = [(first, w) for w in writes if w != first], []
        for a, b in itertools.combinations([w for w in writes if w != first], 2):
            ordered = [(x, y) for x, y in ((a, b), (b, a)) if cause[x] >> y & 1]
            forced += ordered
            if not ordered and self.strong[a][b]:
                free.append((a, b))
        for flips in itertools.product((False, True), repeat=len(free)):
            co = [0] * self.n
            for a, b in forced + [(b, a) if flip else (a, b) for (a, b), flip in zip(free, flips, strict=True)]:
                co[a] |= 1 << b
            close(co)
            if not any(co[w] >> w & 1 for w in writes) and self.is_sound(loc, rf, cause, co, last):
                return True
        return False

    def is_sound(self, loc, rf, cause, co, last):
        reads = [r for r in self.reads if self.events[r].loc == loc]
        fr = {r: co[rf[r]] & ~(1 << self.path.rmw[r] if r in self.path.rmw else 0) for r in reads}
        for r in reads:
            if any(cause[w] >> r & 1 for w in bits(fr[r])):
                return False  # Causality: a read of what was overwritten before
            if not self.events[r].is_last_poll and co[rf[r]]:
                return False  # a poll that never ends sees the last value
            if r in self.path.rmw:
                w = self.path.rmw[r]
                if any(self.strong[r][v] and self.strong[v][w] and co[v] >> w & 1 for v in bits(fr[r])):
                    return False  # Atomicity
        graph = [0] * self.n  # SC per location
        for i in range(self.n):
            if self.events[i].loc == loc:
                graph[i] = sum(1 << j for j in bits(self.path.po[i]) if self.events[j].loc == loc)
                graph[i] |= sum(1 << j for j in bits(co[i] | fr.get(i, 0)) if self.strong[i][j])
        for r in reads:
            if self.strong[rf[r]][r]:
                graph[rf[r]] |= 1 << r
        if is_cyclic(graph):
            return False
        ends = [self.written(w) for w in self.writes if self.events[w].loc == loc and not co[w]]
        return last is None or any(last(value) for value in ends)


def conditions(text):
    """(conditions of registers, of last values, other words) from such as `r=1 s!=a:1 [x]=2 stuck`."""
    registers, places, words = {}, {}, set()
    for word in text.split():
        if word in ("stuck", "done", "race"):
            words.add(word)
            continue
        name, negated, value = re.fullmatch(r"(\[?\w+\]?)(!?)=(\S+)", word).groups()
        value = number(value)
        test = (lambda seen, value=value: seen != value) if negated else (lambda seen, value=value: seen == value)
        (places if name.startswith("[") else registers)[name.strip("[]")] = test
    return registers, places, words


def paths(threads, init):
    ends = [[None, *(i for i, w in enumerate(t.code) if w[0].startswith("poll") or w[0] == "if")] for t in threads]
    for stops in itertools.product(*ends):
        path = Path(threads, init, stops)
        if path.complete is not None:
            yield path


def find(text, outcome):
    """An execution of a program with this outcome, as text; None if the model forbids it."""
    threads, init = parse(text)
    registers, places, words = conditions(outcome)
    for path in paths(threads, init):
        if path.complete and "stuck" in words or not path.complete and "done" in words:
            continue
        if not set(registers) <= set(path.last):
            continue
        judge = Judge(path)
        for chosen in itertools.product(*judge.sources.values()):
            rf = dict(zip(judge.reads, chosen, strict=True))
            values = judge.values(rf)
            if values is None or not all(test(values[path.last[name]]) for name, test in registers.items()):
                continue
            polls = [
                (r, judge.events[r].test, judge.events[r].is_last_poll) for r in judge.reads if judge.events[r].test
            ]
            if all(holds(test, values[r]) == so for r, test, so in polls + path.branches) and judge.is_allowed(
                rf, places, "race" in words
            ):
                return described(path, rf, values)
    return None


def described(path, rf, values):
    lines = []
    for t, thread in enumerate(path.threads):
        for i, event in enumerate(path.events):
            if event.thread != t or (event.kind == "W" and i in path.rmw.values()):
                continue
            came = ""
            if event.kind == "R":
                source = path.events[rf[i]]
                owner = path.threads[source.thread].name + ": " if source.thread >= 0 else ""
                came = f"   reads {values[i]} of '{owner}{source.text}'" + ("" if event.is_last_poll else ", for ever")
            lines.append(f"  {thread.name}: {event.text}{came}")
        if path.at[t] < len(thread.code) and thread.code[path.at[t]][0] != "if":
            lines.append(f"  {thread.name} does not get beyond: {' '.join(thread.code[path.at[t]])}")
    return "\n".join(lines)
