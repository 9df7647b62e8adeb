"""`simulated` with `NVX_KERNELS=0`, which nvx reads when the first group is made."""

import os

import simulated


def load():
    os.environ["NVX_KERNELS"] = "0"
    simulated.load()
