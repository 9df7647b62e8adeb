"""The bridge from pip to CMake. What is built, and how, is in CMakeLists.txt.

Read from the environment: MAX_JOBS, CMAKE_ARGS, CMAKE_BUILD_TYPE, CMAKE_GENERATOR, NVX_CUDA, CUDA_HOME and
TORCH_CUDA_ARCH_LIST.
"""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).resolve().parent

NO_TORCH = f"""
nvx is built against the torch you run, and {sys.executable} has none.
pip's build isolation hides an installed torch; if you have it, type:

    pip install --no-build-isolation .

If you do not, install it first:

    pip install torch setuptools wheel cmake ninja && pip install --no-build-isolation .
"""


def torch_facts():
    """Directory, version, minor and CUDA version of the torch at hand, or None."""
    found = subprocess.run(
        [sys.executable, ROOT / "cmake" / "find_torch.py"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip().split(";") if found.returncode == 0 else None


class BuildWithCMake(build_ext):
    def run(self):
        if torch_facts() is None:
            raise SystemExit(NO_TORCH)
        super().run()

    def build_extension(self, ext):
        output = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = pathlib.Path(self.build_temp).resolve() / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        env = dict(os.environ)
        configure = ["cmake", "-S", ROOT, "-B", build_dir, *self.definitions(output)]
        if "CMAKE_GENERATOR" not in env and shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        configure += shlex.split(env.get("CMAKE_ARGS", ""))
        build = ["cmake", "--build", build_dir, "--target", "_C"]
        jobs = env.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        build += ["--parallel", jobs]
        for command in (configure, build):
            print("nvx:", shlex.join(map(str, command)), flush=True)
            if subprocess.run(command, env=env, check=False).returncode != 0:
                raise SystemExit("nvx: the build failed; the first error above says why")

    def definitions(self, output):
        chosen = {
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Debug" if self.debug else "Release"),
            "NVX_OUTPUT_DIR": output,
            "NVX_PYTHON": "ON",
            "Python_EXECUTABLE": sys.executable,
        }
        for name, variable in (("CUDAToolkit_ROOT", "CUDA_HOME"), ("TORCH_CUDA_ARCH_LIST",) * 2):
            if os.environ.get(variable):
                chosen[name] = os.environ[variable]
        return [f"-D{name}={value}" for name, value in chosen.items()]


facts = torch_facts()
setup(
    license="BSD-3-Clause",
    # The ABI of c10d's C++ classes changes between minor versions, so a build requires the one it was built with.
    install_requires=[f"torch=={facts[2]}.*" if facts else "torch>=2.11"],
    ext_modules=[Extension("nvx._C", sources=[])],
    cmdclass={"build_ext": BuildWithCMake},
)
