"""Random programs of collectives over shapes, dtypes, groups, sync and async, against a reference.

hypothesis makes a program once and every rank runs it. A step uses either fresh tensors, which are checked at the end,
or slots: tensors that later steps read and write again without a wait. Only the guaranteed order, that of issue in a
group, makes the results of slots right. Every rank simulates all slots.
"""

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import SEVERAL_HOSTS, on_ranks, only_nvx
from reference import (
    BITWISE,
    DTYPES,
    E8M0,
    OPS,
    assert_guards,
    assert_same,
    meaningful,
    placed,
    reduce_op,
    reduced,
    small_numbers,
)

GROUPS = {
    2: [[0, 1], [0, 1]],
    3: [[0, 1, 2], [0, 1], [1, 2], [0, 2], [0, 1, 2]],
    4: [[0, 1, 2, 3], [0, 3], [1, 2, 3], [0, 2], [1, 3]],
}
SLOTS = 3
counts = st.one_of(st.integers(0, 9), st.integers(0, 5000), st.sampled_from([4096, 65_536, 70_001, 300_007]))
dtypes = st.sampled_from([dtype for dtype in DTYPES if dtype is not E8M0 or not SEVERAL_HOSTS])  # its sums are inexact
# Every host rounds once, so over several hosts only results that are exact in small floats are the same.
ops = st.sampled_from(["sum", "min", "max", *BITWISE] if SEVERAL_HOSTS else [*OPS, *BITWISE, "premul_sum"])
FRESH = """all_reduce broadcast reduce all_gather into_tensor gather scatter reduce_scatter scatter_v
all_to_all all_to_all_v barrier send""".split()
ON_SLOTS = ["slot_all_reduce", "slot_broadcast", "slot_send", "slot_exchange"]

step = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(FRESH + ON_SLOTS * 2 + ["wait"]),
        "group": st.integers(0, 4),
        "count": counts,
        "offset": st.integers(0, 7),
        "dtype": dtypes,
        "op": ops,
        "root": st.integers(0, 3),
        "slots": st.tuples(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1)),
        "async_op": st.booleans(),
        "salt": st.integers(0, 5),
    }
)
programs = st.fixed_dictionaries(
    {
        "steps": st.lists(step, min_size=4, max_size=30),
        "slot_dtype": st.sampled_from([torch.int32, torch.uint8, torch.int64, torch.float32, torch.bfloat16]),
        "slot_count": st.sampled_from([12, 1200, 24_000, 240_000]),
    }
)


