"""The same beside nvx's kernels, as played has them."""

import played

import fake_nccl


def load():
    played.load()
    fake_nccl.load()
