"""`nvx topo`: the machine, the links between its GPUs, and the transports that nvx would use.

The matrix uses the labels of `nvidia-smi topo -m`. `--measure` times copies between the GPUs.
"""

import argparse
import glob
import json
import os

import nvx

from .. import gpudirect
from ..bench.machine import caches, first_line
from . import refusing

PCIE = "gen {generation} x{width}"
SCHEMA = 1
SIZES = (4 << 10, 1 << 20, 64 << 20)

LEGEND = (
    ("X", "the GPU itself"),
    ("SYS", "PCIe, and the interconnect between NUMA nodes"),
    ("NODE", "PCIe, and the interconnect between host bridges of one NUMA node"),
    ("PHB", "PCIe, through one host bridge (the processor)"),
    ("PXB", "PCIe, through several switches but no host bridge"),
    ("PIX", "PCIe, through one switch at most"),
    ("NV#", "# bonded NVLinks"),
)

RULE_OF_THUMB = (
    "(The expected time of a small copy is a copy measured within the first GPU plus a rule of thumb of 1 to 4 us for"
    " the link.)"
)


def numa_nodes(folder="/sys/devices/system/node"):
    nodes = []
    for node in glob.glob(f"{folder}/node[0-9]*"):
        total = first_line(f"{node}/meminfo").split()
        mib = int(total[-2]) >> 10 if len(total) > 2 and total[-2].isdigit() else None
        number = int(os.path.basename(node).removeprefix("node"))
        nodes.append({"node": number, "cpus": first_line(f"{node}/cpulist"), "memory_mib": mib})
    return sorted(nodes, key=lambda node: node["node"])


def gather(measure=False):
    """The whole report, in the form that --json prints."""
    from ..doctor import memory_limit

    core = nvx._load()
    gpus = core.gpu_topology(measure)
    if measure and len(gpus["gpus"]) < 2:
        gpus["why_not_measured"] = "timing copies needs two GPUs"
    processor, network = core.processor(), core.network()
    settings = {row[0]: row[1] if row[4] else os.environ.get(row[0]) or row[1] for row in core.config_table()}
    host = {"name": processor["host"], "cores": processor["cores"], "cores_online": os.cpu_count()}
    return {
        "schema": SCHEMA,
        "host": host | {"caches": caches(), "numa": numa_nodes()},
        "inside_host": {
            "transport": "shared memory",
            "cgroup_limit_bytes": memory_limit(),
            "staging_mib": min(int(float(settings["NVX_STAGING_MB"])), 512),
            "level": processor["level"],
            "levels": processor["levels"],
            "plans": [nvx.explain("all_reduce", size, max(2, processor["cores"])) for size in SIZES],
        },
        "between_hosts": network,
        "gpudirect": gpudirect.facts(core, network),
        "kernels": core.build_info()["cuda"],
        "gpus": gpus,
    }


def host_lines(host):
    held = {}
    for cache in host["caches"]:
        held.setdefault(cache["name"], f"{cache['name']} {cache['size']} (cpus {cache['cpus']})")
    lines = [f"host {host['name']}: {host['cores']} of {host['cores_online']} cores are available to this process"]
    lines.append(f"  caches  {', '.join(held.values()) or 'unknown'}")
    for node in host["numa"]:
        memory = "" if node["memory_mib"] is None else f", {node['memory_mib']} MiB"
        lines.append(f"  NUMA node {node['node']}: cpus {node['cpus'] or 'none'}{memory}")
    return lines


def inside_lines(inside):
    limit = inside["cgroup_limit_bytes"]
    bound = "no cgroup limit" if limit is None else f"cgroup limit {limit >> 20} MiB"
    lines = ["CPU tensors, inside this host: shared memory"]
    lines.append(
        f"  one memfd per process, not /dev/shm; staging at most {inside['staging_mib']} MiB per process"
        f" (NVX_STAGING_MB); {bound}"
    )
    lines.append(f"  loops   {inside['level']} of {', '.join(inside['levels'])} (NVX_CPU_LEVEL)")
    lines += [f"  {plan}" for plan in inside["plans"]]
    return lines


def between_lines(between):
    lines = [f"CPU tensors, between hosts: {between['link'] or 'none: ' + between['none']}"]
    for candidate in between["ucx_found"]:
        rdma = ", built with RDMA" if candidate["rdma"] else ""
        lines.append(f"  found   UCX {candidate['version']}{rdma}: {candidate['path']}")
    lines.append(f"  RDMA    {', '.join(between['rdma_ports']) or 'no active port'}")
    return lines


