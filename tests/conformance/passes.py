"""The passes. A pass is one run of torch's tests under one backend name.

Torch's tests read the backend's name once, at import, and select themselves by it. So each pass is a process that
imports them afresh. A later pass runs only tests that no earlier pass has run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.conformance.place import Place


@dataclass(frozen=True)
class Pass:
    name: str
    believes: str  # the backend name that the tests see; "" is the real one
    purpose: str
    lift_world_size: bool = False  # run tests that torch skips below 8 ranks
    lift_gpu: bool = False  # use CPU tensors where a test requests CUDA tensors
    only: str = ""  # a pattern the test's name must match
    without: tuple[tuple[str, str], ...] = ()  # patterns of tests that need a GPU, with the reasons
    # ... of tests that ranks that share a GPU cannot run, with the reasons.
    of_one_gpu: tuple[tuple[str, str], ...] = ()

    def admits(self, test: str) -> bool:
        return not self.only or re.search(self.only, test) is not None

    def needs_more(self, test: str, place: Place) -> str | None:
        """The reason why the test cannot run with the tensors of `place` as its CUDA tensors, or None."""
        for pattern, why in self.without if place.kind == "cpu" else self.of_one_gpu:
            if re.search(pattern, test):
                return why
        return None


# Communication tests that request CUDA only because NCCL does: none of them needs a GPU.
_MOVES_ONLY = (
    r"^test_(batch_isend_irecv_.*|send_recv_nccl.*|all_to_all.*_cuda.*"
    r"|(broadcast|all_reduce_sum|all_reduce_sum_cuda|all_reduce_result_cuda|reduce_sum)(_twice)?_cuda"
    r"|reduce_scatter.*|all_gather.*|gather.*cuda|scatter.*cuda|coalescing.*|.*_coalescing_manager.*"
    r"|broadcast_cuda|all_reduce_.*cuda.*|.*_object.*|barrier.*_cuda|nccl_high_priority_stream)"
)

# Tests that need a GPU even when CPU tensors replace CUDA ones. None of them is about the backend.
_GPU_AFTER_ALL = (
    (r"SyncBatchNorm|sync_bn|test_ddp_inference", "SyncBatchNorm has no CPU kernel"),
    (r"test_ddp_native_mixed_precision", "DDP's mixed precision records CUDA events"),
    (r"test_ddp_apply_optim_in_backward", "builds its model on an accelerator by number"),
    (r"test_ddp_compile_static_graph", "compiles, and the compiler knows torch.cuda's functions"),
    (r"test_ddp_device|test_ddp_logging_data_gpu", "looks at the device ids"),
    (r"^test_DistributedDataParallel$", "cuts its batch by GPUs"),
    (r"_non_default_stream$", "uses CUDA streams"),
    (r"test_ddp_uneven_inputs$", "has a model with SyncBatchNorm among its many"),
    (r"test_monitored_barrier_allreduce_hang", "waits for NCCL's own words on a timeout"),
    (r"test_nccl_high_priority_stream", "sets an option of NCCL itself"),
)

_GPUS_AFTER_ALL = (
    (r"test_nccl_high_priority_stream", "sets an option of NCCL itself"),
    (r"test_monitored_barrier_allreduce_hang", "waits for NCCL's own words on a timeout"),
    (r"test_ddp_device_mesh_initialization|test_ddp_logging_data_gpu", "wants each rank on the device of its number"),
    (r"^test_DistributedDataParallel$", "cuts its batch by GPUs"),
    (r"test_ddp_compile_static_graph", "compiles for longer than a test should take here"),
)

PASSES = {
    one.name: one
    for one in (
        Pass("gloo", "gloo", "as torch runs them over gloo"),
        Pass(
            "groups",
            "gloo",
            "those torch keeps for 8 ranks and more",
            lift_world_size=True,
        ),
        Pass("mpi", "mpi", "those that only MPI's name unlocks", lift_world_size=True),
        Pass(
            "nccl",
            "nccl",
            "those that only NCCL's name unlocks, on CPU tensors",
            lift_world_size=True,
            lift_gpu=True,
            only=_MOVES_ONLY,
            without=_GPU_AFTER_ALL,
            of_one_gpu=_GPUS_AFTER_ALL,
        ),
        Pass(
            "gpu",
            "gloo",
            "those that request GPUs, on CPU tensors",
            lift_world_size=True,
            lift_gpu=True,
            without=_GPU_AFTER_ALL,
            of_one_gpu=_GPUS_AFTER_ALL,
        ),
        Pass("own", "", "under its own name, as a plugin torch does not know", lift_world_size=True),
    )
}
