"""The context that every gate receives, and its results."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Wheels that bring a tool that Debian does not package.
WHEELS = {
    "ruff": ("ruff",),
    "cuobjdump": ("nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"),
}
# The Debian package that brings a tool, if its name differs.
PACKAGES = {
    "ctags": "universal-ctags",
    "clang++-14": "clang-14",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
}
# Libraries that the builds need beside the tools.
LIBRARIES = (
    "libgtest-dev",
    "libgmock-dev",
    "googletest",
    "ninja-build",
    "ccache",
    "libclang-rt-14-dev",
    "llvm-14",
)

# Macros that ctags must not take for names. With a +, it ignores their arguments too.
IGNORED_MACROS = [
    word
    for macro in (
        "NVX_HD",
        "NVX_NOINLINE",
        "NVX_COLD",
        "__launch_bounds__+",
        "SCOPED_CAPABILITY",
        "CAPABILITY+",
        "GUARDED_BY+",
        "REQUIRES+",
        "ACQUIRE+",
        "RELEASE+",
        "TRY_ACQUIRE+",
        "EXCLUDES+",
    )
    for word in ("-I", macro)
]

SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    "dist",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
    ".ruff_cache",
    ".cache",
}


class Failed(Exception):
    """The gate failed: a line for the table, and the details."""

    def __init__(self, summary, details=""):
        super().__init__(summary)
        self.summary = summary
        self.details = details


class Skipped(Exception):
    """The gate could not run, and the reason."""


class LeftOut(Skipped):
    """The runs of other commits check it: CI_SHARD."""


@dataclasses.dataclass(frozen=True)
class Gate:
    name: str
    check: Callable  # Context -> a note for the table, or nothing; raises Failed or Skipped
    requires: str
    tools: tuple = ()  # the gate is skipped without them
    extras: tuple = ()  # the gate checks more with them
    optional: bool = False  # with NO_SKIPS it may be skipped all the same
    usual: bool = True  # if false, the gate runs only by name
    fixes: bool = False  # with --fix it rewrites the files that it complains about


def shut_if(breaches, what):
    """Fails with one line a breach."""
    if breaches:
        shown = breaches[:40] + ([f"... and {len(breaches) - 40} more"] if len(breaches) > 40 else [])
        raise Failed(f"{len(breaches)} {what}", "\n".join(shown))


class Context:
    """The tree under test, and the means to test it."""

    def __init__(self, jobs=2, fix=False, build_dir=None, root=ROOT):
        self.root = root
        self.jobs = max(1, jobs)
        self.fix = fix
        self.build_dir = build_dir or root / "build" / "gates"

    @functools.cached_property
    def files(self):
        """Paths of the tree, relative to the root: tracked and unignored files if git is there, otherwise all but
        build outputs."""
        listed = subprocess.run(
            ["git", "-C", self.root, "ls-files", "-z", "-co", "--exclude-standard"],
            capture_output=True,
            check=False,
        )
        if listed.returncode == 0 and listed.stdout:
            names = listed.stdout.decode().split("\0")
            return sorted(pathlib.Path(n) for n in names if n and (self.root / n).is_file())
        return sorted(self._walk())

    def _walk(self):
        for folder, inner, names in os.walk(self.root):
            inner[:] = [d for d in inner if d not in SKIPPED_FOLDERS and not d.startswith("build")]
            for name in names:
                yield (pathlib.Path(folder) / name).relative_to(self.root)

    def sources(self, *suffixes, under=()):
        """Files with one of the suffixes, under one of the folders."""
        return [f for f in self.files if f.suffix in suffixes and (not under or f.parts[0] in under)]

    def read(self, path):
        return (self.root / path).read_text(encoding="utf-8", errors="replace")

    def tool(self, name):
        """The path of a tool, or None. This interpreter's own scripts come first."""
        beside = pathlib.Path(sys.executable).with_name(name)
        home = self.build_dir / "tools"
        private = [home / "bin" / name, *home.glob(f"lib/python*/site-packages/nvidia/*/bin/{name}")]
        return next((str(p) for p in (beside, *private) if p.exists()), None) or shutil.which(name)

    def tags(self, paths, kinds):
        """Tags that ctags finds in C++ and Python files: dictionaries with name, path, line, end, kind, scope,
        and of C++ also inherits, signature and properties."""
        command = [
            self.tool("ctags"),
            "--languages=C++,Python",
            "--langmap=C++:+.cu.h",
            f"--kinds-C++={kinds}",
            "--kinds-Python=fm",
            "--fields=+neKsiS",
            "--fields-C++=+{properties}",
            "--output-format=json",
            *IGNORED_MACROS,
            "-L",
            "-",
            "-o",
            "-",
        ]
        names = "\n".join(map(str, paths))
        out = subprocess.run(command, input=names, capture_output=True, text=True, check=True, cwd=self.root).stdout
        return [json.loads(line) for line in out.splitlines()]

    def run(self, command, what, **more):
        """Runs a command to its end; fails with the end of its output."""
        done = subprocess.run(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            **more,
        )
        if done.returncode != 0:
            raise Failed(f"{what} failed (exit code {done.returncode})", "\n".join(done.stdout.splitlines()[-60:]))
        return done.stdout

    def install(self, tools):
        """Installs missing tools. Reports its actions and the tools that it cannot install."""
        missing = [tool for tool in tools if not self.tool(tool)]
        wheels = [wheel for tool in missing for wheel in WHEELS.get(tool, ())]
        if wheels:
            home = self.build_dir / "tools"
            print("installing", " ".join(wheels), "into", home, flush=True)
            subprocess.run([sys.executable, "-m", "venv", home], check=False)
            subprocess.run([home / "bin" / "pip", "install", "-q", *wheels], check=False)
        packages = [PACKAGES.get(tool, tool) for tool in missing if tool not in WHEELS] + list(LIBRARIES)
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            print("not root on Debian; install by hand what is skipped below:", " ".join(packages), flush=True)
            return
        print("apt-get install", " ".join(packages), flush=True)
        environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        for step in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(["apt-get", *step], env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                print(done.stderr[-2000:], flush=True)
