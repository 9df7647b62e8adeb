"""torch's symmetric memory as a contender: its one-shot and two-shot all-reduce, on CUDA tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .peers import Call, Case, Contender, Unsupported, repeat
from .world import World

TWO_SHOT_BYTES = 64 << 10  # the two-shot is used from this size


class SymmetricContender(Contender):
    """The kernels use their own buffers. Copies to and from these are not timed."""

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        if world.device.type != "cuda":
            raise Unsupported("symmetric memory is of CUDA tensors: --device cuda")
        self.device = world.device

    def _shared(self, case: Case) -> tuple[torch.Tensor, Call]:
        import torch.distributed._symmetric_memory as memory

        if case.row.name != "all_reduce" or case.op != "sum" or not case.dtype.is_floating_point:
            raise Unsupported("symmetric memory only sums floats here, as an all_reduce")
        group = dist.group.WORLD.group_name
        buffer = memory.empty(case.count, dtype=case.dtype, device=self.device)
        try:
            memory.rendezvous(buffer, group=group)
        except RuntimeError as error:  # such as ranks that share a GPU
            raise Unsupported(f"torch's rendezvous of symmetric memory: {str(error).splitlines()[0]}") from None
        ops = torch.ops.symm_mem
        if case.nbytes >= TWO_SHOT_BYTES:
            return buffer, lambda: ops.two_shot_all_reduce_(buffer, "sum", group)
        return buffer, lambda: ops.one_shot_all_reduce(buffer, "sum", group)

    def call(self, case: Case, times: int = 1) -> Call:
        buffer, once = self._shared(case)
        buffer.zero_()
        return repeat(once, times)

    def checked(self, case: Case) -> Call:
        buffer, once = self._shared(case)

        def copied() -> None:
            buffer.copy_(case.send)
            torch.cuda.synchronize()
            dist.barrier()  # a peer reads the copied data
            case.receive.copy_(once())

        return copied
