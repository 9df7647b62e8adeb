"""Makes nvx serve the device in `python -m tests.conformance --device fakegpu --import fake_device.for_conformance`."""

import nvx
import torch.distributed as dist

import fake_device

fake_device.load()
nvx._devices = lambda: ["cpu", fake_device.NAME]
dist.Backend._plugins.pop("NVX", None)
nvx._register()
