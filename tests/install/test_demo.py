"""`nvx demo`."""

import os
import re
import subprocess
import time

import pytest
import torch
import warm
from nvx import demo


@pytest.mark.slow
def test_demo_trains_to_the_same_weights():
    command = ["-m", "nvx.cli", "demo", "--steps", "3", "--warmup", "1"]
    ended = warm.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(
        r"^(DDP|FSDP2) +[\d.]+ ms +[\d.]+ ms +[\d.]+ .*the same, bit for bit$", ended.stdout, re.MULTILINE
    )
    assert rows == ["DDP", "FSDP2"]
    assert "16/16 steps" in ended.stderr


def test_demo_sees_a_difference_in_the_weights():
    same = {"a": torch.ones(3), "b": torch.zeros(2)}
    off = {"a": torch.ones(3), "b": torch.tensor([0.0, 0.25])}
    broken = {"a": torch.full((3,), float("nan")), "b": torch.zeros(2)}
    assert demo.largest_difference(same, {name: value.clone() for name, value in same.items()}) == 0.0
    assert demo.largest_difference(same, off) == 0.25
    assert demo.largest_difference(same, broken) != 0.0
    row = demo.Row("DDP", {"nvx": 1.0, "gloo": 2.0}, (2.3, 0.4), 0.25)
    assert "DIFFER by up to 0.25" in demo.table([row], 3)
    for gap, verdict in ((3e-9, "the same but for rounding, within 3e-09"), (float("nan"), "DIFFER by up to nan")):
        row = demo.Row("DDP", {"nvx": 1.0, "gloo": 2.0}, (2.3, 0.4), gap, demo.ROUNDING)
        assert demo.table([row], 3).endswith(verdict)


def test_a_signal_leaves_no_folder_of_the_demo(tmp_path):
    started = warm.Popen(["-m", "nvx.cli", "demo"], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("nvx-demo-*/rendezvous")) and time.monotonic() < end:
        time.sleep(0.01)
    started.terminate()
    started.communicate(timeout=60)
    assert (started.returncode, list(tmp_path.iterdir())) == (130, [])
