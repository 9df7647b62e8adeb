"""An sdist builds, a wheel builds from it, and the installed package works alone. Without torch, the error names the
command to type."""

import configparser
import email
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

HOOK = "import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"


def run(command, *, cwd, **environment):
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return ended


def build(kind, source, into):
    into.mkdir(exist_ok=True)
    ended = run([sys.executable, "-c", HOOK.format(kind=kind), into], cwd=source)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return into / ended.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def sdist(root, work):
    """Made from a copy, because setuptools writes beside its input."""
    copy = work / "checkout"
    built = ("build", "build-*", "dist", "*.egg-info", "__pycache__")
    ignored = shutil.ignore_patterns(".git", ".venv", ".hypothesis", *built)
    shutil.copytree(root, copy, ignore=ignored, symlinks=True)
    return build("sdist", copy, work / "sdist")


@pytest.fixture(scope="module")
def unpacked(sdist, work):
    """Below a folder named as one whose files CMake leaves out of the core."""
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "levels", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next((work / "levels").iterdir())


@pytest.fixture(scope="module")
def wheel(unpacked, work):
    return build("wheel", unpacked, work / "wheel")


@pytest.fixture(scope="module")
def installed(wheel, work):
    """A folder that holds only the files that the wheel installs."""
    target = work / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_sdist_has_the_sources_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        names = ["/".join(name.split("/")[1:]) for name in archive.getnames()]
    for wanted in (".ci/run", ".clang-format", ".gitignore", ".pre-commit-config.yaml",
                   "CMakeLists.txt", "LICENSE", "README.md", "Makefile", "bench/results/all_reduce.png",
                   "cmake/find_torch.py", "csrc/kernel/reduce/dtype.h", "python/nvx/__init__.py", "scripts/run.sh",
                   "tests/install/test_build.py"):  # fmt: skip
        assert wanted in names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc", "_built.py"))]


def test_wheel_names_the_torch_it_serves(wheel):
    import torch

    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"torch=={minor}.*" in fields.get_all("Requires-Dist")
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License"] == "BSD-3-Clause"
    assert fields["Name"] == "torch-nvx", "PyPI's nvx is another project"


def test_wheel_is_typed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert {"nvx/py.typed", "nvx/_C.pyi"} <= set(archive.namelist())


def test_wheel_has_both_entry_points_and_the_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parser = configparser.ConfigParser(delimiters="=")
        parser.read_string(archive.read(name).decode())
    assert parser["torch.backends"]["nvx"] == "nvx:_autoload"
    assert parser["torch.distributed.backends"]["nvx"] == "nvx:_register"
    assert parser["console_scripts"]["nvx"] == "nvx.cli:main"


def test_module_exports_only_what_is_looked_up_and_contains_no_path(installed):
    """The exports are Python's entry point and the functions by which torch's allocator requests memory of a pool."""
    (module,) = (installed / "nvx").glob("_C.*.so")
    names = run(["nm", "-D", "--defined-only", module], cwd=installed).stdout.split("\n")
    assert sorted(line.split()[-1] for line in names if line) == ["PyInit__C", "nvx_pool_free", "nvx_pool_malloc"]
    dynamic = run(["readelf", "-d", module], cwd=installed).stdout
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    assert "libnccl" not in dynamic and "libcudart" not in dynamic


def test_module_is_hardened(installed):
    """Its tables of addresses are read-only once it is loaded, its stack is not executable, and its functions check
    their stacks and buffers. The flags are in cmake/flags.cmake."""
    (module,) = (installed / "nvx").glob("_C.*.so")
    headers = run(["readelf", "-W", "-l", "-d", module], cwd=installed).stdout
    assert "BIND_NOW" in headers and "GNU_RELRO" in headers and "TEXTREL" not in headers
    flags = dict(re.findall(r"^ +(LOAD|GNU_STACK) .* ([R ][W ][E ]) 0x", headers, re.MULTILINE))
    assert flags.keys() == {"LOAD", "GNU_STACK"}
    assert not re.search(r"^ +(LOAD|GNU_STACK) .* .WE 0x", headers, re.MULTILINE), "no memory to write and to execute"
    called = run(["nm", "-D", "--undefined-only", module], cwd=installed).stdout
    assert "__stack_chk_fail" in called and "__vsnprintf_chk" in called


