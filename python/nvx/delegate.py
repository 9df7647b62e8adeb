"""NCCL as torch has it, for the collectives of CUDA tensors that NVX_DELEGATE hands over. Called by the C++ core."""

import contextlib
import datetime
import os

import torch
import torch.distributed as dist

# ProcessGroupNCCL reads these when it is made. Its watchdog would end the process, or write files, where something is
# late or has failed; nvx watches what it has handed over itself, and raises.
CALM = dict.fromkeys(
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
FOR_EVER = datetime.timedelta(days=365)  # the timeout is nvx's


def obstacle():
    """Why there is nothing to hand over to in this torch; empty where there is."""
    if dist.is_available() and dist.is_nccl_available():
        return ""
    return f"torch {torch.__version__} was built without NCCL: there is nothing to hand over to"


def look(device):
    """(which GPU of its host this is, why NCCL cannot serve it): the one or the other."""
    if device.type != "cuda":
        return "", f"NCCL serves CUDA tensors, and this one is of {device.type}"
    why_not = obstacle()
    if why_not:
        return "", why_not
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}", ""


def captures(device):
    """Whether this thread's current stream is being captured, for torch up to 2.12, whose C++ does not say so of any
    device."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _environment(settings):
    """Sets variables while the block runs."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def make(store, rank, size, device):
    """A ProcessGroupNCCL of these ranks, not connected yet."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOR_EVER
    with _environment(CALM):
        return dist.ProcessGroupNCCL(store, rank, size, options)
