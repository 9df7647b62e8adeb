"""The tests of `test_device_contract.py`, which cover staging through host memory, run on nvx's kernels."""

from on_device import ask_all
from ranks import on_simulated_gpus
from test_device_contract import ALL

globals().update(ask_all(ALL, __name__, on_simulated_gpus))
