"""The bridge from pip to CMake. What is built, and how, is in CMakeLists.txt.

Read from the environment: MAX_JOBS, CMAKE_ARGS, CMAKE_BUILD_TYPE, CMAKE_GENERATOR, NVX_CUDA, CUDA_HOME and
TORCH_CUDA_ARCH_LIST.
"""

import ctypes
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent
SECRETS = "-i --index-url --extra-index-url --index --default-index --proxy --password".split()  # options of pip and uv
OLDEST, NEWEST, SERVED = (2, 11), (2, 15), "2.11 to 2.15"  # minor versions of torch
TOOLS = "cmake", "ninja", "ccache", "c++"
KERNELS = {"": "AUTO", "0": "OFF", "1": "ON"}  # NVX_CUDA, in CMake's words
FAILURE = re.compile(r"\b(error|fatal|FAILED|cannot find|undefined reference)\b|CMake Error|\*\*\*", re.IGNORECASE)
CUDA = re.compile(r"\.cu\b|cuda|nvcc|nvlink|ptxas|cicc", re.IGNORECASE)

NO_TORCH = """
nvx is built against the torch you run, and {python} has none.
pip's build isolation hides an installed torch; if you have it, type:

    {typed}

If you do not, install it first:

    pip install torch setuptools wheel cmake ninja && {typed}
"""


