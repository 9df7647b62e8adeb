"""What the parts are called, for who does not import torch."""

NAMES = (
    "ddp", "fsdp1", "fsdp2", "dtensor", "pipeline", "compile", "replay", "replay_time", "training", "host_time",
    "profile", "pools", "expandable", "visible", "staging",
    "relay",
)  # fmt: skip
