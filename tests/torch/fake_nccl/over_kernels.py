"""`fake_nccl` beside nvx's kernels as `played` provides them."""

import played

import fake_nccl


def load():
    played.load()
    fake_nccl.load()
