"""Bad arguments raise the texts that torch users know, before any data is sent, and the group remains usable.

The tests call the backend as torch's dispatcher does, below the Python checks of torch.distributed."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_C = pytest.importorskip("nvx._C", reason="nvx is not built")

SIZE = 2


def in_ranks(body):
    """Runs `body(rank)` in a thread for each rank; returns the results, or raises the first exception."""
    results, raised = [None] * SIZE, []

    def run(rank):
        try:
            results[rank] = body(rank)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    if raised:
        raise raised[0]
    return results


@pytest.fixture(scope="module")
def groups():
    """The backends of two ranks in this process."""
    store = dist.HashStore()

    def make(rank):
        options = _C.ProcessGroupNVX.Options(timeout=timedelta(seconds=30))
        options.group_name = "arguments"
        options.global_ranks_in_group = list(range(SIZE))
        return _C.ProcessGroupNVX(store, rank, SIZE, options)

    made = in_ranks(make)
    yield made
    in_ranks(lambda rank: made[rank].shutdown())


def dense(*shape, dtype=torch.float32):
    return torch.zeros(shape or (4,), dtype=dtype)


def double(*shape):
    return dense(*shape, dtype=torch.float64)


def sparse():
    return torch.zeros(4).to_sparse()


def strided():
    return torch.zeros(4, 4).t()[::2]


def options(kind, **fields):
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def broadcast(tensors, root=0, root_tensor=0):
    return lambda pg: pg.broadcast(tensors, options(c10d.BroadcastOptions, rootRank=root, rootTensor=root_tensor))


def all_reduce(tensors, op=dist.ReduceOp.SUM):
    return lambda pg: pg.allreduce(tensors, options(c10d.AllreduceOptions, reduceOp=op))


def all_reduce_coalesced(tensors):
    return lambda pg: pg.allreduce_coalesced(tensors, c10d.AllreduceCoalescedOptions())


def reduce(tensors, root=0, root_tensor=0):
    return lambda pg: pg.reduce(tensors, options(c10d.ReduceOptions, rootRank=root, rootTensor=root_tensor))


def all_gather(outputs, inputs):
    return lambda pg: pg.allgather(outputs, inputs, c10d.AllgatherOptions())


def all_gather_coalesced(outputs, inputs):
    return lambda pg: pg.allgather_coalesced(outputs, inputs, c10d.AllgatherOptions())


def all_gather_base(output, given):
    return lambda pg: pg._allgather_base(output, given, c10d.AllgatherOptions())


def gather(outputs, inputs, root=0):
    return lambda pg: pg.gather(outputs, inputs, options(c10d.GatherOptions, rootRank=root))


def scatter(outputs, inputs, root=0):
    return lambda pg: pg.scatter(outputs, inputs, options(c10d.ScatterOptions, rootRank=root))


def reduce_scatter(outputs, inputs):
    return lambda pg: pg.reduce_scatter(outputs, inputs, c10d.ReduceScatterOptions())


def reduce_scatter_base(output, given):
    return lambda pg: pg._reduce_scatter_base(output, given, c10d.ReduceScatterOptions())


def all_to_all(outputs, inputs):
    return lambda pg: pg.alltoall(outputs, inputs, c10d.AllToAllOptions())


def all_to_all_base(output, given, output_splits=(), input_splits=()):
    splits = list(output_splits), list(input_splits)
    return lambda pg: pg.alltoall_base(output, given, *splits, c10d.AllToAllOptions())


def send(tensors, to=1, tag=0):
    return lambda pg: pg.send(tensors, to, tag)


def recv(tensors, source=1, tag=0):
    return lambda pg: pg.recv(tensors, source, tag)


SAME_LENGTH = "requires input/output tensor lists to have the same length"
OTHER_TYPE = "must have the same type|invalid tensor type"

# The call on rank 0 of 2, and a part of the error text.
BAD = {
    "broadcast: root below 0": (broadcast([dense()], root=-1), "invalid root rank: -1"),
    "broadcast: root too big": (broadcast([dense()], root=SIZE), "invalid root rank: 2"),
    "broadcast: root tensor below 0": (broadcast([dense()], root_tensor=-1), "invalid root tensor: -1"),
    "broadcast: root tensor too big": (broadcast([dense()], root_tensor=1), "invalid root tensor: 1"),
    "broadcast: nothing": (broadcast([]), "invalid root tensor: 0"),
    "broadcast: two types": (broadcast([dense(), double()]), "invalid tensor type at index 1"),
    "broadcast: two layouts": (broadcast([dense(), sparse()]), "invalid tensor layout at index 1"),
    "broadcast: sparse": (broadcast([sparse()]), "only supports dense tensors"),
    "all_reduce: nothing": (all_reduce([]), "requires non-empty tensor list"),
    "all_reduce: two types": (all_reduce([dense(), double()]), "invalid tensor type at index 1"),
    "all_reduce: sparse maximum": (all_reduce([sparse()], dist.ReduceOp.MAX), "unsupported reduction operation"),
    "all_reduce: bits of floats": (all_reduce([dense()], dist.ReduceOp.BAND), "ReduceOp.BAND"),
    "all_reduce: meta tensor": (
        all_reduce([torch.zeros(4, device="meta")]),
        "only supports CPU and accelerator tensors",
    ),
    "all_reduce_coalesced: nothing": (all_reduce_coalesced([]), "requires non-empty tensor list"),
    "all_reduce_coalesced: sparse": (all_reduce_coalesced([sparse(), sparse()]), "only supports dense tensors"),
    "reduce: root below 0": (reduce([dense()], root=-1), "invalid root rank: -1"),
    "reduce: root too big": (reduce([dense()], root=SIZE), "invalid root rank: 2"),
    "reduce: root tensor too big": (reduce([dense()], root_tensor=1), "invalid root tensor: 1"),
    "reduce: nothing": (reduce([]), "requires non-empty tensor list"),
    "reduce: two tensors": (reduce([dense(), dense()]), "requires a single-element tensor list"),
    "reduce: sparse": (reduce([sparse()]), "only supports dense tensors"),
    "all_gather: no input": (all_gather([[dense(), dense()]], []), "requires non-empty( input)? tensor list"),
    "all_gather: no output": (all_gather([], [dense()]), SAME_LENGTH),
    "all_gather: two inputs": (
        all_gather([[dense(), dense()]], [dense(), dense()]),
        SAME_LENGTH,
    ),
    "all_gather: too few outputs": (all_gather([[dense()]], [dense()]), "invalid output tensor list at index 0"),
    "all_gather: too many outputs": (
        all_gather([[dense()] * 3], [dense()]),
        r"invalid output tensor list at index 0 \(expected length 2, got 3\)",
    ),
    "all_gather: types differ": (all_gather([[dense(), double()]], [dense()]), OTHER_TYPE),
    "all_gather: sparse": (all_gather([[sparse(), sparse()]], [sparse()]), "only supports dense tensors"),
    "all_gather_coalesced: too few outputs": (
        all_gather_coalesced([[dense()]], [dense()]),
        "output lists should be equal to world size",
    ),
    "all_gather_coalesced: no input": (
        all_gather_coalesced([[dense()], [dense()]], []),
        "requires non-empty input tensor list",
    ),
    "all_gather_coalesced: lists differ": (
        all_gather_coalesced([[dense()], [dense(), dense()]], [dense()]),
        r"invalid output size: \(expected length 1, got 2\)",
    ),
    "all_gather_coalesced: types differ": (
        all_gather_coalesced([[dense()], [double()]], [dense()]),
        OTHER_TYPE,
    ),
    "all_gather_into_tensor: size": (
        all_gather_base(dense(7), dense(4)),
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "all_gather_into_tensor: type": (
        all_gather_base(double(8), dense(4)),
        OTHER_TYPE,
    ),
    "gather: root below 0": (gather([], [dense()], root=-1), "invalid root rank: -1"),
    "gather: root too big": (gather([], [dense()], root=SIZE), "invalid root rank: 2"),
    "gather: no input": (gather([[dense(), dense()]], []), "requires a single-element input tensor list"),
    "gather: two inputs": (
        gather([[dense(), dense()]], [dense(), dense()]),
        "requires a single-element input tensor list",
    ),
    "gather: no output": (gather([], [dense()]), "requires a single-element output list containing a list with 2"),
    "gather: two output lists": (
        gather([[dense(), dense()]] * 2, [dense()]),
        "requires a single-element output list containing a list with 2",
    ),
    "gather: too few outputs": (gather([[dense()]], [dense()]), "Incorrect output list size 1"),
    "gather: too many outputs": (gather([[dense()] * 3], [dense()]), "Incorrect output list size 3"),
    "gather: types differ": (gather([[dense(), double()]], [dense()]), "invalid tensor type at index 1"),
    "gather: own size": (gather([[dense(5), dense()]], [dense()]), "invalid tensor size at index 0"),
    "gather: outputs off the root": (
        gather([[dense(), dense()]], [dense()], root=1),
        "requires empty output on non-root",
    ),
    "gather: sparse": (gather([[dense(), dense()]], [sparse()]), "only supports dense tensors"),
    "scatter: root below 0": (scatter([dense()], [], root=-1), "invalid root rank: -1"),
    "scatter: root too big": (scatter([dense()], [], root=SIZE), "invalid root rank: 2"),
    "scatter: no output": (scatter([], []), "requires a single-element output tensor list"),
    "scatter: two outputs": (scatter([dense(), dense()], []), "requires a single-element output tensor list"),
    "scatter: no input": (scatter([dense()], []), "requires a single-element input list containing a list with 2"),
    "scatter: two input lists": (
        scatter([dense()], [[dense(), dense()]] * 2),
        "requires a single-element input list containing a list with 2",
    ),
    "scatter: too few inputs": (scatter([dense()], [[dense()]]), "Incorrect input list size 1"),
    "scatter: too many inputs": (scatter([dense()], [[dense()] * 3]), "Incorrect input list size 3"),
    "scatter: types differ": (scatter([dense()], [[dense(), double()]]), "invalid tensor type at index 1"),
    "scatter: own size": (scatter([dense()], [[dense(5), dense()]]), "invalid tensor size at index 0"),
    "scatter: inputs off the root": (
        scatter([dense()], [[dense(), dense()]], root=1),
        "requires empty input on non-root",
    ),
    "scatter: sparse": (scatter([sparse()], [[dense(), dense()]]), "only supports dense tensors"),
    "reduce_scatter: no output": (
        reduce_scatter([], [[dense(), dense()]]),
        "requires a single-element output tensor list",
    ),
    "reduce_scatter: no input": (reduce_scatter([dense()], []), SAME_LENGTH),
    "reduce_scatter: too few inputs": (
        reduce_scatter([dense()], [[dense()]]),
        "invalid input tensor list",
    ),
    "reduce_scatter: types differ": (
        reduce_scatter([dense()], [[dense(), double()]]),
        OTHER_TYPE,
    ),
    "reduce_scatter_tensor: size": (
        reduce_scatter_base(dense(4), dense(7)),
        "input tensor must be the same size as output size times world size",
    ),
    "reduce_scatter_tensor: type": (
        reduce_scatter_base(dense(4), double(8)),
        OTHER_TYPE,
    ),
    "all_to_all: too few inputs": (
        all_to_all([dense(), dense()], [dense()]),
        "input tensor list size 1 does not match world size 2",
    ),
    "all_to_all: too few outputs": (
        all_to_all([dense()], [dense(), dense()]),
        "output tensor list size 1 does not match world size 2",
    ),
    "all_to_all_single: type": (all_to_all_base(dense(), double()), OTHER_TYPE),
    "send: nothing": (send([]), "takes a single tensor|non-empty tensor list"),
    "send: two tensors": (send([dense(), dense()]), "takes a single tensor|single-element tensor list"),
    "send: strided": (send([strided()]), "tensor has to be contiguous"),
    "send: tag below 0": (send([dense()], tag=-1), "Tag must be nonnegative"),
    "send: to below 0": (send([dense()], to=-1), "[Ii]nvalid.*rank"),
    "send: to nobody": (send([dense()], to=SIZE), "[Ii]nvalid.*rank"),
    "recv: two tensors": (recv([dense(), dense()]), "takes a single tensor|single-element tensor list"),
    "recv: strided": (recv([strided()]), "tensor has to be contiguous"),
    "recv: from nobody": (recv([dense()], source=SIZE), "[Ii]nvalid.*rank"),
    "recv: tag below 0": (recv([dense()], tag=-1), "Tag must be nonnegative"),
}


@pytest.mark.parametrize("name", BAD)
def test_text(groups, name):
    call, text = BAD[name]
    with pytest.raises((ValueError, TypeError), match=text) as thrown:
        call(groups[0]).wait()
    assert isinstance(thrown.value, RuntimeError), "gloo raises this for any bad argument"


# Additions to torch's text: the given value and the accepted ones.
ALSO_SAYS = {
    "broadcast: root too big": "invalid root rank: 2, in a group of 2",
    "broadcast: root tensor too big": "invalid root tensor: 1, in a list of 1",
    "broadcast: sparse": r"not one of layout torch.sparse_coo: to_dense\(\) it first",
    "all_reduce: bits of floats": "with non-integral dtype torch.float32",
    "all_reduce: meta tensor": "CPU and accelerator tensors, not one on meta",
    "all_reduce_coalesced: sparse": r"at index 0 \(expected torch.strided, got torch.sparse_coo\)",
    "reduce: two tensors": "not one of 2",
    "all_gather: no output": "there are 1 inputs and 0 outputs",
    "all_gather_coalesced: too few outputs": "1 lists for 2 ranks",
    "all_gather_into_tensor: size": "the output has 7 elements, the input 4, the group 2 ranks",
    "gather: no input": "input tensor list, not one of 0",
    "gather: two output lists": "a list with 2 tensors. It has 2 elements",
    "gather: outputs off the root": "on non-root: the root is rank 1; this is rank 0 of group arguments",
    "scatter: two outputs": "output tensor list, not one of 2",
    "scatter: inputs off the root": "on non-root: the root is rank 1; this is rank 0 of group arguments",
    "reduce_scatter_tensor: size": "the output has 4 elements, the input 7, the group 2 ranks",
    "send: strided": r"sizes \[2, 4\] and strides \[2, 4\]; send a contiguous\(\) copy",
}


@pytest.mark.parametrize("name", ALSO_SAYS)
def test_text_has_the_numbers(groups, name):
    with pytest.raises(ValueError, match=ALSO_SAYS[name]):
        BAD[name][0](groups[0])


# Torch's own check of splits, which raises the same text for every backend.
BAD_SPLITS = {
    "does not divide": (
        all_to_all_base(dense(5), dense(5)),
        "Tensor's dim 0 does not divide equally across group size",
    ),
    "number of splits": (
        all_to_all_base(dense(), dense(), [4], [4]),
        "Number of tensor splits not equal to group size",
    ),
    "sum of input splits": (
        all_to_all_base(dense(), dense(), [2, 2], [2, 1]),
        "Split sizes doesn't match total dim 0 size",
    ),
    "sum of output splits": (
        all_to_all_base(dense(), dense(), [1, 1], [2, 2]),
        "Split sizes doesn't match total dim 0 size",
    ),
}


@pytest.mark.parametrize("name", BAD_SPLITS)
def test_text_of_splits(groups, name):
    call, text = BAD_SPLITS[name]
    with pytest.raises(RuntimeError, match=text) as thrown:
        call(groups[0]).wait()
    assert not isinstance(thrown.value, dist.DistBackendError), "nothing has been sent"


@pytest.mark.parametrize("name", BAD | BAD_SPLITS)
def test_text_names_the_call_the_rank_and_what_to_do(groups, name):
    call, _ = (BAD | BAD_SPLITS)[name]
    with pytest.raises(RuntimeError) as thrown:
        call(groups[0])
    text = str(thrown.value)
    if name in BAD:
        assert text.startswith(f"nvx: {name.partition(':')[0]}: "), text
    assert "; this is rank 0 of group arguments. Next: correct the arguments on this rank" in text
    for foreign in ("ProcessGroup", "c10", "allreduce", "Float", "Double", "Sparse", "Strided"):
        assert foreign not in text, text


def test_group_goes_on(groups):
    """The group works after all calls above, on the rank that got the errors and on the other one."""
    for call, _ in (BAD | BAD_SPLITS).values():
        with pytest.raises(RuntimeError):
            call(groups[0]).wait()

    def add(rank):
        tensor = torch.full((4,), rank + 1.0)
        groups[rank].allreduce([tensor], c10d.AllreduceOptions()).wait()
        return tensor

    for result in in_ranks(add):
        assert torch.equal(result, torch.full((4,), 3.0))
