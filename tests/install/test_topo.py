"""`nvx topo`: on this machine, and over a fake NVML with GPUs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import types

import pytest
import warm
from nvx import cli, gpudirect
from nvx.commands import topo

HERE = pathlib.Path(__file__).parent


def run(*arguments, **environment):
    command = ["-m", "nvx.cli", "topo", *arguments]
    env = {**os.environ, **environment}
    return warm.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)


@pytest.fixture(scope="module")
def fake_nvml(tmp_path_factory):
    """A folder with a libnvidia-ml.so.1 that the loader finds first, and no libcuda that could be loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("nvml")
    source, library = HERE / "fake_nvml.c", folder / "libnvidia-ml.so.1"
    (folder / "libcuda.so.1").write_text("not a library")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return folder


def pair(a, b, **facts):
    plain = {
        "gpus": (a, b),
        "label": "NV18",
        "nvswitch": True,
        "expected_gb_s": 450.0,
        "expected_us": None,
        "measured_gb_s": None,
        "measured_us": None,
        "measured_own_us": None,
        "measured_back_gb_s": None,
        "measured_back_us": None,
        "measured_back_own_us": None,
        "why_not_measured_back": "",
        "why_not_measured": "",
        "transport": "GPU memory over NVLink",
        "why_not_better": "",
    }
    return {**plain, **facts}


def test_the_matrix_is_as_nvidia_smi_has_it():
    gpus = [{"cpus": "0-31", "numa": 0}, {"cpus": "0-31", "numa": 0}, {"cpus": "", "numa": -1}]
    pairs = [pair(0, 1), pair(0, 2, label="SYS"), pair(1, 2, label="PIX")]
    assert "\n".join(topo.matrix_lines(gpus, pairs)) == (
        "      GPU0  GPU1  GPU2  CPU Affinity  NUMA Affinity\n"
        "GPU0  X     NV18  SYS   0-31          0\n"
        "GPU1  NV18  X     PIX   0-31          0\n"
        "GPU2  SYS   PIX   X     N/A           N/A"
    )
    assert [sign for sign, _ in topo.LEGEND] == ["X", "SYS", "NODE", "PHB", "PXB", "PIX", "NV#"]


def test_each_pair_shows_what_it_shares_and_why_nothing_better():
    nvlink = "GPU memory over NVLink"
    back = {"measured_back_gb_s": 201.2, "measured_back_us": 8.5}
    pairs = [
        pair(0, 1, measured_gb_s=391.4, measured_us=8.25, expected_us=9.75, **back),
        pair(0, 2, label="PHB", nvswitch=False, expected_gb_s=0.0, transport="pinned host memory", why_not_better="no"),
        pair(1, 2, why_not_measured="hidden"),
        pair(1, 3, measured_gb_s=380.0, measured_us=8.0, why_not_measured_back="hung"),
    ]
    rows = [re.split("  +", line) for line in topo.pair_lines(pairs)]
    assert rows == [
        ["pair", "link", "expected", "measured", "sharing", "limitation"],
        ["0-1", "NV18 (NVSwitch)", "450 GB/s, 9.8 us", "391 GB/s, 8.2 us; back 201 GB/s, 8.5 us", nvlink, "-"],
        ["0-2", "PHB", "unknown", "-", "pinned host memory", "no"],
        ["1-2", "NV18 (NVSwitch)", "450 GB/s", "hidden", nvlink, "-"],
        ["1-3", "NV18 (NVSwitch)", "450 GB/s", "380 GB/s, 8.0 us; back hung", nvlink, "-"],
    ]


def test_estimate_by_rule_of_thumb_is_marked():
    def lines(**facts):
        found = {"driver": "1", "none": "", "why_not_measured": "", "warnings": []}
        nvlink = {"nvlink_lanes": 0, "nvlink_domain": ""}
        gpus = [{"name": "A", "bus": "b", "pcie": link, "pcie_most": link, "cpus": "", "numa": 0, **nvlink}] * 2
        return topo.gpu_lines({"kernels": True, "gpus": found | {"gpus": gpus, "pairs": [pair(0, 1, **facts)]}})

    link = {"generation": 5, "width": 16}
    assert topo.RULE_OF_THUMB in lines(expected_us=9.5, measured_us=8.0, measured_gb_s=300.0)
    assert topo.RULE_OF_THUMB not in lines()


