"""Where torch has CUDA, setup.py builds the kernels. A CUDA toolkit that cannot build them costs the kernels and not
the build, and one line says why and what to type.

The torch of these builds is the installed one, and claims CUDA 13.0. Of nvx they compile one file. What
cmake/cuda.cmake alone says about a toolkit needs no build."""

import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig

import pytest

LINE = "no CUDA kernels are built"
ERROR = "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"
OTHER_NVCC = "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*' && NVX_CUDA=1 "

# The architectures of a build that is not told any.
USUAL = ["80,code=sm_80", "90,code=sm_90", "100,code=sm_100", "120,code=sm_120", "80,code=compute_80"]

# nvcc's version, its error, and the reason and the advice that follow.
UNFIT = {
    "old": ("release 11.8", "", "is of CUDA 11.8 and torch of 13.0", OTHER_NVCC),
    "new": ("release 14.1", "", "is of CUDA 14.1 and torch of 13.0", OTHER_NVCC),
    "broken": ("cannot execute binary file", "", "bin/nvcc does not run", OTHER_NVCC),
    "host compiler": (
        "release 13.0",
        "host_config.h:140:2: error: #error -- unsupported GNU version! gcc versions later than 15 are not supported!",
        "gcc versions later than 15",
        "CUDAHOSTCXX=",
    ),
    "in parts": ("release 13.0", "/usr/bin/ld: cannot find -lcudart_static", "-lcudart_static", "NVX_CUDA=1 "),
    "no headers": ("release 13.0", "try.cu:1:10: fatal error: cuda/atomic: No such file", "cuda/atomic", OTHER_NVCC),
    "architecture": ("release 13.0", "nvcc fatal   : Unsupported gpu architecture", "gpu architecture", "NVX_CUDA=1 "),
    "silent": ("release 13.0", "", "bin/nvcc ended with 1", "NVX_CUDA=1 "),
}


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def toolkit(folder, version, error, *knows):
    """A folder whose nvcc has a version and architectures, and compiles nothing."""
    lists = "; ".join(f"echo {architecture}" for architecture in knows) or ":"
    says = f'case "$1" in --version) echo "{version}"; exit 0 ;; --list-gpu-code) {lists}; exit 0 ;; esac'
    program(folder / "bin" / "nvcc", f'{says}\necho "{error}" >&2\nexit 1')
    return folder


