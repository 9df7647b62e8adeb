"""CMake and the scripts find UCX, ccache and a compiler on machines of several kinds. Nothing is built."""

import os
import subprocess
import sys

import pytest


def found_by(script, *options, **environment):
    """The output of one of CMake's files, which runs alone."""
    command = ["cmake", *(f"-D{option}" for option in options), "-P", str(script)]
    env = {name: os.environ[name] for name in os.environ if not name.startswith(("NVX_", "UCX_", "HPCX_"))}
    env |= {name: str(value) for name, value in environment.items()}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return " ".join((ended.stdout + ended.stderr).split())


@pytest.fixture
def ucx(tmp_path):
    """Makes a folder that has headers of this version, also as the Python package libucx."""

    def install(version):
        api = tmp_path / version / "libucx" / "include" / "ucp" / "api"
        api.mkdir(parents=True, exist_ok=True)
        (api / "ucp.h").touch()
        major, minor = version.split(".")
        (api / "ucp_version.h").write_text(f"#define UCP_API_MAJOR    {major}\n#define UCP_API_MINOR    {minor}\n")
        (tmp_path / version / "libucx" / "__init__.py").touch()
        return tmp_path / version / "libucx"

    return install


def test_the_first_ucx_that_is_new_enough_is_taken(root, ucx):
    script, old = root / "cmake" / "ucx.cmake", ucx("1.12")
    of_system = f"CMAKE_PREFIX_PATH={old}"
    package = {"PYTHONPATH": ucx("1.22").parent}
    python = f"Python_EXECUTABLE={sys.executable}"
    assert f"nvx: UCX 1.22 in {ucx('1.22')}" in found_by(script, of_system, python, **package)
    assert f"nvx: UCX 1.13 in {ucx('1.13')}" in found_by(script, of_system, python, UCX_HOME=ucx("1.13"), **package)
    newer = f"CMAKE_PREFIX_PATH={ucx('1.20')}"
    assert f"nvx: UCX 1.20 in {ucx('1.20')}" in found_by(script, newer, python, UCX_HOME=old, **package)
    assert "UCX 1.12" in found_by(script, of_system) and "is too old" in found_by(script, of_system)
    assert "of UCX 1.13 or newer" in found_by(script, newer, NVX_UCX_ROOT=old)


def test_a_ccache_that_fails_is_not_used(root, tmp_path):
    """As where it cannot write its folder."""
    ccache = tmp_path / "ccache"
    ccache.write_text("#!/bin/sh\necho ccache: error: Failed to create directory\nexit 1\n")
    ccache.chmod(0o755)
    script = tmp_path / "launcher.cmake"
    script.write_text(f'include("{root}/cmake/ccache.cmake")\nmessage("launcher: ${{CMAKE_CXX_COMPILER_LAUNCHER}}.")\n')
    output = found_by(script, f"NVX_CCACHE={ccache}", "CMAKE_CXX_COMPILER=c++")
    assert "nvx: ccache is not used: ccache: error: Failed to create directory" in output and "launcher: ." in output
    assert "launcher: ." in found_by(script, "NVX_CCACHE=")
    ccache.write_text("#!/bin/sh\nexit 0\n")
    assert f"{ccache}." in found_by(script, f"NVX_CCACHE={ccache}", "CMAKE_CXX_COMPILER=c++")


def test_headers_are_looked_for_by_the_compiler_that_cxx_names(root, tmp_path):
    """Nothing else is on PATH, as where only clang is installed."""
    script = 'has() { command -v "$1" >/dev/null; }; source scripts/system.sh; has_header there.h && echo found'
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\nread -r line\n[ "$line" = "#include <there.h>" ]\n')
    compiler.chmod(0o755)
    env = {"PATH": str(tmp_path), "CXX": "clang++ -stdlib=libc++"}
    command = ["/bin/bash", "-c", script]
    ended = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert ended.stdout == "found\n", ended.stderr


def test_the_tools_beside_the_interpreter_are_found(root, tmp_path):
    """PYTHON=... names an environment that is not active."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho /\n")
    cmake = tmp_path / "bin" / "cmake"
    cmake.touch()
    for program in (python, cmake):
        program.chmod(0o755)
    script = """
        has() { command -v "$1" >/dev/null; }
        source scripts/system.sh
        source scripts/python.sh
        chosen=$1
        choose_python() { py=$chosen site=build/site; }
        add_missing() { :; }
        add_second_ucx() { :; }
        can_install() { :; }
        install_packages() { :; }
        target=check python_step
        command -v cmake
    """
    ended = subprocess.run(
        ["bash", "-euc", script, "bash", str(python)], cwd=root, capture_output=True, text=True, check=False
    )
    assert ended.stdout.strip() == str(cmake), ended.stderr
