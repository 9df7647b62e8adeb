"""Prepares a process like `ready`, except that each process sees the GPUs in its own order and uses the first."""

import os

import torch

from . import ready


def order(number, gpus, given):
    """The new value of `CUDA_VISIBLE_DEVICES`."""
    names = [name.strip() for name in given.split(",")] if given else [str(i) for i in range(gpus)]
    first = number % len(names)
    return ",".join(names[first:] + names[:first])


def load():
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    # NVML counts the GPUs without initializing CUDA, which reads the variable only once.
    os.environ["CUDA_VISIBLE_DEVICES"] = order(os.getpid(), max(1, torch.cuda.device_count()), given)
    ready.load()


def before(job):
    torch.cuda.set_device(0)