class Builder:
    """Builds in one folder, so each build finds in CMake's cache the values of the one before."""

    def __init__(self, root, work):
        import torch

        self.root, self.work, self.site = root, work, work / "site"
        self.kernels = work / "lib" / "nvx" / "_built.py"
        fake = self.site / "torch"
        fake.mkdir(parents=True)
        (fake / "__init__.py").touch()
        self.version = torch.__version__
        for name in ("include", "lib"):
            (fake / name).symlink_to(pathlib.Path(torch.__file__).parent / name)
        # Hides an nvcc of Python's packages. Those of PATH and of /usr/local are hidden by CMAKE_IGNORE_PATH.
        (self.site / "nvidia").mkdir()
        (self.site / "nvidia" / "__init__.py").touch()
        folders = [pathlib.Path(found).parent for found in filter(None, map(shutil.which, ("nvcc",)))]
        self.hidden = ";".join(map(str, [*folders, "/usr/local/cuda/bin"]))
        cmake = shutil.which("cmake")
        # In place of the module, one file of the host and those of the kernels, if any.
        program(
            work / "bin" / "cmake",
            f'[ "$1" = --build ] || exec {cmake} "$@"\n'
            'kernels=$(grep -q nvx_cuda "$2/compile_commands.json" && echo nvx_cuda)\n'
            f'exec {cmake} --build "$2" --target nvx_level_base $kernels',
        )

    def __call__(self, *, cuda="13.0", hip=None, first=None, **environment):
        facts = f"__version__ = {self.version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n"
        (self.site / "torch" / "version.py").write_text(facts)
        command = [sys.executable, "setup.py", "build_ext", "--build-lib", self.work / "lib", "--build-temp", self.work]
        return self.run(command, first, environment)

    def run(self, command, first, environment):
        env = {name: os.environ[name] for name in os.environ if not re.match("NVX_|CUDA|TORCH_|CMAKE_", name)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH")]))
        path = [first and str(first), str(self.work / "bin"), os.environ["PATH"], sysconfig.get_path("scripts")]
        env["PATH"] = os.pathsep.join(filter(None, path))
        env["CMAKE_ARGS"] = f"-DCMAKE_IGNORE_PATH='{self.hidden}' -DNVX_UCX=OFF"
        env |= {name: str(value) for name, value in environment.items()}
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=600, check=False)

    def without_kernels(self, **how):
        """Builds, and returns the one line with the reason why there are no kernels."""
        self.kernels.unlink(missing_ok=True)
        ended = self(**how)
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
        (line,) = (line for line in ended.stdout.splitlines() if LINE in line)
        built = runpy.run_path(str(self.kernels))
        assert built["CUDA"] == "" and built["NO_KERNELS"] and built["NO_KERNELS"] in line
        assert "CUDA tensors go through host memory" in line
        return line

    def line(self, *, cmake="cmake", cuda="13.0", first=None, asked="", visible="", **environment):
        """The same line from cmake/cuda.cmake alone. `asked`: architectures; `visible`: those of the GPUs here."""
        given = {
            "CMAKE_IGNORE_PATH": self.hidden,
            "NVX_CUDA": "AUTO",
            "NVX_TORCH_CUDA": cuda,
            "NVX_VISIBLE_GPUS": "ON" if visible else "OFF",
            "PROJECT_BINARY_DIR": self.work,
            "Python_EXECUTABLE": sys.executable,
            "TORCH_CUDA_ARCH_LIST": asked or visible,
        }
        defined = [f"-D{name}={value}" for name, value in given.items()]
        ended = self.run([cmake, *defined, "-P", self.root / "cmake" / "cuda.cmake"], first, environment)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (line,) = (line for line in ended.stdout.splitlines() if LINE in line)
        assert "CUDA tensors go through host memory" in line
        return line


