"""The table of test_bad_input.py: collectives, and what can be wrong with their arguments.

A `Call` is one call of a collective, with the arguments of one rank by name. `invalid_variants()` yields variants that
must be refused, and `unusual_valid_variants()` those that look odd and must work.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from reference import reduced, small_numbers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

R = dist.ReduceOp
COUNT = 6  # divisible by 2 and 3, for matrices


@dataclass
class Call:
    """One rank's arguments. `tensors`: a tensor, a list or a list of lists by name. `want`: the results by name."""

    rank: int
    world: int
    dtype: torch.dtype
    root: int
    asynchronous: bool
    tensors: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    want: dict = field(default_factory=dict)

    def given(self, rank, parts=1):
        return small_numbers(self.dtype, COUNT * parts, rank, self.root)

    def own(self, parts=1):
        return self.given(self.rank, parts)

    def all_given(self, parts=1):
        return [self.given(r, parts) for r in range(self.world)]

    def empty(self, parts=1):
        return torch.zeros(COUNT * parts, dtype=self.dtype)

    def empties(self):
        return [self.empty() for _ in range(self.world)]

    def sum(self, parts=1):
        return reduced(self.all_given(parts), "sum")

    def part(self, whole):
        return whole.chunk(self.world)[self.rank]

    def across(self):
        """The result of an all-to-all of the ranks' inputs of `world` parts."""
        return [self.part(t) for t in self.all_given(self.world)]


# --- the collectives: how a right call is made, the call of torch.distributed, the call of the backend ------


def make_all_reduce(c):
    c.tensors = {"in_out": c.own()}
    c.options = {"op": R.SUM}
    c.want = {"in_out": c.sum()}


def make_broadcast(c):
    c.tensors = {"in_out": c.own()}
    c.options = {"root": c.root}
    c.want = {"in_out": c.given(c.root)}


def make_reduce(c):
    c.tensors = {"in_out": c.own()}
    c.options = {"op": R.SUM, "root": c.root}
    c.want = {"in_out": c.sum()} if c.rank == c.root else {}


def make_all_gather(c):
    c.tensors = {"outs": c.empties(), "in": c.own()}
    c.want = {"outs": c.all_given()}


def make_into_tensor(c):
    c.tensors = {"out": c.empty(c.world), "in": c.own()}
    c.want = {"out": torch.cat(c.all_given())}


def make_gather(c):
    at_root = c.rank == c.root
    c.tensors = {"outs": c.empties(), "in": c.own()} if at_root else {"in": c.own()}
    c.options = {"root": c.root}
    c.want = {"outs": c.all_given()} if at_root else {}


def make_scatter(c):
    parts = list(c.given(c.root, c.world).chunk(c.world))
    c.tensors = {"out": c.empty(), "ins": [p.clone() for p in parts]} if c.rank == c.root else {"out": c.empty()}
    c.options = {"root": c.root}
    c.want = {"out": parts[c.rank]}


def make_reduce_scatter(c):
    c.tensors = {"out": c.empty(), "ins": [p.clone() for p in c.own(c.world).chunk(c.world)]}
    c.options = {"op": R.SUM}
    c.want = {"out": c.part(c.sum(c.world))}


def make_reduce_scatter_tensor(c):
    c.tensors = {"out": c.empty(), "in": c.own(c.world)}
    c.options = {"op": R.SUM}
    c.want = {"out": c.part(c.sum(c.world))}


def make_all_to_all(c):
    c.tensors = {"outs": c.empties(), "ins": [p.clone() for p in c.own(c.world).chunk(c.world)]}
    c.want = {"outs": c.across()}


def make_all_to_all_single(c):
    c.tensors = {"out": c.empty(c.world), "in": c.own(c.world)}
    c.options = {"takes": [COUNT] * c.world, "gives": [COUNT] * c.world}
    c.want = {"out": torch.cat(c.across())}


def make_all_reduce_coalesced(c):
    c.tensors = {"in_outs": [c.own(), c.own(2)]}
    c.options = {"op": R.SUM}
    c.want = {"in_outs": [c.sum(), c.sum(2)]}


