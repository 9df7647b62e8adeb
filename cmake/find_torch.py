"""Prints directory;version;minor;cuda;hip of this interpreter's torch without importing it (that takes seconds)."""

import importlib.util
import pathlib
import runpy
import sys

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit("no module named torch")
root = pathlib.Path(spec.origin).parent
facts = runpy.run_path(str(root / "version.py"))
version = str(facts["__version__"])
print(root, version, ".".join(version.split(".")[:2]), facts.get("cuda") or "", facts.get("hip") or "", sep=";")