@pytest.fixture(scope="module")
def build(root, tmp_path_factory):
    version = subprocess.run(["cmake", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    if tuple(map(int, version.split(".")[:2])) < (3, 26):
        pytest.skip(f"CMake is {version}, and only 3.26 and newer know nvcc's C++20: pip install 'cmake>=3.26'")
    return Builder(root, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("unfit", UNFIT)
def test_an_unfit_toolkit_costs_the_kernels_and_not_the_build(build, tmp_path, unfit):
    version, error, why, advice = UNFIT[unfit]
    says = build.without_kernels if unfit == "architecture" else build.line
    line = says(CUDA_HOME=toolkit(tmp_path, version, error))
    assert why in line
    assert f"To have kernels, type: {advice}" in line


def test_no_nvcc_costs_the_kernels_and_not_the_build(build):
    line = build.without_kernels()
    assert "(no nvcc in CUDA_HOME, PATH, /usr/local/cuda or Python's packages)" in line
    assert line.endswith(
        "pip install 'cuda-toolkit[nvcc,cccl]==13.0.*' && NVX_CUDA=1 pip install --no-build-isolation ."
    )


def test_python_has_no_package_with_the_nvcc_of_cuda_12(build):
    line = build.line(cuda="12.8")
    assert "type: CUDA_HOME=/path/to/cuda-12.8 NVX_CUDA=1 pip install" in line


def test_the_nvcc_of_a_python_package_is_found_with_its_libraries(build, monkeypatch):
    folder = build.site / "nvidia" / "cu13"
    toolkit(folder, "release 13.0", "error: $NVCC_APPEND_FLAGS")
    (folder / "lib").mkdir()
    (folder / "lib" / "libcudart_static.a").touch()
    try:
        assert f"-L{folder}/lib" in build.line()
    finally:
        shutil.rmtree(folder)


def test_the_first_nvcc_that_fits_is_taken(build, tmp_path):
    other = toolkit(tmp_path / "a", "release 12.4", "")
    fits = toolkit(tmp_path / "b", "release 13.1", "error: the second is tried")
    assert "the second is tried" in build.line(CUDA_HOME=other, first=fits / "bin")


def test_architectures_that_are_no_numbers_cost_the_kernels(build, tmp_path):
    line = build.line(CUDA_HOME=toolkit(tmp_path, "release 13.0", ""), asked="Hopper")
    assert "TORCH_CUDA_ARCH_LIST has Hopper" in line


def test_an_old_cmake_costs_the_kernels_and_not_the_build(root, tmp_path):
    old = shutil.which("cmake", path="/usr/bin")
    output = subprocess.run([old or "true", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"version 3\.(\d+)", output)
    if not found or not 22 <= int(found[1]) < 26:
        pytest.skip("this machine has no CMake from 3.22 to 3.25")
    work = tmp_path / "old"
    work.mkdir()
    build = Builder(root, work)
    (work / "bin" / "cmake").write_text((work / "bin" / "cmake").read_text().replace(shutil.which("cmake"), old))
    line = build.without_kernels(CUDA_HOME=toolkit(tmp_path, "release 13.0", ""))
    assert "3.26 is the first" in line and "pip install 'cmake>=3.26' && NVX_CUDA=1 " in line


def test_one_makes_it_an_error_and_zero_builds_none(build, tmp_path):
    home = toolkit(tmp_path, "release 13.0", "error: this is why")
    ended = build(CUDA_HOME=home, NVX_CUDA="1")
    assert ended.returncode != 0
    assert "error: this is why" in ended.stdout and "CMake Error" in ended.stdout
    ended = build(CUDA_HOME=home, NVX_CUDA="0")
    assert ended.returncode == 0 and LINE not in ended.stdout
    ended = build(CUDA_HOME=home, NVX_CUDA="yes")
    assert ended.returncode != 0 and "NVX_CUDA is 0 (no kernels), 1 " in ended.stderr


def test_torch_without_cuda_needs_no_kernels_and_no_warning(build, tmp_path):
    ended = build(cuda=None, CUDA_HOME=toolkit(tmp_path, "release 13.0", "error"))
    assert ended.returncode == 0 and LINE not in ended.stdout
    assert runpy.run_path(str(build.kernels))["NO_KERNELS"] == ""


def test_the_module_is_compiled_anew_for_another_torch(build):
    """Tools that keep the times of headers install torch, too."""
    build()
    commands = json.loads((build.work / "cmake" / "compile_commands.json").read_text())
    of_module = [one["command"] for one in commands if "/csrc/torch/" in one["file"]]
    assert of_module and all(f'NVX_TORCH=\\"{build.version}\\"' in command for command in of_module)


def test_a_kernel_that_does_not_compile_costs_the_kernels_and_not_the_build(build, tmp_path):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if not nvcc:
        pytest.skip("there is no nvcc here")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    error = f'{build.root}/csrc/x.cu(12): error: a "quoted" word'
    fails = f"case \"$*\" in *csrc/kernel/gpu/*) echo '{error}'; exit 2 ;; esac"
    program(tmp_path / "bin" / "nvcc", f'{fails}\nexec {nvcc} "$@"')
    how = {"cuda": re.search(r"release ([\d.]+)", version)[1], "CUDA_HOME": tmp_path, "TORCH_CUDA_ARCH_LIST": "9.0"}
    assert "(csrc/x.cu(12): error: a 'quoted' word)" in build.without_kernels(**how)
    ended = build(NVX_CUDA="1", **how)
    assert ended.returncode != 0 and LINE not in ended.stdout


@pytest.fixture
def simulated(build, tmp_path):
    """A build whose cmake only prints its arguments, and fails to build unless it was given an earlier failure."""
    program(
        tmp_path / "cmake",
        'case "$*" in *--build*) ;; *) echo "$*" >"$0.last"; echo NVX_CUDA:STRING=AUTO >"$4/CMakeCache.txt" ;; esac\n'
        f'case "$*" in *--build*) grep -q "CUDA_FAILED=nvcc" "$0.last" ||'
        f' {{ echo "${{FAILS:-{ERROR}}}"; exit 1; }} ;; esac',
    )
    return lambda **how: build(first=tmp_path, **how)


def commands(ended):
    return [shlex.split(line)[1:] for line in ended.stdout.splitlines() if line.startswith("nvx: cmake ")]


def test_a_build_that_fails_is_tried_once_without_kernels(simulated):
    ended = simulated()
    assert ended.returncode == 0
    first, _, second, _ = commands(ended)
    assert "-DNVX_CUDA_FAILED=" in first
    assert f"-DNVX_CUDA_FAILED={ERROR}" in second


def test_a_build_for_a_torch_without_cuda_is_not_tried_again(simulated):
    ended = simulated(cuda=None)
    assert ended.returncode != 0 and len(commands(ended)) == 2


@pytest.mark.parametrize("fails", ["csrc/x.cc:1:2: error: no", "c++: fatal error: Killed signal", "FAILED: x.cc.o"])
def test_a_build_that_fails_for_the_host_is_not_tried_again(simulated, fails):
    ended = simulated(FAILS=fails)
    assert ended.returncode != 0 and len(commands(ended)) == 2


@pytest.fixture
def driver(tmp_path):
    """A folder with a libcuda that shows GPUs of architectures 8.6, 8.3 and 9.0."""
    source = tmp_path / "cuda.c"
    source.write_text("""
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGetCount(int* count) { *count = 3; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 8 + device / 2 : 6 - 3 * device;
  return 0;
}
""")
    library = tmp_path / "driver" / "libcuda.so.1"
    library.parent.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library.parent


def test_it_builds_for_the_visible_gpus(simulated, driver):
    visible = commands(simulated(LD_LIBRARY_PATH=driver))[0]
    assert {"-DTORCH_CUDA_ARCH_LIST=8.3;8.6;9.0+PTX", "-DNVX_VISIBLE_GPUS=ON"} <= set(visible)
    requested = commands(simulated(LD_LIBRARY_PATH=driver, TORCH_CUDA_ARCH_LIST="7.5"))[0]
    assert {"-DTORCH_CUDA_ARCH_LIST=7.5", "-DNVX_VISIBLE_GPUS=OFF"} <= set(requested)


@pytest.mark.parametrize(
    "knows, requested, compiled",
    [
        (["sm_83", "sm_86"], "", ["83,code=sm_83", "86,code=sm_86", "86,code=compute_86"]),
        (["sm_90"], "", ["90,code=sm_90", "90,code=compute_90"]),
        (["sm_75", "sm_100"], "", [*USUAL[:3], USUAL[4]]),
        (["sm_75", "sm_120", "sm_100"], "", USUAL),
        (["sm_86"], "8.6+PTX 9.0", ["86,code=sm_86", "90,code=sm_90", "86,code=compute_86"]),
    ],
)
def test_a_gpu_that_nvcc_does_not_support_is_left_out(build, tmp_path, knows, requested, compiled):
    home = toolkit(tmp_path, "release 13.0", "error: $*", *knows)
    line = build.line(CUDA_HOME=home, asked=requested, visible="" if requested else "8.3;8.6;9.0+PTX")
    assert re.findall(r"-gencode=arch=compute_(\S+)", line) == compiled


def test_a_torch_of_rocm_has_no_kernels_and_logs_it(build):
    ended = build(cuda=None, hip="6.4.2")
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    (line,) = (line for line in ended.stdout.splitlines() if "no kernels are built" in line)
    assert "is of ROCm 6.4.2, and nvx has no kernels for AMD GPUs" in line
    assert "tensors go through host memory (docs/other-accelerators.md)" in line
    assert "is of ROCm 6.4.2" in runpy.run_path(str(build.kernels))["NO_KERNELS"]
    requested = build(cuda=None, hip="6.4.2", NVX_CUDA="1")
    assert requested.returncode != 0 and "no kernels for AMD GPUs" in requested.stdout + requested.stderr