class ProgramRunner:
    """One rank's run through a program."""

    def __init__(self, rank, world, program):
        self.rank, self.world = rank, world
        self.members = GROUPS[world]
        self.groups = [
            dist.new_group(m) if m != list(range(world)) or i else dist.group.WORLD for i, m in enumerate(self.members)
        ]
        self.pending, self.checks, self.slot_works = [], [], [[] for _ in range(SLOTS)]
        count, dtype = program["slot_count"], program["slot_dtype"]
        self.simulated = [[small_numbers(dtype, count, r, 10 + s) for s in range(SLOTS)] for r in range(world)]
        self.slots = [t.clone() for t in self.simulated[rank]]

    def finish(self):
        for work in self.pending:
            work.wait()
        for slot in range(SLOTS):
            assert_same(self.slots[slot], self.simulated[self.rank][slot], f"slot {slot}")
        for check in self.checks:
            check()

    def run(self, number, s):
        if s["kind"] == "wait":
            for work in self.pending[s["salt"] % 2 :: 2]:
                work.wait()
            return
        index = s["group"] % len(self.groups)
        self.members_now, self.group = self.members[index], self.groups[index]
        self.size = len(self.members_now)
        self.what = f"step {number}: {s}"
        if not meaningful(s["dtype"], s["op"]):
            s = {**s, "op": "sum"}
        s = {**s, "root": self.members_now[s["root"] % self.size]}
        if s["kind"].startswith("slot"):
            getattr(self, s["kind"])(s, index)
        elif self.rank in self.members_now:
            self.me = self.members_now.index(self.rank)
            getattr(self, s["kind"])(s)

    # --- steps on slots

    def settle(self, slot, index):
        """Waits until other groups and sends, which have no order with collectives, have released a slot."""
        for owner, work in self.slot_works[slot]:
            if owner != index:
                work.wait()
        self.slot_works[slot] = [(o, w) for o, w in self.slot_works[slot] if o == index]

    def issued(self, work, index, *slots):
        if work is not None:
            self.pending.append(work)
            for slot in slots:
                self.slot_works[slot].append((index, work))

    def slot_all_reduce(self, s, index):
        slot, op = s["slots"][0], "max" if s["op"] in ("avg", "premul_sum", "product") else s["op"]
        if not meaningful(self.slots[slot].dtype, op):
            op = "sum"
        if self.rank in self.members_now:
            self.settle(slot, index)
            self.issued(dist.all_reduce(self.slots[slot], reduce_op(op), self.group, s["async_op"]), index, slot)
        total = reduced([self.simulated[r][slot] for r in self.members_now], op)
        for r in self.members_now:
            self.simulated[r][slot] = total

    def slot_broadcast(self, s, index):
        slot = s["slots"][0]
        if self.rank in self.members_now:
            self.settle(slot, index)
            self.issued(dist.broadcast(self.slots[slot], s["root"], self.group, s["async_op"]), index, slot)
        for r in self.members_now:
            self.simulated[r][slot] = self.simulated[s["root"]][slot]

    def slot_send(self, s, index):
        """Sends from a slot of the root to another slot of another member."""
        a, b = s["slots"]
        source, target = s["root"], self.members_now[(self.members_now.index(s["root"]) + 1) % self.size]
        if self.rank == source:
            self.settle(a, None)
            work = dist.isend(self.slots[a], target, self.group, tag=s["salt"])
            self.issued(work, -1, a)
        elif self.rank == target:
            self.settle(b, None)
            if s["async_op"]:
                self.issued(dist.irecv(self.slots[b], source, self.group, tag=s["salt"]), -1, b)
            else:
                dist.recv(self.slots[b], source, self.group, tag=s["salt"])
        self.simulated[target][b] = self.simulated[source][a]

    def slot_exchange(self, s, index):
        a, b = s["slots"]
        if a == b:
            return
        if self.rank in self.members_now:
            self.settle(a, index)
            self.settle(b, index)
            work = dist.all_to_all_single(self.slots[b], self.slots[a], group=self.group, async_op=s["async_op"])
            self.issued(work, index, a, b)
        parts = [self.simulated[r][a].chunk(self.size) for r in self.members_now]
        for place, r in enumerate(self.members_now):
            self.simulated[r][b] = torch.cat([p[place] for p in parts])

    # --- steps on fresh tensors

    def inputs(self, s, times=1):
        return [small_numbers(s["dtype"], s["count"] * times, r, s["salt"]) for r in range(self.size)]

    def output(self, s, count=None):
        return placed(torch.zeros(s["count"] if count is None else count, dtype=s["dtype"]), s["offset"])

    def expect(self, work, got, want):
        what = self.what

        def check():
            for tensor, value in zip(got, want, strict=True):
                assert_same(tensor, value, what)
                assert_guards(tensor, what)

        if work is not None:
            self.pending.append(work)
        self.checks.append(check)

    def all_reduce(self, s):
        inputs = self.inputs(s)
        tensor = placed(inputs[self.me], s["offset"])
        self.expect(
            dist.all_reduce(tensor, reduce_op(s["op"]), self.group, s["async_op"]),
            [tensor],
            [reduced(inputs, s["op"])],
        )

    def broadcast(self, s):
        inputs = self.inputs(s)
        tensor = placed(inputs[self.me], s["offset"])
        want = inputs[self.members_now.index(s["root"])]
        self.expect(dist.broadcast(tensor, s["root"], self.group, s["async_op"]), [tensor], [want])

    def reduce(self, s):
        inputs = self.inputs(s)
        tensor = placed(inputs[self.me], s["offset"])
        work = dist.reduce(tensor, s["root"], reduce_op(s["op"]), self.group, s["async_op"])
        at_root = self.rank == s["root"]
        self.expect(work, [tensor] if at_root else [], [reduced(inputs, s["op"])] if at_root else [])

    def all_gather(self, s):
        inputs = self.inputs(s)
        outputs = [self.output(s) for _ in inputs]
        self.expect(dist.all_gather(outputs, placed(inputs[self.me], 1), self.group, s["async_op"]), outputs, inputs)

    def into_tensor(self, s):
        inputs = self.inputs(s)
        output = self.output(s, s["count"] * self.size)
        work = dist.all_gather_into_tensor(output, inputs[self.me], self.group, s["async_op"])
        self.expect(work, [output], [torch.cat(inputs)])

    def gather(self, s):
        inputs = self.inputs(s)
        outputs = [self.output(s) for _ in inputs] if self.rank == s["root"] else None
        work = dist.gather(inputs[self.me], outputs, s["root"], self.group, s["async_op"])
        self.expect(work, outputs or [], inputs if outputs else [])

    def scatter(self, s):
        inputs = self.inputs(s)
        output = self.output(s)
        work = dist.scatter(output, inputs if self.rank == s["root"] else None, s["root"], self.group, s["async_op"])
        self.expect(work, [output], [inputs[self.me]])

    def reduce_scatter(self, s):
        inputs = self.inputs(s, times=self.size)
        output = self.output(s)
        work = dist.reduce_scatter_tensor(output, inputs[self.me], reduce_op(s["op"]), self.group, s["async_op"])
        mine = slice(self.me * s["count"], (self.me + 1) * s["count"])
        self.expect(work, [output], [reduced(inputs, s["op"])[mine]])

    def scatter_v(self, s):
        sizes = [(s["count"] + 3 * r) % 1000 for r in range(self.size)]
        parts = [
            [small_numbers(s["dtype"], sizes[r], source, r) for r in range(self.size)] for source in range(self.size)
        ]
        output = self.output(s, sizes[self.me])
        work = dist.reduce_scatter(output, parts[self.me], reduce_op(s["op"]), self.group, s["async_op"])
        self.expect(work, [output], [reduced([p[self.me] for p in parts], s["op"])])

    def all_to_all(self, s):
        inputs = self.inputs(s, times=self.size)
        output = self.output(s, s["count"] * self.size)
        work = dist.all_to_all_single(output, inputs[self.me], group=self.group, async_op=s["async_op"])
        mine = slice(self.me * s["count"], (self.me + 1) * s["count"])
        self.expect(work, [output], [torch.cat([t[mine] for t in inputs])])

    def all_to_all_v(self, s):
        def part(source, target):
            return small_numbers(s["dtype"], (s["count"] * (source + 1) + target) % 777, source, target)

        outputs = [self.output(s, part(r, self.me).numel()) for r in range(self.size)]
        sent = [part(self.me, r) for r in range(self.size)]
        work = dist.all_to_all(outputs, sent, self.group, s["async_op"])
        self.expect(work, outputs, [part(r, self.me) for r in range(self.size)])

    def barrier(self, s):
        self.expect(dist.barrier(self.group, s["async_op"]), [], [])

    def send(self, s):
        source, target = s["root"], self.members_now[(self.members_now.index(s["root"]) + 1) % self.size]
        want = self.inputs(s)[0]
        if self.rank == source:
            self.expect(dist.isend(placed(want, s["offset"]), target, self.group, tag=s["salt"]), [], [])
        elif self.rank == target:
            output = self.output(s)
            if s["async_op"]:
                self.expect(dist.irecv(output, source, self.group, tag=s["salt"]), [output], [want])
            else:
                dist.recv(output, source, self.group, tag=s["salt"])
                self.expect(None, [output], [want])