def make_all_gather_coalesced(c):
    c.tensors = {"lists": [[c.empty(), c.empty(2)] for _ in range(c.world)], "ins": [c.own(), c.own(2)]}
    c.want = {"lists": [[c.given(r), c.given(r, 2)] for r in range(c.world)]}


def make_into_tensors(c):
    c.tensors = {"outs": [c.empty(c.world), c.empty(2 * c.world)], "ins": [c.own(), c.own(2)]}
    c.want = {"outs": [torch.cat(c.all_given()), torch.cat(c.all_given(2))]}


def make_reduce_scatter_tensors(c):
    c.tensors = {"outs": [c.empty(), c.empty()], "ins": [c.own(c.world), c.own(c.world)]}
    c.options = {"op": R.SUM}
    c.want = {"outs": [c.part(c.sum(c.world))] * 2}


def make_message(c):
    """Round a ring: to the next rank, from the one before."""
    c.tensors = {"in": c.own(), "out": c.empty()}
    c.options = {"to": (c.rank + 1) % c.world, "from": (c.rank - 1) % c.world, "tag": c.root}
    c.want = {"out": c.given((c.rank - 1) % c.world)}


def options(kind, c, **names):
    made = kind()
    made.asyncOp = c.asynchronous
    for name, value in names.items():
        setattr(made, name, value)
    return made


def ended(c, work):
    """As torch.distributed does: waits for what the backend returns."""
    if work is not None:
        work.wait()


def dist_call(function, *names, **keywords):
    """A call of torch.distributed: the values under these names, as far as there are any."""

    def run(c):
        have = {**c.tensors, **c.options}
        given = {key: have[name] for key, name in keywords.items() if name in have}
        ended(c, function(*[have.get(name) for name in names], **given, async_op=c.asynchronous))

    return run


def list_of(c, name):
    """The one-element list that the backend wants; empty where this rank has nothing to give."""
    return [c.tensors[name]] if name in c.tensors else []


def exchange(c, send, receive):
    """A send and a receive, of which a bad one is called before the right one has an effect."""
    to, source, tag = c.options["to"], c.options["from"], c.options["tag"]
    bad = c.options.get("bad")
    if bad != "in":
        receiving = receive(c.tensors["out"], source, tag)
    if bad != "out":
        send(c.tensors["in"], to, tag).wait()
    if not bad:
        receiving.wait()


def dist_message(c):
    exchange(c, partial(message_of, dist.isend), partial(message_of, dist.irecv))


def message_of(function, tensor, peer, tag):
    return function(tensor, peer, tag=tag)


def backend_message(b, c):
    exchange(c, lambda t, peer, tag: b.send([t], peer, tag), lambda t, peer, tag: b.recv([t], peer, tag))


def coalesced_dist(c):
    ended(c, dist.all_reduce_coalesced(c.tensors["in_outs"], c.options["op"], async_op=c.asynchronous))


def of_backend(name, kind, *lists, single=(), **names):
    """A call of the backend: its arguments are tensors (`single`) or the lists that it wants, then its options."""

    def run(b, c):
        arguments = [c.tensors[n] if n in single else list_of(c, n) for n in lists]
        chosen = {field_: c.options[n] for field_, n in names.items()}
        entry = b if hasattr(b, name) else dist.group.WORLD  # torch binds two of them for groups only
        ended(c, getattr(entry, name)(*arguments, options(kind, c, **chosen)))

    return run


def backend_all_to_all_single(b, c):
    t, o = c.tensors, c.options
    ended(c, b.alltoall_base(t["out"], t["in"], o["takes"], o["gives"], options(c10d.AllToAllOptions, c)))