def columns(rows):
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def matrix_lines(gpus, pairs):
    labels = {}
    for pair in pairs:
        a, b = pair["gpus"]
        labels[a, b] = labels[b, a] = pair["label"]
    count = range(len(gpus))
    rows = [["", *(f"GPU{i}" for i in count), "CPU Affinity", "NUMA Affinity"]]
    for i in count:
        row = ["X" if i == j else labels[i, j] for j in count]
        numa = "N/A" if gpus[i]["numa"] < 0 else str(gpus[i]["numa"])
        rows.append([f"GPU{i}", *row, gpus[i]["cpus"] or "N/A", numa])
    return columns(rows)


def pair_lines(pairs):
    rows = [["pair", "link", "expected", "measured", "sharing", "limitation"]]
    for pair in pairs:
        a, b = pair["gpus"]
        by = pair["label"] + (" (NVSwitch)" if pair["nvswitch"] else "")
        should = f"{pair['expected_gb_s']:.0f} GB/s" if pair["expected_gb_s"] else "unknown"
        if pair["expected_us"] is not None:
            should += f", {pair['expected_us']:.1f} us"
        measured = pair["why_not_measured"] or "-"
        if pair["measured_gb_s"] is not None:
            measured = f"{pair['measured_gb_s']:.0f} GB/s, {pair['measured_us']:.1f} us; back "
            if pair["measured_back_gb_s"] is None:
                measured += pair["why_not_measured_back"] or "-"
            else:
                measured += f"{pair['measured_back_gb_s']:.0f} GB/s, {pair['measured_back_us']:.1f} us"
        rows.append([f"{a}-{b}", by, should, measured, pair["transport"], pair["why_not_better"] or "-"])
    return columns(rows)


def gpu_lines(report):
    found = report["gpus"]
    unmeasured = [f"not measured: {found['why_not_measured']}"] if found["why_not_measured"] else []
    if found["none"]:
        return [f"GPUs: none: {found['none']}", *unmeasured]
    lines = [f"GPUs, driver {found['driver']}"]
    for i, gpu in enumerate(found["gpus"]):
        nvlink = "no NVLink"
        if gpu["nvlink_lanes"]:
            up = f"{len(gpu['nvlink_lanes_up'])} of {gpu['nvlink_lanes']} lanes up"
            version = f" {gpu['nvlink_version']}" if gpu["nvlink_version"] else ""
            nvlink = f"NVLink{version}, {up}" + (f", {gpu['lane_gb_s']:.0f} GB/s each" if gpu["lane_gb_s"] else "")
        lines.append(
            f"  GPU{i}  {gpu['name']}, {gpu['bus']}, PCIe {PCIE.format(**gpu['pcie'])}"
            f" (at most {PCIE.format(**gpu['pcie_most'])}), {nvlink}"
            + (f", NVLink domain {gpu['nvlink_domain']}" if gpu["nvlink_domain"] else "")
        )
    lines += ["", *matrix_lines(found["gpus"], found["pairs"]), ""]
    lines += columns([[f"  {sign}", meaning] for sign, meaning in LEGEND])
    if found["pairs"]:
        lines += ["", *pair_lines(found["pairs"])]
        if any(pair["expected_us"] is not None for pair in found["pairs"]):
            lines.append(RULE_OF_THUMB)
    lines += unmeasured
    for warning in found["warnings"]:
        lines.append(f"[WARN] {warning['name']}: {warning['text']} -> {warning['command']}")
    if not report["kernels"]:
        lines.append(
            "This build of nvx has no kernels: CUDA tensors go through host memory. The table shows what these GPUs"
            " could share."
        )
    return lines


def text(report):
    blocks = (
        host_lines(report["host"]),
        inside_lines(report["inside_host"]),
        between_lines(report["between_hosts"]),
        ["Device tensors, between hosts", *(f"  {fact['name']}: {fact['text']}" for fact in report["gpudirect"])],
        gpu_lines(report),
    )
    return "\n\n".join("\n".join(block) for block in blocks)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="nvx topo",
        description="Shows this machine, the links between its GPUs, and the transports that nvx would use.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--measure", action="store_true", help="time copies between the GPUs, for at most a minute")
    options = parser.parse_args(arguments)
    with refusing(ValueError):
        report = gather(options.measure)
    print(json.dumps(report, indent=2) if options.json else text(report))
    return 0