@only_nvx
@on_ranks(2)
def test_tensors_with_stand_ins_keep_the_order_of_issue(rank, world):
    """Strided tensors, and inputs within outputs, are read when an operation begins, not when it is called."""
    for last_is_async in (False, True):
        tensor = torch.ones(2, 3).t()
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        if rank == 1:
            time.sleep(0.05)  # rank 0 issues the next one while these wait
        works.append(dist.all_reduce(tensor, async_op=last_is_async))
        for work in works:
            if work is not None:
                work.wait()
        assert tensor.eq(2**4).all(), f"{tensor}, the last one async: {last_is_async}"
        whole = torch.zeros(6)
        mine = whole[1 + rank : 4 + rank]
        mine.fill_(1.0)
        if rank == 1:
            time.sleep(0.05)
        works = [dist.all_reduce(mine, async_op=True)]
        works.append(dist.all_gather_into_tensor(whole, mine, async_op=last_is_async))
        for work in works:
            if work is not None:
                work.wait()
        assert whole.eq(2).all(), f"{whole}, the last one async: {last_is_async}"


@only_nvx
@on_ranks(2)
def test_a_tensor_that_is_changed_after_the_call_is_used_as_it_was(rank, world):
    """Its data and its shape: the operation keeps an alias of a strided tensor, as the address of a contiguous one."""
    for change in (lambda x: setattr(x, "data", torch.zeros(3, 2)), lambda x: x.t_(), lambda x: x.resize_(0)):
        for x in (torch.ones(2, 3).t(), torch.ones(3, 2)):
            gathered = [torch.zeros(3, 2) for _ in range(world)]
            reduced = torch.ones(2, 3).t()
            view = reduced.view_as(reduced)
            if rank == 1:
                time.sleep(0.02)
            works = [dist.all_reduce(torch.ones(1 << 20), async_op=True)]
            works += [dist.all_gather(gathered, x, async_op=True), dist.all_reduce(reduced, async_op=True)]
            change(x)
            change(reduced)
            for work in works:
                work.wait()
            assert all(part.eq(1).all() for part in gathered), gathered
            assert view.eq(2).all(), view


def run_program(rank, world, program):
    runner = ProgramRunner(rank, world, program)
    for number, s in enumerate(program["steps"]):
        runner.run(number, s)
    runner.finish()


@only_nvx
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_programs(ranks, world):
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs)
    def run(program):
        ranks.run(run_program, world=world, program=program)

    run()