WHOLE = ("outs", "ins", "in_outs", "lists", "out", "in")
COLLECTIVES = {
    # name: (make, call of torch.distributed or None, call of the backend)
    "all_reduce": (
        make_all_reduce,
        dist_call(dist.all_reduce, "in_out", op="op"),
        of_backend("allreduce", c10d.AllreduceOptions, "in_out", reduceOp="op"),
    ),
    "broadcast": (
        make_broadcast,
        dist_call(dist.broadcast, "in_out", src="root"),
        of_backend("broadcast", c10d.BroadcastOptions, "in_out", rootRank="root"),
    ),
    "reduce": (
        make_reduce,
        dist_call(dist.reduce, "in_out", dst="root", op="op"),
        of_backend("reduce", c10d.ReduceOptions, "in_out", rootRank="root", reduceOp="op"),
    ),
    "all_gather": (
        make_all_gather,
        dist_call(dist.all_gather, "outs", "in"),
        of_backend("allgather", c10d.AllgatherOptions, "outs", "in"),
    ),
    "all_gather_into_tensor": (
        make_into_tensor,
        dist_call(dist.all_gather_into_tensor, "out", "in"),
        of_backend("_allgather_base", c10d.AllgatherOptions, "out", "in", single=WHOLE),
    ),
    "gather": (
        make_gather,
        dist_call(dist.gather, "in", "outs", dst="root"),
        of_backend("gather", c10d.GatherOptions, "outs", "in", rootRank="root"),
    ),
    "scatter": (
        make_scatter,
        dist_call(dist.scatter, "out", "ins", src="root"),
        of_backend("scatter", c10d.ScatterOptions, "out", "ins", rootRank="root"),
    ),
    "reduce_scatter": (
        make_reduce_scatter,
        dist_call(dist.reduce_scatter, "out", "ins", op="op"),
        of_backend("reduce_scatter", c10d.ReduceScatterOptions, "out", "ins", reduceOp="op"),
    ),
    "reduce_scatter_tensor": (
        make_reduce_scatter_tensor,
        dist_call(dist.reduce_scatter_tensor, "out", "in", op="op"),
        of_backend("_reduce_scatter_base", c10d.ReduceScatterOptions, "out", "in", single=WHOLE, reduceOp="op"),
    ),
    "all_to_all": (
        make_all_to_all,
        dist_call(dist.all_to_all, "outs", "ins"),
        of_backend("alltoall", c10d.AllToAllOptions, "outs", "ins", single=WHOLE),
    ),
    "all_to_all_single": (
        make_all_to_all_single,
        dist_call(dist.all_to_all_single, "out", "in", output_split_sizes="takes", input_split_sizes="gives"),
        backend_all_to_all_single,
    ),
    "all_reduce_coalesced": (
        make_all_reduce_coalesced,
        coalesced_dist,
        of_backend("allreduce_coalesced", c10d.AllreduceCoalescedOptions, "in_outs", single=WHOLE, reduceOp="op"),
    ),
    "all_gather_coalesced": (
        make_all_gather_coalesced,
        dist_call(dist.all_gather_coalesced, "lists", "ins"),
        of_backend("allgather_coalesced", c10d.AllgatherOptions, "lists", "ins", single=WHOLE),
    ),
    "all_gather_into_tensor_coalesced": (
        make_into_tensors,
        None,
        of_backend("allgather_into_tensor_coalesced", c10d.AllgatherOptions, "outs", "ins", single=WHOLE),
    ),
    "reduce_scatter_tensor_coalesced": (
        make_reduce_scatter_tensors,
        None,
        of_backend(
            "reduce_scatter_tensor_coalesced", c10d.ReduceScatterOptions, "outs", "ins", single=WHOLE, reduceOp="op"
        ),
    ),
    "message": (make_message, dist_message, backend_message),
}


# --- tensors that are refused -------------------------------------------------------------------------------


def fake(tensor):
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def freed(tensor):
    tensor = tensor.clone()  # torch resizes no memory that is numpy's
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - tensor.element_size())
    return tensor


