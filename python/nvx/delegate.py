"""torch's ProcessGroupNCCL, for collectives that NVX_DELEGATE delegates to NCCL. Called by the C++ core."""

import datetime
import os
import threading

import torch
import torch.distributed as dist

# ProcessGroupNCCL reads these when it is created. Its watchdog would end the process or write dumps after a timeout or
# a failure. nvx watches delegated collectives itself, and raises an exception.
PROBE_ENV = dict.fromkeys(
    (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_PROPAGATE_ERROR",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    ),
    "0",
)
SETTING = threading.Lock()  # several groups may be made at once
FOR_EVER = datetime.timedelta(days=365)  # nvx applies the timeout


def obstacle():
    """Why this torch cannot delegate to NCCL; empty if it can."""
    if dist.is_available() and dist.is_nccl_available():
        return ""
    return f"torch {torch.__version__} was built without NCCL: nvx cannot delegate to it"


def probe(device):
    """Returns (PCI address of the GPU, ""), or ("", the reason why NCCL cannot serve the device)."""
    if device.type != "cuda":
        return "", f"NCCL serves CUDA tensors, and this tensor is on {device.type}"
    why_not = obstacle()
    if why_not:
        return "", why_not
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}", ""


def make(store, rank, size, device):
    """A ProcessGroupNCCL of these ranks, not connected yet."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOR_EVER
    with SETTING:
        before = {name: os.environ[name] for name in PROBE_ENV if name in os.environ}
        os.environ.update(PROBE_ENV)
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name in PROBE_ENV:
                os.environ.pop(name, None)
            os.environ.update(before)