def test_wheel_works_by_itself(python, installed):
    code = """
import torch, torch.distributed as dist
dist.init_process_group("nvx", store=dist.HashStore(), rank=0, world_size=1)
value = torch.arange(4.0)
dist.all_reduce(value)
import nvx
print(nvx.__file__, value.tolist())
"""
    assert python.output(code, path=installed) == f"{installed}/nvx/__init__.py [0.0, 1.0, 2.0, 3.0]"


def test_editable_install_works(python, unpacked, wheel):
    """`pip install -e .` builds in place; the wheel's build has compiled its objects."""
    assert wheel.is_file()
    ended = run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=unpacked, CXX="no-such-compiler")
    assert ended.returncode != 0, "the compiler is not the one of the build before"
    ended = run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=unpacked)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    code = "import nvx; print(nvx.obstacle(), nvx.__file__)"
    assert python.output(code, path=unpacked / "python") == f"None {unpacked}/python/nvx/__init__.py"


def test_a_module_that_is_gone_is_not_installed(unpacked, tmp_path):
    (tmp_path / "nvx").mkdir()
    (tmp_path / "nvx" / "gone.py").touch()
    ended = run([sys.executable, "setup.py", "build_py", "--build-lib", tmp_path], cwd=unpacked)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "nvx" / "cli.py").is_file() and not (tmp_path / "nvx" / "gone.py").exists()


def test_build_type_and_cmake_arguments_are_honoured(unpacked, work):
    """Configures only: a compiler that does not exist ends the build early, and the cache shows the arguments."""
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", work / "x", "--build-temp", work / "y"]
    ended = run(command, cwd=unpacked, CMAKE_ARGS="-DCMAKE_CXX_COMPILER=no-such-compiler", CMAKE_BUILD_TYPE="Debug")
    assert ended.returncode != 0
    assert "-DCMAKE_BUILD_TYPE=Debug" in ended.stdout
    assert "no-such-compiler" in ended.stdout + ended.stderr


def test_jobs_cuda_and_architectures_are_honoured(unpacked, work, tmp_path):
    """Runs a cmake that only prints its arguments."""
    (tmp_path / "cmake").write_text("#!/bin/sh\n")
    (tmp_path / "cmake").chmod(0o755)
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", work / "x", "--build-temp", work / "z"]
    wishes = {"MAX_JOBS": "7", "CUDA_HOME": "/opt/cuda", "TORCH_CUDA_ARCH_LIST": "9.0"}
    path = f"{tmp_path}:{os.environ['PATH']}:{sysconfig.get_path('scripts')}"
    ended = run(command, cwd=unpacked, PATH=path, **wishes)
    configure, build = (line.split() for line in ended.stdout.splitlines() if line.startswith("nvx: cmake "))
    assert {"-DCUDAToolkit_ROOT=/opt/cuda", "-DTORCH_CUDA_ARCH_LIST=9.0"} <= set(configure)
    assert build[-2:] == ["--parallel", "7"]


@pytest.fixture
def without_torch(tmp_path):
    """An interpreter that has setuptools and no torch."""
    assert run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], cwd=tmp_path).returncode == 0
    import setuptools

    modules = pathlib.Path(setuptools.__file__).parent.parent
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("setuptools", "_distutils_hack", "pkg_resources", "wheel", "packaging"):
        for found in (modules / name, *modules.glob(f"{name}-*.dist-info")):
            if found.exists():
                (tools / found.name).symlink_to(found)
    return tmp_path / "venv" / "bin" / "python", tools


def said_without_torch(unpacked, without_torch, work, *typed):
    """The output of a build that a program named pip, uv or build starts, or that nobody starts."""
    python, tools = without_torch
    hook = [str(python), "-c", HOOK.format(kind="wheel"), str(work / "none")]
    (tools / "build").mkdir(exist_ok=True)
    for name in ("bin/pip3.11", "bin/uv", "build/__main__.py"):
        program = tools / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"import subprocess, sys\nsys.exit(subprocess.run({hook}).returncode)\n")
    command = [python, *(tools / word if word.startswith("bin/") else word for word in typed)] if typed else hook
    ended = run(command, cwd=unpacked, PYTHONPATH=str(tools))
    assert ended.returncode != 0
    return ended.stdout + ended.stderr


