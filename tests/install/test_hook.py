"""`import torch` with nvx installed registers the backend: quickly, once, without loading C++, and always."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

ONE_RANK = """
import torch, torch.distributed as dist
dist.init_process_group("nvx", store=dist.HashStore(), rank=0, world_size=1)
value = torch.arange(4.0)
dist.all_reduce(value)
print(dist.get_backend(), value.tolist())
dist.destroy_process_group()
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the installed package, first on the path, which a test may break."""
    installed = pathlib.Path(importlib.util.find_spec("nvx").origin).parent
    shutil.copytree(installed, tmp_path / "nvx", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def built_for(package, minor):
    facts = package / "nvx" / "_built.py"
    lines = [line for line in facts.read_text().splitlines() if not line.startswith("TORCH =")]
    facts.write_text("\n".join([*lines, f'TORCH = "{minor}"', ""]))


def test_both_entry_points_are_there(python):
    code = """
from importlib.metadata import entry_points
for group in ("torch.backends", "torch.distributed.backends"):
    print(group, [e.value for e in entry_points(group=group) if e.name == "nvx"])
"""
    lines = python.output(code).splitlines()
    assert lines == ["torch.backends ['nvx:_autoload']", "torch.distributed.backends ['nvx:_register']"]


def test_import_torch_is_enough(python):
    assert python.output(ONE_RANK) == "nvx [0.0, 1.0, 2.0, 3.0]"


def test_import_nvx_is_enough_without_autoload(python):
    output = python.output("import nvx\n" + ONE_RANK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert output == "nvx [0.0, 1.0, 2.0, 3.0]"


@pytest.mark.skipif(TORCH < (2, 14), reason="torch finds backends by name from 2.14 on")
def test_the_name_alone_is_enough_without_autoload(python):
    assert python.output(ONE_RANK, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "nvx [0.0, 1.0, 2.0, 3.0]"


def test_import_nvx_first_registers_it_once_warns_of_nothing_and_leaves_the_defaults_alone(python):
    code = """
import nvx, torch
from torch.distributed import Backend
before = Backend._plugins["NVX"], list(Backend.backend_list), dict(Backend.default_device_backend_map)
nvx._autoload(); nvx._autoload(); nvx._register()
print(before == (Backend._plugins["NVX"], list(Backend.backend_list), dict(Backend.default_device_backend_map)))
print(before[1].count("nvx"), before[2]["cpu"])
"""
    assert python.output(code, flags=("-W", "error:nvx")).split() == ["True", "1", "gloo"]


def test_serves_a_device_that_the_backend_string_names(python):
    code = """
import torch, torch.distributed as dist
dist.init_process_group("cpu:nvx,xpu:nvx", store=dist.HashStore(), rank=0, world_size=1)
print([dist.group.WORLD._get_backend(torch.device(kind)).name() for kind in ("cpu", "xpu")])
dist.destroy_process_group()
"""
    assert python.output(code, imported=True) == "['nvx', 'nvx']"


@pytest.mark.parametrize("node", ["/dev/kfd", "/dev/nvidiactl"])
def test_the_name_alone_serves_gpus_as_cuda(python, node):
    """A GPU of AMD is a device "cuda", too, in a torch with ROCm. Without a GPU, or with all hidden, there is none."""
    code = f"""
import os, nvx, torch
torch.version.cuda, torch.version.hip = ("13.0", None) if "nvidia" in "{node}" else (None, "6.4")
os.path.exists = lambda path: path == "{node}"
print(nvx._devices())
os.environ["HIP_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"] = ""
print(nvx._devices())
os.environ.clear()
torch.version.cuda = torch.version.hip = None
print(nvx._devices())
"""
    assert python.output(code, imported=True).splitlines() == ["['cpu', 'cuda']", "['cpu']", "['cpu']"]


def test_nccl_is_for_cuda_tensors_only(python):
    code = "import torch, nvx.delegate; print(nvx.delegate.probe(torch.device('xpu', 0)))"
    output = python.output(code, imported=True)
    assert output == "('', 'NCCL serves CUDA tensors, and this tensor is on xpu')"


def test_threads_that_use_it_first_wait_for_the_one_that_loads_it(python):
    code = """
