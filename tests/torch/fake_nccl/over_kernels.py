"""`fake_nccl` beside nvx's kernels as `simulated` provides them."""

import simulated

import fake_nccl


def load():
    simulated.load()
    fake_nccl.load()
