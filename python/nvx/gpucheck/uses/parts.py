"""The parts by name."""

from __future__ import annotations

from . import figures, graphs, pools, relay, splitting, training
from .names import NAMES
from .ranks import Cases

PARTS: dict[str, Cases] = {
    "ddp": training.DDP,
    "fsdp1": training.FSDP1,
    "fsdp2": training.FSDP2,
    "dtensor": splitting.DTENSOR,
    "pipeline": splitting.PIPELINE,
    "compile": graphs.COMPILE,
    "replay": graphs.REPLAY,
    "replay_time": graphs.REPLAY_TIME,
    "training": figures.STEPS,
    "host_time": figures.HOST,
    "profile": figures.PROFILE,
    "pools": pools.POOLS,
    # In an environment that surroundings.py sets.
    "expandable": {
        "functional collectives": graphs.COMPILE["functional collectives"],
        "DDP": training.DDP["small buckets"],
        "replay": graphs.REPLAY["small"],
        "pools": pools.POOLS["beside ordinary tensors"],
    },
    "visible": {
        "functional collectives": graphs.COMPILE["functional collectives"],
        "DDP": training.DDP["small buckets"],
    },
    # Of each use one or two, by a module without kernels.
    "staging": {
        **{f"DDP, {name}": training.DDP[name] for name in ("small buckets", "large buckets")},
        "FSDP2": training.FSDP2["resharded"],
        "DTensor": splitting.DTENSOR["redistribute"],
        "pipeline": splitting.PIPELINE["1F1B"],
        "functional collectives": graphs.COMPILE["functional collectives"],
        "a step beside gloo's": figures.STEPS["a step beside gloo's"],
    },
    "relay": relay.RELAY,
}
assert tuple(PARTS) == NAMES