import threading
import torch, nvx
errors = []
def use():
    try:
        nvx._load().ProcessGroupNVX
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=use) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(errors)
"""
    assert [python.output(code, imported=True) for _ in range(8)] == ["[]"] * 8


def test_loads_no_cpp_and_starts_no_thread(python):
    code = """
import os, sys
import torch
before = len(os.listdir("/proc/self/task"))
import nvx
print("NVX" in torch.distributed.Backend._plugins)
nvx._autoload()
print("NVX" in torch.distributed.Backend._plugins, "nvx._C" in sys.modules)
print(len(os.listdir("/proc/self/task")) - before)
"""
    assert python.output(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == ["True", "True", "False", "0"]


def test_takes_under_a_hundredth_of_the_import_of_torch():
    code = """
import time
start = time.process_time()
import torch
torch_took, start = time.process_time() - start, time.process_time()
import nvx; nvx._autoload()
print((time.process_time() - start) / torch_took)
"""
    # Processor time beside processor time of the same process, because machines differ. The best of three, because the
    # machine may be busy.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", code]
    shares = (
        float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(3)
    )
    assert any(share < 0.01 for share in shares)


def test_a_failure_does_not_break_import_torch(python, package):
    init = package / "nvx" / "__init__.py"
    init.write_text(
        init.read_text().replace("def _register():", "def _register():\n    raise OSError('broken on purpose')\n")
    )
    ended = python("import torch; print(torch.ones(1).item())", path=package)
    assert (ended.returncode, ended.stdout.strip()) == (0, "1.0")
    assert "nvx could not register itself: broken on purpose" in ended.stderr


FOR_ANOTHER = "was built for torch 2.9 and cannot serve torch 2."


def assert_one_sentence(printed):
    lines = [line for line in printed.splitlines() if FOR_ANOTHER in line]
    assert len(lines) == 1, printed
    assert "pip install --no-build-isolation" in lines[0]


def test_a_build_for_another_minor_is_one_sentence_and_refused_in_the_same_words(python, package):
    built_for(package, "2.9")
    ended = python("import sys, torch; print('alive', file=sys.stderr)" + ONE_RANK, path=package)
    imported, alive, refused = ended.stderr.partition("alive\n")
    assert alive and ended.returncode != 0, ended.stderr
    assert_one_sentence(imported)
    assert FOR_ANOTHER in refused.strip().splitlines()[-1]
    assert "undefined symbol" not in ended.stderr


def test_a_build_for_another_minor_breaks_nothing_where_warnings_are_errors(python, package):
    built_for(package, "2.9")
    ended = python("import torch; print('alive')", path=package, flags=("-W", "error::RuntimeWarning"))
    assert (ended.returncode, ended.stdout.strip()) == (0, "alive")
    assert_one_sentence(ended.stderr)


def test_a_package_that_was_never_built_names_the_command_to_run(python, package):
    (package / "nvx" / "_built.py").unlink()
    ended = python(ONE_RANK, path=package)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode != 0
    assert "no compiled module" in last and "pip install --no-build-isolation ." in last


def test_options_of_another_backend_are_ignored(python):
    code = """
import datetime, torch, torch.distributed as dist
foreign = dist.ProcessGroupGloo._Options() if hasattr(dist, "ProcessGroupGloo") else None
foreign._timeout = datetime.timedelta(seconds=77)
dist.init_process_group("nvx", store=dist.HashStore(), rank=0, world_size=1,
                        timeout=datetime.timedelta(seconds=55), pg_options=foreign)
print(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())
"""
    assert float(python.output(code, imported=True)) == 55.0


def test_one_options_object_serves_several_groups(python):
    code = """
import datetime, nvx, torch.distributed as dist
options = nvx.Options(timeout=datetime.timedelta(seconds=55))
dist.init_process_group("nvx", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
other = dist.new_group(backend="nvx", pg_options=options)
parts = [nvx._backend(group).options for group in (dist.group.WORLD, other)]
print(parts[0].group_name != parts[1].group_name, [part._timeout.total_seconds() for part in parts])
print(repr(options.group_name))
"""
    assert python.output(code, imported=True).splitlines() == ["True [55.0, 55.0]", "''"]
