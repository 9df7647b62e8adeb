"""For `python -m tests.conformance --device fakegpu --import fake_device.for_conformance`: what makes nvx serve it."""

import nvx
import torch.distributed as dist

import fake_device

fake_device.load()
nvx._devices = lambda: ["cpu", fake_device.NAME]
dist.Backend._plugins.pop("NVX", None)
nvx._register()
