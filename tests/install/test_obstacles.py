"""Commands and the doctor on machines that lack something."""

import sys
import types

import nvx as nvx_module
from nvx import cli, doctor


def test_a_command_and_the_doctor_report_why_the_module_does_not_load(monkeypatch, capsys):
    def fails(name, *_):
        if name == "nvx._C":
            raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found")

    monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=fails), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "nvx._C", raising=False)
    monkeypatch.delattr(nvx_module, "_C", raising=False)
    assert cli.main(["env"]) == 2
    text = "nvx's C++ module does not load (libstdc++.so.6: version `GLIBCXX_3.4.32' not found)"
    assert capsys.readouterr().err.startswith(f"nvx env: {text}: `conda install ")
    found = doctor.check_build()
    assert found.text == text and found.hint.startswith("`conda install ")


def test_a_machine_without_a_folder_for_temporary_files_is_reported(monkeypatch, capsys):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(doctor.tempfile, "gettempdir", none)
    assert cli.main(["demo", "-n", "2"]) == 2
    assert "nvx demo: [Errno 2] No usable temporary directory found" in capsys.readouterr().err
    found = doctor.check_temporary()
    assert found.state == "FAIL" and "--tmpfs /tmp" in found.hint


def test_doctor_counts_the_cores_within_the_quota(monkeypatch):
    monkeypatch.setattr(nvx_module._load(), "processor", lambda: {"cores": 1})
    found = doctor.check_cores()
    assert found.state == "WARN" and found.text.startswith("1 of ")
