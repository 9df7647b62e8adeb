"""What test_device_contract.py asks of tensors that go through host memory, asked of nvx's own kernels."""

from on_device import ask_all
from ranks import on_played_gpus
from test_device_contract import ALL

globals().update(ask_all(ALL, __name__, on_played_gpus))
