"""The C++ module. Programs use what `nvx` offers of it: Options, ProcessGroup, and the errors."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import Store

torch_version: str

class ArgumentError(ValueError, RuntimeError):
    """An argument has a value that nvx refuses, such as a root that is no rank. The group stays usable."""

class ArgumentTypeError(TypeError, RuntimeError):
    """An argument has a type that nvx refuses, such as an element type without the operator. The group stays usable."""

class ProcessGroupNVX(Backend):
    """A group of nvx, made without torch's registry: `allreduce`, `broadcast` and c10d's other methods take tensors.

    All ranks call it with their rank, the same size, and a store that they share. Keys in the store are prefixed; a
    store serves several groups at once only behind a PrefixStore each.
    """

    class Options(Backend.Options):
        """The pg_options of init_process_group and new_group for nvx.

        timeout: how long an operation, or making the group, may wait: a timedelta. Unless it is 30 minutes, the
            default, it overrides the timeout of init_process_group or new_group. NVX_TIMEOUT_S overrides both.
        kernels: "auto", "0" or "1", instead of NVX_KERNELS, and inherited by groups that split off; "": as NVX_KERNELS
            says. The same on all ranks.
        tune: keys of `nvx explain`'s table as text ("all_reduce.one_shot=16K") or a dict, instead of the same keys of
            NVX_TUNE, and inherited by groups that split off. The same on all ranks.
        group_desc: a description of the group; nvx does not use it.
        group_name, global_ranks_in_group: set by nvx when the group is made; values that you pass are ignored, except
            the name of an nvx.ProcessGroup, which logs and errors have.
        enable_reconfigure: from torch 2.14 on; if True, the group begins without ranks: dist._reconfigure sets them.
        """

        timeout: timedelta
        kernels: str
        tune: str
        group_name: str
        group_desc: str
        global_ranks_in_group: list[int]
        def __init__(self, timeout: timedelta = ..., kernels: str = "", tune: str | dict[str, Any] = "") -> None: ...

    def __init__(self, store: Store, rank: int, size: int, options: ProcessGroupNVX.Options | None = None) -> None: ...
    @property
    def options(self) -> ProcessGroupNVX.Options:
        """The options with which the group was made."""
    @property
    def mem_allocator(self) -> Any:
        """The allocator for `torch.cuda.MemPool`: its tensors need no staging in nvx's kernels."""
    def new_window(self, tensor: Tensor | None = None) -> Any:
        """A one-sided window of the ranks' CPU tensors, from torch 2.14 on: docs/torch.md describes its methods."""
    def get_error(self) -> Any: ...
    def comm_split_count(self) -> int: ...
    def perform_nocolor_split(self, device: Any) -> None: ...

class NullBackend(Backend):
    def __init__(self, store: Store, rank: int, size: int) -> None: ...

def set_timeout(backend: Backend, timeout: timedelta) -> None: ...
def pool_stats(backend: Backend) -> dict[str, Any] | None: ...
def explain(collective: str, nbytes: int, ranks: int = 2, hosts: int = 1) -> str: ...
def tuning(ranks: int = 2, hosts: int = 1) -> list[dict[str, Any]]: ...
def ways(
    collective: str,
    nbytes: int,
    ranks: int = 2,
    hosts: int = 1,
    rdma_gb_s: float = 0.0,
    cores: int = 0,
    l3_bytes: int = 0,
) -> list[dict[str, Any]]: ...
def ways_on_device(
    collective: str, nbytes: int, ranks: int = 2, hosts: int = 1, no_nccl: str = "", rdma_gb_s: float = 0.0
) -> list[dict[str, Any]]: ...
def simulate(
    collective: str,
    nbytes: int,
    hosts: int,
    ranks_per_host: int,
    inside: float,
    between: float,
    latency: float,
    cards: int = 1,
) -> dict[str, Any]: ...
def taken_on_device(ranks: int) -> dict[str, int]: ...
def flag_round(shared: Any, side: int, rounds: int) -> float: ...
def config_table() -> Sequence[tuple[str, str, str, str, str]]: ...
def config_unknown() -> Sequence[tuple[str, str]]: ...
def build_info() -> dict[str, Any]: ...
def __getattr__(name: str) -> Any: ...
