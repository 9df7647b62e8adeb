"""Prepares a process like `ready` and enables torch's expandable segments: torch reads the setting when the first
tensor is made."""

import os

from . import ready
from .ready import before  # noqa: F401

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9 renamed it and reads both


def load():
    os.environ.update(dict.fromkeys(NAMES, "expandable_segments:True"))
    ready.load()