def test_without_torch_it_names_the_command_to_run(unpacked, without_torch, work):
    printed = said_without_torch(unpacked, without_torch, work)
    assert "nvx is built against the torch you run" in printed
    assert "Traceback" not in printed.split("nvx is built against")[1]


def test_a_program_whose_name_is_cut_inside_a_character_may_build(unpacked, without_torch, work):
    """The kernel keeps 15 bytes of it."""
    python, tools = without_torch
    program = tools / "a-long-program\N{LATIN SMALL LETTER E WITH ACUTE}"
    program.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    program.chmod(0o755)
    hook = [program, python, "-c", HOOK.format(kind="wheel"), work / "none"]
    ended = run(hook, cwd=unpacked, PYTHONPATH=str(tools))
    assert "nvx is built against the torch you run" in ended.stderr and "UnicodeDecodeError" not in ended.stderr


@pytest.fixture
def with_torch(unpacked, without_torch, tmp_path):
    """Builds in an environment that is not activated, with a torch of some version."""
    python, tools = without_torch
    (tools / "torch").mkdir()
    (tools / "torch" / "__init__.py").touch()
    command = [python, "setup.py", "build_ext", "--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]

    def builds(version):
        (tools / "torch" / "version.py").write_text(f"__version__ = {version!r}\n")
        return run(command, cwd=unpacked, PYTHONPATH=str(tools), PATH=str(tmp_path / "empty"))

    return builds


def test_cmake_beside_the_interpreter_is_found(with_torch, without_torch, tmp_path):
    ended = with_torch("2.13.0")
    assert ended.returncode != 0
    assert ended.stderr.strip().splitlines()[-1] == "nvx: there is no cmake on PATH: pip install cmake ninja"
    cmake = without_torch[0].with_name("cmake")
    cmake.write_text("#!/bin/sh\necho it was found\n")
    cmake.chmod(0o755)
    ended = with_torch("2.13.0")
    assert ended.returncode == 0 and "it was found" in ended.stdout, ended.stderr
    record = tmp_path / "temp" / "cmake" / "environment.json"
    cache = record.with_name("CMakeCache.txt")
    cache.touch()
    with_torch("2.13.0")
    assert cache.exists()
    record.write_text(record.read_text().replace(f'"{record.parent}"', '"/before/it/was/moved"'))
    with_torch("2.13.0")
    assert not cache.exists(), "CMake refuses the cache of another folder"
    assert "warning: torch is 2.16.0, and nvx is tested with 2.11 to 2.15" in with_torch("2.16.0").stdout


def test_an_old_torch_is_refused(with_torch):
    ended = with_torch("2.10.1+cpu")
    assert ended.returncode != 0
    assert "has torch 2.10.1+cpu, and nvx serves 2.11 to 2.15" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("bin/pip3.11 install nvx.tar.gz", "pip3.11 install --no-build-isolation nvx.tar.gz"),
        (
            "bin/pip3.11 -v install --no-build-isolation -i https://localhost:secret@localhost 'nvx.tar.gz[test]'",
            "pip3.11 -v install --no-build-isolation -i ... 'nvx.tar.gz[test]'",
        ),
        (
            "bin/pip3.11 install --proxy u:secret@localhost --extra-index-url=https://localhost/secret/simple"
            " -ihttps://localhost/secret git+https://localhost:p@ss@localhost/nvx",
            "pip3.11 install --no-build-isolation --proxy ... --extra-index-url=... -i... git+https://...@localhost/nvx",
        ),
        (
            "bin/uv pip install --default-index https://localhost/secret --index=https://localhost/secret nvx.tar.gz",
            "uv pip install --no-build-isolation --default-index ... --index=... nvx.tar.gz",
        ),
        ("bin/uv pip install nvx.tar.gz", "uv pip install --no-build-isolation nvx.tar.gz"),
        ("-m build --wheel nvx", "{python} -m build --no-isolation --wheel nvx"),
    ],
)
def test_without_torch_it_repeats_the_command_that_was_typed(unpacked, without_torch, work, typed, advice):
    printed = said_without_torch(unpacked, without_torch, work, *shlex.split(typed))
    assert f"\n    {advice.format(python=without_torch[0])}\n" in printed
