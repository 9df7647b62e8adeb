"""scripts/wheels.py: which wheels it plans, and why the others cannot be."""

import importlib.util
import pathlib
from types import SimpleNamespace

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "wheels.py"


def load():
    spec = importlib.util.spec_from_file_location("wheels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_has_each_python_and_torch_or_states_why_not():
    pythons = {"3.10": "/usr/bin/python3.10", "3.12": "/usr/bin/python3.12"}
    offers = {"/usr/bin/python3.10": {"2.11": "2.11.0"}, "/usr/bin/python3.12": {"2.11": "2.11.0", "2.14": "2.14.1"}}
    wheels = load().plan(["3.10", "3.11", "3.12"], ["2.11", "2.14"], pythons.get, offers.get)
    assert [(wheel.python, wheel.version, wheel.result) for wheel in wheels] == [
        ("3.10", "2.11.0", "planned"),
        ("3.10", None, "not built: pip has no torch 2.14 for it"),
        ("3.11", None, "not built: no interpreter with venv and headers"),
        ("3.11", None, "not built: no interpreter with venv and headers"),
        ("3.12", "2.11.0", "planned"),
        ("3.12", "2.14.1", "planned"),
    ]


def test_of_each_minor_it_takes_the_newest_that_pip_offers(monkeypatch):
    wheels = load()
    output = "torch (2.14.1)\nAvailable versions: 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.9.1\n  INSTALLED: 2.13.0"
    monkeypatch.setattr(wheels, "output_of", lambda *command: output)
    assert wheels.offered("python") == {"2.14": "2.14.1", "2.13": "2.13.0+cpu", "2.9": "2.9.1"}
    monkeypatch.setattr(wheels, "output_of", lambda *command: "")
    assert "2.14" not in wheels.offered("python")


@pytest.mark.parametrize(
    ("results", "fails"), [(["built", "not built"], False), (["not built"], True), (["built", "FAILED: why"], True)]
)
def test_it_fails_if_a_wheel_fails_or_none_is_built(results, fails):
    wheels = [SimpleNamespace(result=one, file="nvx.whl" if one == "built" else None) for one in results]
    assert load().fails(wheels) == fails


@pytest.mark.parametrize("size", [8_000_000, 8_000_001])
def test_a_wheel_of_more_than_8_mb_is_refused(monkeypatch, tmp_path, size):
    wheels = load()
    audited = tmp_path / "environments" / "builder" / "made" / "audited" / "nvx.whl"
    audited.parent.mkdir(parents=True)
    with open(audited, "wb") as file:
        file.truncate(size)
    monkeypatch.setattr(wheels, "OUT", tmp_path)
    monkeypatch.setattr(wheels, "new_environment", lambda *given: (tmp_path / "bin" / "python", ["pip"]))
    monkeypatch.setattr(wheels, "run", lambda *command, **env: '{"sym_tag": "manylinux", "external_libs": {}}')
    wheel = SimpleNamespace(interpreter="python", version="2.14.1", torch="2.14")
    if size > 8_000_000:
        with pytest.raises(RuntimeError, match="the wheel has 8.00 MB, more than 8"):
            wheels.build(wheel, "cp312", tmp_path / "log")
    else:
        assert wheels.build(wheel, "cp312", tmp_path / "log")[0] == audited