def test_each_gpudirect_requirement_has_a_line(tmp_path):
    def facts_of(network, devices, none="", tried=""):
        core = types.SimpleNamespace(network=lambda: network, dma_bufs=lambda: {"devices": devices, "none": none})
        return {fact["name"]: (fact["there"], fact["text"]) for fact in gpudirect.facts(core, tried=lambda: tried)}

    bufs = [{"bus": f"0000:0{i}:00.0", "name": "A", "exports": i == 1} for i in (1, 2)]
    ucx = {"link": "UCX 1.19, host and CUDA memory", "none": "", "why_host_memory": ""}
    facts = facts_of(ucx, bufs)
    assert facts["GPUDirect"] == (None, gpudirect.UNTRIED)
    assert facts["dma-buf"] == (False, "0000:01:00.0 exports dma-bufs, 0000:02:00.0 does not export dma-bufs")
    staged = "between hosts, device tensors go through pinned host memory: "
    assert facts_of(ucx, bufs, tried=f"{staged}rank 0: late")["GPUDirect"] == (None, f"{staged}rank 0: late")
    ucx["why_host_memory"] = "UCX has no transport of RDMA here"
    assert facts_of(ucx, bufs, tried="no")["GPUDirect"] == (False, f"{staged}UCX has no transport of RDMA here")
    facts = facts_of({"link": "", "none": "no libucp", "why_host_memory": ""}, [], "no NVIDIA driver here")
    assert facts["GPUDirect"] == (False, f"{staged}no libucp")
    assert facts["dma-buf"] == (None, "no GPU to query: no NVIDIA driver here")
    assert gpudirect.peermem(str(tmp_path))["there"] is False
    (tmp_path / "nvidia_peermem").mkdir()
    assert gpudirect.peermem(str(tmp_path)) == {
        "name": "peer memory",
        "there": True,
        "text": "the kernel module nvidia_peermem is loaded",
    }


def test_a_library_that_has_rdma_is_not_reported_to_have_found_any():
    with_rdma = {"version": "1.13.1", "rdma": True, "path": "/lib/a"}
    without = {"version": "1.9.0", "rdma": False, "path": "/lib/b"}
    found = [with_rdma, without]
    lines = topo.between_lines({"link": "UCX 1.13.1", "none": "", "ucx_found": found, "rdma_ports": []})
    assert lines[1:] == [
        "  found   UCX 1.13.1, built with RDMA: /lib/a",
        "  found   UCX 1.9.0: /lib/b",
        "  RDMA    no active port",
    ]


