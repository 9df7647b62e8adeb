"""RDMA: whether `make test-rdma` runs, and what the doctor reports. Neither needs a device."""

import os
import subprocess

from nvx import doctor


def test_doctor_reports_whether_hosts_are_reached_over_rdma():
    rdma = "UCX 1.16.0 (/lib/libucp.so.0), rc_verbs on rxe0:1, tcp on eth0, host memory"
    tcp = "UCX 1.16.0 (/lib/libucp.so.0), tcp on eth0, host memory"
    assert doctor.judge_rdma(rdma, "rxe0:1") == "over RDMA"
    assert doctor.judge_rdma(tcp, "") == "over TCP: no active RDMA port here"
    assert doctor.judge_rdma(tcp, "rxe0:1") == "over TCP, although this host has RDMA (rxe0:1)"


def rdma_leg(root, devices, python):
    """The output of `make test-rdma`, with pytest's command in place of its run."""
    script = """
        note() { echo "$*"; }; say() { echo "$*"; }
        jobs=1 py=$1
        source scripts/test.sh
        run_pytest() { echo "$NVX_TEST_HOSTS $NVX_UCX_TLS $NVX_UCX_NET_DEVICES: $*"; }
        run_test_rdma
    """
    command = ["bash", "-euc", script, "bash", str(python)]
    env = {**os.environ, "RDMA_DEVICES": str(devices)}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_rdma_leg_runs_on_each_active_port_and_reports_a_skip(root, tmp_path):
    devices, python = tmp_path / "infiniband", tmp_path / "python"
    assert rdma_leg(root, devices, python) == [f"RDMA SKIPPED: no RDMA device here ({devices} is empty or absent)"]
    (devices / "rxe0").mkdir(parents=True)
    for ports, expected in (("", []), ("rxe0:1 rxe0:2", ["rxe0:1", "rxe0:2"])):
        python.write_text(f"#!/bin/sh\necho {ports}\n")
        python.chmod(0o755)
        lines = rdma_leg(root, devices, python)
        if not expected:
            assert lines == ["RDMA SKIPPED: no port of rxe0 is active"]
        ran = [line for line in lines if line.startswith("2 rc,ud,dc ")]
        assert [line.split()[2] for line in ran] == [f"{port}:" for port in expected]
        assert all("tests/torch/test_p2p.py" in line for line in ran)
