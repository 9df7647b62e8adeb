"""The parts by name, with their number of ranks. Ranks share several GPUs round robin."""

from __future__ import annotations

from . import figures, graphs, messages, pools, proxy, splitting, training
from .rank import Cases

PARTS: dict[str, tuple[int, Cases]] = {
    "ddp": (2, training.DDP),
    "replay": (2, graphs.REPLAY),
    "profile": (2, figures.PROFILE),
    "host_time": (2, figures.HOST),
    "fsdp2": (4, training.FSDP2),
    "pools": (2, pools.POOLS),
    "messages": (2, messages.MESSAGES),
    "dtensor": (4, splitting.DTENSOR),
    "pipeline": (3, splitting.PIPELINE),
    "fsdp1": (2, training.FSDP1),
    "compile": (2, graphs.COMPILE),
}
RELAY: Cases = proxy.RELAY
EXPANDABLE: Cases = {
    "functional collectives": graphs.COMPILE["functional collectives"],
    "DDP": training.DDP["small buckets"],
    "replay": graphs.REPLAY["small"],
    "pools": pools.POOLS["beside ordinary tensors"],
}
VISIBLE: Cases = {name: EXPANDABLE[name] for name in ("functional collectives", "DDP")}
# One or two cases of each use, for a module without kernels.
STAGED: Cases = {
    **{f"DDP, {name}": training.DDP[name] for name in ("small buckets", "large buckets")},
    "FSDP2": training.FSDP2["resharded"],
    "DTensor": splitting.DTENSOR["redistribute"],
    "pipeline": splitting.PIPELINE["1F1B"],
    "functional collectives": graphs.COMPILE["functional collectives"],
}