def test_without_a_gpu_it_shows_the_machine_and_what_cpu_tensors_use(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    shown = run(LD_LIBRARY_PATH=str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    for begin in ("host ", "CPU tensors, inside this host: shared memory", "CPU tensors, between hosts:", "GPUs: none"):
        assert f"\n{begin}" in "\n" + shown.stdout, shown.stdout
    assert "NVX_STAGING_MB" in shown.stdout and "cores are available to this process" in shown.stdout
    assert "not measured" not in shown.stdout
    assert "\nnot measured: timing copies needs two GPUs" in run("--measure", LD_LIBRARY_PATH=str(tmp_path)).stdout
    report = json.loads(run("--json", LD_LIBRARY_PATH=str(tmp_path)).stdout)
    assert report["schema"] == topo.SCHEMA
    assert {fact["name"] for fact in report["gpudirect"]} >= {"GPUDirect", "dma-buf"}
    assert "\n  GPUDirect: between hosts, device tensors go through pinned host memory" in shown.stdout
    assert report["gpus"]["gpus"] == [] and "no NVIDIA driver here" in report["gpus"]["none"]
    assert report["host"]["cores"] >= 1 and report["host"]["numa"] == topo.numa_nodes()
    assert report["inside_host"]["level"] in report["inside_host"]["levels"]
    assert bool(report["between_hosts"]["link"]) != bool(report["between_hosts"]["none"])


def test_settings_are_shown_as_they_count(monkeypatch, capsys):
    for given, counts in (("9999", 512), ("abc", 30), ("100", 100), ("", 30)):
        monkeypatch.setenv("NVX_STAGING_MB", given)
        assert cli.main(["topo", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["inside_host"]["staging_mib"] == counts
    refused = run(NVX_TUNE="bad=1")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.startswith('nvx topo: NVX_TUNE: there is no key "bad"')


def test_table_shows_the_facts_of_nvml(fake_nvml):
    shown = run(LD_LIBRARY_PATH=str(fake_nvml))
    assert shown.returncode == 0, shown.stderr
    lines = [line.rstrip() for line in shown.stdout.splitlines()]
    start = lines.index("GPUs, driver 580.95")
    assert lines[start + 1 : start + 9] == [
        '  GPU0  Fake H100 "0", 0000:fa:00.0, PCIe gen 1 x16 (at most gen 5 x16),'
        " NVLink 4.0, 18 of 18 lanes up, 27 GB/s each",
        '  GPU1  Fake H100 "1", 0000:fb:00.0, PCIe gen 1 x16 (at most gen 5 x16),'
        " NVLink 4.0, 18 of 18 lanes up, 27 GB/s each",
        '  GPU2  Fake H100 "2", 0000:fc:00.0, PCIe gen 1 x4 (at most gen 5 x16),'
        " NVLink 4.0, 9 of 18 lanes up, 25 GB/s each",
        "",
        "      GPU0  GPU1  GPU2  CPU Affinity  NUMA Affinity",
        "GPU0  X     NV18  NV9   N/A           N/A",
        "GPU1  NV18  X     NV9   N/A           N/A",
        "GPU2  NV9   NV9   X     N/A           N/A",
    ]
    refused = "no GPU memory over NVLink: the chipset does not support peer access"
    assert any(line.startswith("0-2") and line.endswith(f"pinned host memory      {refused}") for line in lines), lines
    warnings = [line for line in lines if line.startswith("[WARN]")]
    assert warnings == [
        '[WARN] nvlink-half: GPU 2 (Fake H100 "2") has 9 of 18 NVLinks up -> nvidia-smi nvlink -s -i 2',
        '[WARN] nvlink-rate-half: GPU 1 (Fake H100 "1") has NVLinks at 13 GB/s instead of 27 GB/s: 3, 5'
        " -> nvidia-smi nvlink -s -i 1",
        '[WARN] nvlink-rate-half: GPU 2 (Fake H100 "2") has NVLinks at 13 GB/s instead of 25 GB/s:'
        " 0, 1, 2, 3, 4, 5, 6, 7, 8 -> nvidia-smi nvlink -s -i 2",
        '[WARN] pcie-width-half: GPU 2 (Fake H100 "2") has a PCIe link of x4 instead of x16'
        " -> nvidia-smi -q -d PCIE -i 2",
    ]


def test_the_domain_of_a_gpu_is_distinguished_from_its_host(fake_nvml):
    shown = run(LD_LIBRARY_PATH=str(fake_nvml), FAKE_FABRIC="7 2").stdout
    assert shown.count(f"GB/s each, NVLink domain {'07' * 16}, clique 2\n") == 3, shown
    report = json.loads(run("--json", LD_LIBRARY_PATH=str(fake_nvml), FAKE_FABRIC="0 2").stdout)["gpus"]
    assert [gpu["nvlink_domain"] for gpu in report["gpus"]] == [""] * 3, "the switch of one host has no cluster"


def test_json_holds_the_pairs_and_what_could_not_be_measured(fake_nvml):
    report = json.loads(run("--json", "--measure", LD_LIBRARY_PATH=str(fake_nvml)).stdout)["gpus"]
    assert [(tuple(p["gpus"]), p["label"], p["pcie_path"]) for p in report["pairs"]] == [
        ((0, 1), "NV18", "PIX"),
        ((0, 2), "NV9", "SYS"),
        ((1, 2), "NV9", "SYS"),
    ]
    assert report["pairs"][0]["expected_gb_s"] == pytest.approx(18 * 26.562)
    assert report["pairs"][0]["measured_gb_s"] is None
    assert report["gpus"][2]["nvlink_lanes_up"] == list(range(9))
    assert report["gpus"][1]["nvlink_lanes_up_gb_s"][2:5] == [26.562, 13.281, 26.562]
    assert [warning["name"] for warning in report["warnings"]] == [
        "nvlink-half",
        "nvlink-rate-half",
        "nvlink-rate-half",
        "pcie-width-half",
    ]
    assert "driver" in report["why_not_measured"]
