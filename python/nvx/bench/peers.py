"""The contenders: each turns a case into a call that runs it once. Backends of torch.distributed are here, the
others in sockets.py, symmetric.py, and bench/direct.py of a checkout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import nvx

from . import payload
from .collectives import Collective, Variant, elements
from .world import World

Call = Callable[[], object]
NULL = "null"
NULL_BACKEND = "nvx_null"


class Unsupported(Exception):
    """This contender cannot run this case; the text gives the reason."""


@dataclass
class Case:
    """One collective on one set of buffers, the same for every contender."""

    row: Collective
    nbytes: int
    dtype_name: str
    op: str
    root: int
    variant: Variant
    world: World
    unalign: int = 0
    send: torch.Tensor = field(init=False)
    receive: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = payload.dtype_of(self.dtype_name)[1]
        self.count = elements(self.row, self.nbytes, self.dtype.itemsize, self.world.size)
        self.block = self.count // self.world.size
        self.nbytes = self.count * self.dtype.itemsize
        sends, receives = self._extent(self.row.sends), self._extent(self.row.receives)
        if self.variant == "in-place":
            whole = self._empty(self.count)
            mine = slice(self.world.rank * self.block, (self.world.rank + 1) * self.block)
            self.send = whole[mine] if self.row.sends == "block" else whole
            self.receive = whole[mine] if self.row.receives == "block" else whole
        else:
            self.send, self.receive = self._empty(sends), self._empty(receives)

    def _extent(self, extent: str) -> int:
        return {"whole": self.count, "block": self.block, "nothing": 0}[extent]

    def _empty(self, count: int) -> torch.Tensor:
        return torch.zeros(count + self.unalign, dtype=self.dtype, device=self.world.device)[self.unalign :]

    @property
    def shown_count(self) -> int:
        """nccl-tests' count: the elements that a rank contributes if the message has one part a rank."""
        return self.block if self.row.in_blocks else self.count

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[k * self.block : (k + 1) * self.block] for k in range(self.world.size)]

    def prepare(self, salt: int) -> None:
        """Sets inputs with a known result, and outputs that differ from every result."""
        payload.poison(self.receive)
        mine = payload.pattern(self.op, self.dtype, self.world.size, self.world.rank, salt)
        payload.fill(self.send, payload.as_dtype(mine, self.dtype))

    def zero(self) -> None:
        """Sets inputs that repeated in-place reductions do not change."""
        self.send.zero_()

    def count_wrong(self, salt: int) -> int:
        """The number of wrong elements of this rank's output, compared with the exact result."""
        world = self.world
        want = payload.expected(self.row, self.op, self.dtype, world.size, world.rank, self.root, self.block, salt)
        return sum(
            payload.wrong(self.receive[first:] if count < 0 else self.receive[first : first + count], period, at)
            for first, count, period, at in want or ()
        )


class Contender:
    """A library that can run cases. `exact` is false for one that moves no data."""

    exact = True

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, case: Case, times: int = 1) -> Call:
        """Runs the case `times` times to completion, started together if possible; raises Unsupported."""
        raise NotImplementedError

    def checked(self, case: Case) -> Call:
        """Runs the case once on its own buffers, so that the results can be checked."""
        return self.call(case)

    def close(self) -> None:
        """Releases the contender's resources."""


class TorchContender(Contender):
    """A torch.distributed backend, over its own process group."""

    def __init__(self, name: str, backend: str, world: World, timeout: float) -> None:
        super().__init__(name)
        self.exact = name.partition("#")[0] != NULL
        self.world = world
        kind = world.device.type
        self.group = dist.new_group(
            backend=backend if kind == "cpu" else f"{kind}:{backend}", timeout=timedelta(seconds=timeout)
        )

    def call(self, case: Case, times: int = 1) -> Call:
        start = torch_call(case, self.group)
        if times == 1 or case.row.name == "sendrecv":
            return repeat(start, times)
        begin = torch_call(case, self.group, async_op=True)
        rounds = range(times)

        def aggregated() -> None:
            for work in [begin() for _ in rounds]:
                if work is not None:
                    work.wait()

        return aggregated

    def close(self) -> None:
        dist.destroy_process_group(self.group)


def of_cpu_tensors(name: str, world: World) -> None:
    """Raises Unsupported if the tensors are on a device."""
    if world.device.type != "cpu":
        raise Unsupported(f"{name} takes tensors of the CPU")


def captured(call: Call) -> Call:
    """The call as a replayed CUDA graph; raises Unsupported if it cannot be captured."""
    call()  # set-up in a first call cannot be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        raise Unsupported(f"not captured: {str(error).strip().splitlines()[0]}") from None
    return graph.replay


def repeat(call: Call, times: int) -> Call:
    """The call, ``times`` times in a row."""
    if times == 1:
        return call

    def repeated() -> None:
        for _ in range(times):
            call()

    return repeated


def torch_call(case: Case, group: dist.ProcessGroup, async_op: bool = False) -> Callable[[], dist.Work | None]:
    """The torch call of a case, with all choices made before it runs."""
    send, receive, root, a = case.send, case.receive, case.root, async_op
    name, at_root = case.row.name, case.world.rank == case.root
    if name == "sendrecv":
        peer = case.world.rank ^ 1
        return ping_pong(case, partial(dist.send, send, peer, group), partial(dist.recv, receive, peer, group))
    op = getattr(dist.ReduceOp, "PRODUCT" if case.op == "prod" else case.op.upper()) if case.row.reduces else None
    parts = None
    if at_root and name in ("gather", "scatter"):
        parts = case.parts(receive if name == "gather" else send)
    # torch 2.13 renamed two calls; the old names warn at every call.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": lambda: dist.all_reduce(send, op, group, a),
        "reduce": lambda: dist.reduce(send, root, op, group, a),
        "broadcast": lambda: dist.broadcast(send, root, group, a),
        "all_gather": lambda: all_gather(receive, send, group, a),
        "reduce_scatter": lambda: reduce_scatter(receive, send, op, group, a),
        "all_to_all": lambda: dist.all_to_all_single(receive, send, None, None, group, a),
        "gather": lambda: dist.gather(send, parts, root, group, a),
        "scatter": lambda: dist.scatter(receive, parts, root, group, a),
        "barrier": lambda: dist.barrier(group, a),
    }[name]


def ping_pong(case: Case, send: Call, receive: Call) -> Call:
    """A send and a receive on each of two neighbours, one after the other; a rank without a neighbour does nothing."""
    if (case.world.rank ^ 1) >= case.world.size:
        return lambda: None
    first, second = (receive, send) if case.world.rank & 1 else (send, receive)

    def exchange() -> None:
        first()
        second()

    return exchange


def native() -> Any:
    """nvx's C++ module, or None if it is not built (or is built for another torch)."""
    try:
        return nvx._load()
    except (AttributeError, RuntimeError):
        return None


def _native_null(store: dist.Store, rank: int, size: int, timeout: timedelta) -> object:
    return native().NullBackend(store, rank, size)


def null_backend() -> str:
    """The backend that does nothing: nvx's, or torch's fake one (which copies in some calls) if nvx is not built."""
    if not hasattr(native(), "NullBackend"):
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        return "fake"
    if NULL_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(NULL_BACKEND, _native_null, devices=["cpu"])
    return NULL_BACKEND


def torch_backend(name: str) -> str:
    """torch's name for a contender's base name; registers the backend if necessary."""
    if name == NULL:
        return null_backend()
    if name not in dist.Backend.backend_list:
        raise Unsupported(f"torch {torch.__version__} knows no backend '{name}'")
    return name
