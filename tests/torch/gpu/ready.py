"""Prepares a process for ranks on GPUs: `NVX_TEST_MODULE` names a torch module that replaces nvx's own."""

import importlib.util
import os
import sys

import torch


def load():
    if file := os.environ.get("NVX_TEST_MODULE"):
        spec = importlib.util.spec_from_file_location("nvx._C", file)
        sys.modules["nvx._C"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["nvx._C"])


def before(job):
    """Assigns the GPUs to the ranks round robin."""
    torch.cuda.set_device(job.rank % torch.cuda.device_count())
