"""Reports whether NICs can reach GPU memory (GPUDirect RDMA), which all_gather over hosts uses."""

import os

MODULES = ("nvidia_peermem", "nv_peer_mem")  # the driver's own, and the one before it
STAGED = "between hosts, device tensors go through pinned host memory"
UNTRIED = "all_gather over hosts passes device memory to UCX if the trial of a group shows that NICs reach it"


def peermem(folder="/sys/module"):
    loaded = [module for module in MODULES if os.path.isdir(f"{folder}/{module}")]
    text = f"the kernel module {loaded[0]} is loaded" if loaded else f"the kernel module {MODULES[0]} is not loaded"
    return {"name": "peer memory", "there": bool(loaded), "text": text}


def dma_buf(found):
    """`found` is the result of the core's `dma_bufs()`."""
    name, devices = "dma-buf", found["devices"]
    if not devices:
        return {"name": name, "there": None, "text": f"no GPU to query: {found['none'] or 'the driver shows none'}"}
    lines = [f"{one['bus']} {'exports' if one['exports'] else 'does not export'} dma-bufs" for one in devices]
    return {"name": name, "there": all(one["exports"] for one in devices), "text": ", ".join(lines)}


def direct(network, tried):
    why = network["none"] or network["why_host_memory"]
    text = f"{STAGED}: {why}" if why else tried or UNTRIED
    return {"name": "GPUDirect", "there": False if why else None, "text": text}


def facts(core, network=None, tried=lambda: ""):
    """One dict per fact: its name, whether it is available (None: unknown), and a text. `tried` returns what a group
    over two hosts reports of it."""
    network = network or core.network()
    trial = "" if network["none"] or network["why_host_memory"] else tried()
    return [direct(network, trial), peermem(), dma_buf(core.dma_bufs())]
