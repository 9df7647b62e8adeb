"""torchft's process group over nvx, for training that goes on when a replica dies. torchft must be installed.

manager = torchft.Manager(pg=nvx.torchft.ProcessGroupNVX(timeout=timedelta(seconds=30)), ...)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

import nvx


class ProcessGroupNVX(ProcessGroupWrapper):
    """A process group that torchft's Manager makes anew whenever the set of replicas changes: ProcessGroupNVX(timeout).
    `import nvx.torchft` needs torchft: `pip install torchft-nightly`.

    timeout: how long an operation, or making the group, may wait: a timedelta, 60 seconds by default.
    """

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        backend = nvx.ProcessGroup(store, rank, world_size, nvx.Options(timeout=self._timeout))
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in nvx._devices():
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group

    def getBackendName(self) -> str:
        return "torchft-nvx"