def sparse_rows(layout, tensor):
    matrix = torch.zeros(tensor.numel() // 2, 2, dtype=torch.float32)
    return matrix.to_sparse(layout=layout, blocksize=(1, 1) if "bs" in str(layout) else None)


def quantized(kind, tensor):
    return torch.quantize_per_tensor(torch.zeros(tensor.numel()), 0.1, 1, kind)


def expanded(tensor):
    return tensor[:1].expand(tensor.numel())


def another_type(tensor):
    return tensor.to(torch.int16)


def longer(tensor):
    return torch.cat([tensor, tensor[:1]])


def shorter(tensor):
    return tensor[:-1].clone()


NOWHERE = {  # no collective takes these, in any place
    "meta": lambda t: t.to("meta"),
    "fake": fake,
    "freed": freed,
    "shrunk": shrunk,
    "sparse csr": partial(sparse_rows, torch.sparse_csr),
    "sparse csc": partial(sparse_rows, torch.sparse_csc),
    "sparse bsr": partial(sparse_rows, torch.sparse_bsr),
    "sparse coo of meta": lambda t: torch.sparse_coo_tensor(size=(t.numel(),), device="meta"),
    "mkldnn": lambda t: torch.zeros(t.numel()).to_mkldnn(),
    "number": lambda t: 3.0,
    "None": lambda t: None,
    "array": lambda t: torch.zeros(t.numel()).numpy(),
    "list of numbers": lambda t: [1.0] * t.numel(),
}
NOT_REDUCED = {  # types that collectives move and do not reduce
    "quint8": partial(quantized, torch.quint8),
    "qint8": partial(quantized, torch.qint8),
    "qint32": partial(quantized, torch.qint32),
    "bits8": lambda t: torch.zeros(t.numel(), dtype=torch.uint8).view(torch.bits8),
    "uint4": lambda t: torch.empty(t.numel(), dtype=torch.uint4),
}
BESIDE_ANOTHER = {"of another type": another_type, "longer": longer, "shorter": shorter}
AS_MESSAGE = {  # messages go from and to the tensor's own memory
    "strided": lambda t: t.repeat_interleave(2)[::2],
    "transposed": lambda t: t.view(2, -1).t(),
    "expanded": expanded,
}
WRONG_LISTS = {
    "empty": lambda it: [],
    "short": lambda it: it[:-1],
    "long": lambda it: [*it, it[-1]],
    "a tensor": lambda it: it[0],
    "nested": lambda it: [it],
    "with a number": lambda it: [*it[:-1], 1.0],
}
REDUCED = ("all_reduce", "reduce", "reduce_scatter")


def is_reduced(name):
    return name.startswith(REDUCED)


def slots(call):
    """(path, tensor, whether it is written) of each place of a tensor: the first and the last of a list."""
    for name, value in call.tensors.items():
        written = name.startswith(("out", "in_out", "lists"))
        if isinstance(value, torch.Tensor):
            yield (name,), value, written
        elif isinstance(value[0], list):
            yield (name, len(value) - 1, 0), value[-1][0], written
        else:
            yield (name, 0), value[0], written
            yield (name, len(value) - 1), value[-1], written


def at(call, path):
    place = call.tensors
    for step in path:
        place = place[step]
    return place


def put(call, path, value):
    """Replaces what is at the path by the value."""
    place = at(call, path[:-1])
    place[path[-1]] = value


def spoil_tensor(path, change, call):
    put(call, path, change(at(call, path)))
    if "tag" in call.options:
        call.options["bad"] = path[0]


def spoil_option(name, value, call):
    call.options[name] = value
    if "tag" in call.options:
        call.options["bad"] = "out" if name == "from" else "in"


def reaches_nvx(entry, name, what):
    """torch.distributed runs a call with a meta or fake tensor on no backend, makes a list of a single tensor, and does
    not view conjugated tensors as real ones."""
    if entry != "torch.distributed":
        return True
    if what.endswith((" meta", " fake", " conjugated")):
        return False
    return not (name == "all_reduce_coalesced" and what.endswith(" a tensor"))


def by(entry, variants):
    """Those of the variants that the entry passes on to nvx."""
    return lambda name, call: (pair for pair in variants(name, call) if reaches_nvx(entry, name, pair[0]))


def invalid_variants(name, call):
    """(what, change of a right call) for each bad variant of the call."""
    paths = list(slots(call))
    several = len(paths) > 1 and name not in ("all_reduce_coalesced", "message")
    for path, _, written in paths:
        table = dict(NOWHERE)
        if is_reduced(name):
            table |= NOT_REDUCED
        if name == "message":
            table |= AS_MESSAGE
        elif written and not only_reads(name, call):
            table["expanded"] = expanded
        if several:
            table |= {k: f for k, f in BESIDE_ANOTHER.items() if fits_no_other(name, path, k)}
        if name != "all_reduce":
            table["sparse coo"] = lambda t: t.to_sparse()
        for what, change in table.items():
            yield f"{'.'.join(map(str, path))} {what}", partial(spoil_tensor, path, change)
    for key, value in call.tensors.items():
        if isinstance(value, list):
            for what, change in WRONG_LISTS.items():
                if not (name == "all_reduce_coalesced" and what in ("short", "long")):
                    yield f"{key} list {what}", partial(spoil_tensor, (key,), change)
    if name in ("gather", "scatter") and call.rank != call.root:
        key = "outs" if name == "gather" else "ins"
        yield f"{key} at a rank that is no root", partial(add_list, key)
    yield from bad_options(name, call)


def only_reads(name, call):
    return (name == "broadcast" and call.rank == call.root) or (name == "reduce" and call.rank != call.root)


def add_list(key, call):
    call.tensors[key] = call.empties()


def fits_no_other(name, path, what):
    """Whether this rank alone can detect that the size is wrong: parts for other ranks may have any size."""
    if what == "of another type" or name not in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"):
        return True
    return len(path) == 1


BAD_OPS = {
    torch.float32: [R.BAND, R.BOR, R.BXOR, R.PREMUL_SUM],
    torch.bfloat16: [R.BAND, R.BXOR, R.PREMUL_SUM],
    torch.complex64: [R.MIN, R.MAX, R.BAND, R.PREMUL_SUM],
    torch.int64: [R.PREMUL_SUM],
    torch.bool: [R.AVG, R.PREMUL_SUM],
}


def bad_options(name, call):
    if "op" in call.options:
        for op in BAD_OPS[call.dtype]:
            yield f"op {op}", partial(spoil_option, "op", op)
        yield "op a word", partial(spoil_option, "op", "sum")
    if "root" in call.options:
        for root in (-1, call.world, 2**31 - 1, "0", 1.5):
            yield f"root {root!r}", partial(spoil_option, "root", root)
    if "tag" in call.options:
        for place in ("to", "from"):
            for peer in (-7, call.world, 2**31 - 1):
                yield f"{place} {peer}", partial(spoil_option, place, peer)
        yield "tag -3", partial(spoil_option, "tag", -3)
        yield "tag too large", partial(spoil_option, "tag", 2**40)
    for side in ("takes", "gives"):
        if side in call.options:
            for what, value in bad_splits(call.world).items():
                yield f"{side} {what}", partial(spoil_option, side, value)


def bad_splits(world):
    return {
        "short": [COUNT] * (world - 1),
        "long": [COUNT] * world + [0],
        "too much": [COUNT] * (world - 1) + [COUNT + 1],
        "too little": [COUNT] * (world - 1) + [COUNT - 1],
        "negative": [-1, COUNT * world + 1] + [0] * (world - 2),
        "huge": [2**62, 2**62] + [0] * (world - 2),
        "words": ["1"] * world,
    }


# --- tensors that look odd and must work --------------------------------------------------------------------


def inference(tensor):
    with torch.inference_mode():
        return tensor.clone()


def grown(tensor):
    """The result of an operation that autograd has recorded."""
    return tensor.clone().requires_grad_() * 1 if tensor.is_floating_point() or tensor.is_complex() else tensor


ODD = {
    "every second": lambda t: t.repeat_interleave(2)[::2],
    "inner column": lambda t: t.view(-1, 1).repeat(1, 3)[:, 1],
    "of a graph": grown,
    "of inference": inference,
    "strided, of inference": lambda t: inference(t.repeat_interleave(2))[::2],
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    "off a word": lambda t: torch.cat([t[:1], t])[1:],
}
ODD_INPUTS = {
    "conjugated": lambda t: t.conj().resolve_conj().conj(),
    "negated": lambda t: torch._neg_view(-t),
}


def unusual_valid_variants(name, call):
    """(what, change of a right call) for variants that must give the same result."""
    for path, _, written in slots(call):
        table = ODD if written else ODD | ODD_INPUTS
        if name == "message":
            table = {what: table[what] for what in ("of a graph", "of inference", "parameter", "off a word")}
        for what, change in table.items():
            if not (what in ("conjugated", "negated") and not suits(what, call.dtype)):
                yield f"{'.'.join(map(str, path))} {what}", partial(spoil_tensor, path, change)


def suits(what, dtype):
    return dtype.is_complex if what == "conjugated" else not (dtype.is_complex or dtype is torch.bool)