def ancestors():
    """The command lines of the processes that started this one, the nearest first."""
    pid = os.getppid()
    while pid > 1:
        process = pathlib.Path("/proc", str(pid))
        try:
            yield (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            # The kernel cuts a name at 15 bytes, also inside a character.
            pid = int((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            return


def masked(words):
    """The words of a command line, without the passwords and tokens of an index or a proxy."""
    before = ""
    for word in words:
        option, given, _ = word.partition("=")
        if before in SECRETS:
            yield "..."
        elif option in SECRETS and given:
            yield f"{option}=..."
        elif re.match("-i[^-]", word):
            yield "-i..."
        else:
            yield re.sub(r"://.*@", "://...@", word)
        before = word


def typed_command(words):
    """A command line of pip, uv or build with the option that makes torch visible. None for other programs."""
    names = [pathlib.Path(word).name for word in words]
    for at, name in enumerate(names[:3]):
        module = at > 0 and names[at - 1] == "-m"
        rest = list(words[at + 1 :])
        if re.fullmatch(r"pip[\d.]*|uv", name) and (verb := next((v for v in ("install", "wheel") if v in rest), None)):
            place, option = rest.index(verb) + 1, "--no-build-isolation"
        elif name == "pyproject-build" or (module and name == "build"):
            place, option = 0, "--no-isolation"
        else:
            continue
        if option not in rest:
            rest.insert(place, option)
        return shlex.join(masked((list(words[: at + 1]) if module else [name]) + rest))
    return None


def typed():
    """The command that started this build, for advice."""
    return next(filter(None, map(typed_command, ancestors())), "pip install --no-build-isolation .")


def torch_facts():
    """Directory, version, minor, CUDA and ROCm version of the torch at hand, or None."""
    found = subprocess.run(
        [sys.executable, ROOT / "cmake" / "find_torch.py"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip().split(";") if found.returncode == 0 else None


def visible_gpus():
    """The architectures of the GPUs that CUDA shows this process, in the form of TORCH_CUDA_ARCH_LIST."""
    count, major, minor = (ctypes.c_int() for _ in range(3))
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return ""
        found = set()
        for device in range(count.value):
            for value, attribute in ((major, 75), (minor, 76)):
                cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            found.add((major.value, minor.value))
    except (OSError, AttributeError):
        return ""
    return ";".join(f"{one}.{two}" for one, two in sorted(found)) + ("+PTX" if found else "")


def cores():
    """The cores that this process may use, by its affinity and by the cgroup's quota."""
    own = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split())
    except (OSError, ValueError):  # "max": none
        return own
    return max(1, min(own, quota // period))


def what_cmake_reads():
    """The tools and variables by which CMake chooses compiler, options and UCX, and keeps the choice in its cache."""
    names = sorted(name for name in os.environ if re.match(r"CMAKE_|NVX_UCX|PKG_CONFIG|\w*(CC|CXX|FLAGS)$", name))
    tools = [found and os.path.realpath(found) for found in map(shutil.which, TOOLS)]
    return tools + [[name, os.environ[name]] for name in names]


def first_error(*commands):
    """Runs commands up to one that fails. Returns its first line that names an error, and whether a line names one of
    CUDA; (None, False) if none fails."""
    for command in commands:
        print("nvx:", shlex.join(map(str, command)), flush=True)
        error, of_cuda = None, False
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with subprocess.Popen(command, **pipes) as process:
            for line in process.stdout:
                print(line, end="", flush=True)
                if not error and re.search(r"\b(error|fatal)\b[\w\s#-]*:|CMake Error", line):
                    error = line.strip().replace(f"{ROOT}/", "")
                of_cuda = of_cuda or bool(FAILURE.search(line) and CUDA.search(line))
        if process.returncode != 0:
            return error or f"{command[0]} ended with {process.returncode}", of_cuda
    return None, False


class BuildAnew(build_py):
    def run(self):
        """Empties the folder, which has the modules of an earlier build, too."""
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(pathlib.Path(self.build_lib) / "nvx", ignore_errors=True)
        super().run()


class BuildWithCMake(build_ext):
    def run(self):
        if facts is None:
            raise SystemExit(NO_TORCH.format(python=sys.executable, typed=typed()))
        minor = tuple(map(int, facts[2].split(".")))
        if minor < OLDEST:
            raise SystemExit(f"nvx: {sys.executable} has torch {facts[1]}, and nvx serves {SERVED}")
        if minor > NEWEST:
            print(f"nvx: warning: torch is {facts[1]}, and nvx is tested with {SERVED}", flush=True)
        if os.environ.get("NVX_CUDA", "") not in KERNELS:
            raise SystemExit("nvx: NVX_CUDA is 0 (no kernels), 1 (kernels, or the build fails) or not set")
        # pip runs in an environment that is not activated, too, and installs cmake and ninja beside itself.
        scripts, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
        if scripts not in path.split(os.pathsep):
            os.environ["PATH"] = scripts + os.pathsep + path
        if not shutil.which("cmake"):
            raise SystemExit("nvx: there is no cmake on PATH: pip install cmake ninja")
        super().run()

    def copy_extensions_to_source(self):
        """For an editable install: what the build has written beside the module, too."""
        super().copy_extensions_to_source()
        shutil.copy(pathlib.Path(self.build_lib) / "nvx" / "_built.py", ROOT / "python" / "nvx")

    def build_extension(self, ext):
        output = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = pathlib.Path(self.build_temp).resolve() / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        # CMake prefers what it found for an earlier build to the environment of this one, and refuses the cache of a
        # folder that was moved. Its objects stay.
        record = build_dir / "environment.json"
        environment = json.dumps([str(ROOT), str(build_dir), *what_cmake_reads()])
        if not record.exists() or record.read_text() != environment:
            (build_dir / "CMakeCache.txt").unlink(missing_ok=True)
            for found in build_dir.glob("CMakeFiles/[0-9]*"):
                shutil.rmtree(found)
            record.write_text(environment)
        configure = ["cmake", "-S", ROOT, "-B", build_dir, *self.definitions(output)]
        if "CMAKE_GENERATOR" not in os.environ and shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        if os.environ.get("NVX_CUDA"):
            configure.append(f"-DNVX_CUDA={KERNELS[os.environ['NVX_CUDA']]}")
        build = ["cmake", "--build", build_dir, "--target", "_C"]
        jobs = os.environ.get("MAX_JOBS") or str(cores())
        build += ["--parallel", jobs]

        error, of_cuda = first_error(configure, build)
        # A second build, without the kernels, shows whether they are at fault.
        cache = build_dir / "CMakeCache.txt"
        if of_cuda and facts[3] and cache.exists() and "NVX_CUDA:STRING=AUTO\n" in cache.read_text():
            error, _ = first_error([*configure, f"-DNVX_CUDA_FAILED={error}"], build)
        if error:
            raise SystemExit("nvx: the build failed; the first error above says why")

    def definitions(self, output):
        asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
        visible = visible_gpus() if facts[3] and not asked else ""
        chosen = {
            "CUDAToolkit_ROOT": os.environ.get("CUDA_HOME", ""),
            "CMAKE_BUILD_TYPE": os.environ.get("CMAKE_BUILD_TYPE", "Debug" if self.debug else "Release"),
            "NVX_CUDA": "AUTO",
            "NVX_CUDA_FAILED": "",
            "NVX_OUTPUT_DIR": output,
            "NVX_PYTHON": "ON",
            "NVX_TYPED": typed(),
            "NVX_VISIBLE_GPUS": "ON" if visible else "OFF",
            "Python_EXECUTABLE": sys.executable,
            "TORCH_CUDA_ARCH_LIST": asked or visible,
        }
        return [f"-D{name}={value}" for name, value in chosen.items()]


facts = torch_facts()
setup(
    license="BSD-3-Clause",
    # The ABI of c10d's C++ classes changes between minor versions, so a build requires the one it was built with.
    install_requires=[f"torch=={facts[2]}.*" if facts else "torch>=2.11"],
    ext_modules=[Extension("nvx._C", sources=[])],
    cmdclass={"build_py": BuildAnew, "build_ext": BuildWithCMake},
)
