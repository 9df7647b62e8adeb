"""What there is for network cards to reach GPUs' memory themselves, and that nvx makes no use of it yet."""

import os

MODULES = ("nvidia_peermem", "nv_peer_mem")  # the driver's own, and the one before it
STAGED = "between hosts, device tensors go through pinned host memory: device pointers are not handed to UCX"


def ucx_memory(network):
    if not network["link"]:
        return {"name": "UCX and CUDA memory", "there": None, "text": f"not known: {network['none']}"}
    there = network["cuda_memory"]
    text = "UCX's context reports host and CUDA memory" if there else "UCX's context reports host memory alone"
    return {"name": "UCX and CUDA memory", "there": there, "text": text}


def peermem(folder="/sys/module"):
    loaded = [module for module in MODULES if os.path.isdir(f"{folder}/{module}")]
    text = f"the kernel module {loaded[0]} is loaded" if loaded else f"the kernel module {MODULES[0]} is not loaded"
    return {"name": "peer memory", "there": bool(loaded), "text": text}


def dma_buf(found):
    """found: what the core's dma_bufs() told."""
    name, devices = "dma-buf", found["devices"]
    if not devices:
        return {"name": name, "there": None, "text": f"no GPU to ask: {found['none'] or 'the driver shows none'}"}
    told = [f"{one['bus']} {'exports' if one['exports'] else 'does not export'} dma-bufs" for one in devices]
    return {"name": name, "there": all(one["exports"] for one in devices), "text": ", ".join(told)}


def facts(core, network=None):
    """One dict a fact: what it is of, whether it is there (None: nobody can say), and in words."""
    staged = {"name": "GPUDirect", "there": False, "text": STAGED}
    return [staged, ucx_memory(network or core.network()), peermem(), dma_buf(core.dma_bufs())]
