"""Prepares a process for ranks on GPUs: `NVX_TEST_MODULE` names a torch module that replaces nvx's own. Kernels serve
also ranks that share a GPU in time slices."""

import importlib.util
import os
import sys

import torch


def load():
    os.environ.setdefault("NVX_KERNELS", "1")
    if file := os.environ.get("NVX_TEST_MODULE"):
        spec = importlib.util.spec_from_file_location("nvx._C", file)
        sys.modules["nvx._C"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["nvx._C"])


def before(job):
    """Assigns the GPUs to the ranks round robin."""
    torch.cuda.set_device(job.rank % torch.cuda.device_count())
