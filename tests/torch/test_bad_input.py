"""Bad input leaves the group as it was: each collective, with each argument spoiled in each way, on one rank or on all.

A cell is a call that must be refused on the ranks where it is spoiled. Then every rank makes the right call, which must
give the right result everywhere: the refused call had no effect on any rank. `bad_input.py` has the table.
NVX_TEST_ALL_CELLS=1 adds types, and all roots: some minutes.
"""

import os

import pytest
import torch
import torch.distributed as dist
from bad_input import COLLECTIVES, Call, by, invalid_variants, is_reduced, slots, unusual_valid_variants
from ranks import one_host, only_nvx
from reference import assert_same, bytes_of

pytestmark = only_nvx
WORLD = 3
OF_WORLD = ["message", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"]  # called for it only
MORE = [torch.float32, torch.complex64, torch.bfloat16, torch.int64, torch.bool]
SETTINGS = [  # the type and the roots
    pytest.param(torch.float32, [1], id="float32"),
    pytest.param(torch.complex64, [2], id="complex64", marks=one_host),
    *(pytest.param(t, range(WORLD), id=f"{t}, all roots") for t in MORE if os.environ.get("NVX_TEST_ALL_CELLS")),
]


# Complex numbers are moved as any others, and reduced in a way of their own.
SPOILED = [
    pytest.param(name, *setting.values, id=f"{name}-{setting.id}", marks=setting.marks)
    for name in COLLECTIVES
    for setting in SETTINGS
    if setting.id != "complex64" or is_reduced(name)
]


class Accepted(Exception):
    pass


def new_call(name, rank, dtype, root, asynchronous=False):
    call = Call(rank, WORLD, dtype, root, asynchronous)
    COLLECTIVES[name][0](call)
    return call


def backend_of(group):
    return group._get_backend(torch.device("cpu"))


def entries(name):
    """The ways to call: torch.distributed's, where it has one, and the backend's."""
    _, of_torch, of_backend = COLLECTIVES[name]
    backend = backend_of(dist.group.WORLD)
    ways = {"backend": lambda c: of_backend(backend, c)}
    return ways | {"torch.distributed": of_torch} if of_torch else ways


def flat(value):
    return [t for part in value for t in flat(part)] if isinstance(value, list) else [value]


def assert_right(call, what):
    for name, want in call.want.items():
        for got, value in zip(flat(call.tensors[name]), flat(want), strict=True):
            assert_same(got.detach().resolve_neg(), value, what)


REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, IndexError, AssertionError)


def assert_refused(way, name, rank, setting, spoil, what):
    """The call raises an error of arguments, and the other tensors of the call are as they were."""
    call = new_call(name, rank, *setting)
    before = [(path, tensor, tensor.clone()) for path, tensor, _ in slots(call)]
    spoil(call)
    try:
        way(call)
    except REFUSALS as error:
        assert not isinstance(error, dist.DistError), f"{what}: {error!r}"
        assert str(error).strip(), what
    else:
        raise Accepted(what)
    for path, tensor, value in before:
        if tensor.untyped_storage().nbytes() == value.untyped_storage().nbytes():
            assert torch.equal(bytes_of(tensor), bytes_of(value)), f"{what}: {path} was written"


def cells_of(name, dtype, roots, variants):
    """(number, root, what each rank does with its call) for each variant: on one rank alone, then on all ranks."""
    number = 0
    for root in roots:
        tables = [list(variants(name, new_call(name, r, dtype, root))) for r in range(WORLD)]
        for k in range(max(map(len, tables))):
            chosen = [table[k % len(table)] for table in tables]
            for ranks in ((k + root) % WORLD,), range(WORLD):
                number += 1
                yield number, root, [chosen[r] if r in ranks else None for r in range(WORLD)]


def refused_then_right(rank, name, dtype, roots):
    done = 0
    for entry, way in entries(name).items():
        for number, root, changes in cells_of(name, dtype, roots, by(entry, invalid_variants)):
            setting = dtype, root, number % 2 == 0
            if changes[rank]:
                what, spoil = changes[rank]
                assert_refused(way, name, rank, setting, spoil, f"{name} by {entry}, root {root}: {what}")
            call = new_call(name, rank, *setting)
            way(call)
            assert_right(call, f"{name} by {entry}, root {root}, after {changes}")
            done += 1
    return done


@pytest.mark.parametrize(("name", "dtype", "roots"), SPOILED)
def test_bad_input_leaves_the_group_as_it_was(ranks, name, dtype, roots):
    cells = ranks.run(refused_then_right, world=WORLD, name=name, dtype=dtype, roots=roots, op_timeout=10)
    assert min(cells) >= 25 * len(roots), "the table has become short"


def refused_and_dropped(rank, name):
    """One rank drops its refused call and makes another, which its peers do not make: all get an error with both."""
    group = dist.new_group()
    backend = backend_of(group)
    setting = torch.float32, 0
    with pytest.raises(dist.DistBackendError, match="mismatch"):
        if rank == 1:
            what, spoil = next(iter(invalid_variants(name, new_call(name, rank, *setting))))
            way = COLLECTIVES[name][2]
            assert_refused(lambda c: way(backend, c), name, rank, (*setting, False), spoil, f"{name}: {what}")
            dist.all_reduce(torch.ones(1, dtype=torch.int8), group=group)
        else:
            call = new_call(name, rank, *setting)
            COLLECTIVES[name][2](backend, call)
        dist.barrier(group)  # for a rank that needed nothing from the rank that was refused
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check.item() == WORLD


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n not in OF_WORLD])
def test_a_rank_that_drops_its_refused_call_is_named(ranks, name):
    ranks.run(refused_and_dropped, world=WORLD, name=name)


def odd_and_right(rank, name, dtype, roots):
    for entry, way in entries(name).items():
        for number, root, changes in cells_of(name, dtype, roots, by(entry, unusual_valid_variants)):
            call = new_call(name, rank, dtype, root, number % 2 == 0)
            if changes[rank]:
                changes[rank][1](call)
                call.options.pop("bad", None)
            way(call)
            assert_right(call, f"{name} by {entry}, root {root}: {changes}")


@pytest.mark.parametrize(("dtype", "roots"), SETTINGS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_odd_input_gives_the_same_result(ranks, name, dtype, roots):
    ranks.run(odd_and_right, world=WORLD, name=name, dtype=dtype, roots=roots)
