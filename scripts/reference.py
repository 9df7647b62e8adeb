#!/usr/bin/env python3
"""Writes docs/reference.md from the docstrings of `nvx`, of its stub `_C.pyi` and of `nvx.torchft`.

It needs neither torch nor a build. tests/install/test_reference.py compares the page with the sources."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Reference

The public names of nvx, from their docstrings. `import torch` registers the backend, so most programs need none of
them; [torch.md](torch.md) and [frameworks.md](frameworks.md) say when they help.

<!-- made by scripts/reference.py -->
"""
TABLES = """## Collectives

| call | CPU tensors | CUDA tensors (experimental: [gpu.md](gpu.md)) |
|---|---|---|
| all_reduce, broadcast, reduce, gather, scatter | yes | yes |
| all_gather, reduce_scatter, all_to_all, with lists or one tensor | yes | yes |
| send, recv, isend, irecv, batch_isend_irecv; recv from any source | yes | yes |
| barrier | yes | yes, through host memory |
| all_reduce of sparse tensors | yes | yes, through host memory |
| monitored_barrier | yes | takes no tensors |
| [one-sided windows](torch.md#one-sided-windows) | from torch 2.14 on | no |
| [symmetric memory](symmetric-memory.md) | yes | has run on a simulated device only |

## Types and operators

The types of all_reduce, reduce and reduce_scatter. The other calls move tensors of any type but the quantized ones.

| type | SUM, PRODUCT, MIN, MAX | AVG | BAND, BOR, BXOR | PREMUL_SUM |
|---|---|---|---|---|
| bool | yes | no | yes | no |
| int8 to int64, uint8 to uint64 | yes | yes, towards zero | yes | no |
| float16, bfloat16, float32, float64 | yes | yes | no | yes |
| float8: e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e8m0fnu | yes | yes | no | yes |
| complex64, complex128 | SUM; PRODUCT in reduce and reduce_scatter | yes | no | yes |
| complex32 | SUM | yes | no | yes |

## Errors

| error | class | group afterwards |
|---|---|---|
| bad argument | `nvx.ArgumentError` (a ValueError, as NCCL's, and a RuntimeError, as gloo's) | usable |
| tensor of a wrong type | `nvx.ArgumentTypeError` (a TypeError and a RuntimeError) | usable |
| failed communication | `torch.distributed.DistBackendError` | unusable on every rank: destroy it and make a new one |
| Ctrl-C | KeyboardInterrupt, once, from any blocking call of nvx | unusable; the peers get the error |
| an exception of a signal handler, such as TimeoutError | that exception | unusable; the peers get its name |
"""
EXITS = """\
`nvx COMMAND --help` lists the options. A command ends with 0; with 1 if a check failed (`nvx drill`, weights of
`nvx demo`, `nvx doctor --strict` after a warning) or no rank was found (`nvx status`, `nvx trace`); with 2 if it
refuses or cannot run, and `nvx doctor` for a failed check. Ctrl-C ends it with 130 (`nvx status`: 0)."""
CLASSES = {  # shown name: (file, name there)
    "nvx.ProcessGroup": ("_C.pyi", "ProcessGroupNVX"),
    "nvx.Options": ("_C.pyi", "Options"),
    "nvx.torchft.ProcessGroupNVX": ("torchft.py", "ProcessGroupNVX"),
    "nvx.ArgumentError": ("_C.pyi", "ArgumentError"),
    "nvx.ArgumentTypeError": ("_C.pyi", "ArgumentTypeError"),
}


def tree(file):
    return ast.parse((ROOT / "python" / "nvx" / file).read_text())


def named(module, kind):
    return {node.name: node for node in ast.walk(module) if isinstance(node, kind)}


def signature(shown, function):
    """The call as one types it: without self, and with the public names of the types."""
    arguments = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    call = shown if function.decorator_list else f"{shown}({arguments}){returns}"  # a property
    return call.replace("ProcessGroupNVX.Options", "nvx.Options").replace("_Group", "ProcessGroup")


def text(node):
    """The docstring as Markdown: indented lines continue the line before, and `name: ...` starts an item."""
    lines = []
    for line in (ast.get_docstring(node) or "").splitlines():
        starts = line.partition(":")[0].replace(", ", "_").isidentifier() and ":" in line
        lines.append(f"- {line}" if starts else line.replace("    ", "  "))
    return "\n".join(lines) + "\n"


def assigned(file, name):
    assignments = (node for node in tree(file).body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assignments if node.targets[0].id == name)


def functions():
    found = named(tree("__init__.py"), ast.FunctionDef)
    for name in filter(found.__contains__, assigned("__init__.py", "__all__")):
        yield f"### `{signature(f'nvx.{name}', found[name])}`\n\n{text(found[name])}"


def classes():
    for shown, (file, name) in CLASSES.items():
        node = named(tree(file), ast.ClassDef)[name]
        own = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        made = signature(shown, own["__init__"]) if "__init__" in own else shown
        members = [f"- `{signature(n.name, n)}`: {ast.get_docstring(n)}" for n in own.values() if ast.get_docstring(n)]
        yield f"### `{made}`\n\n{text(node)}" + ("\n" + "\n".join(members) + "\n") * bool(members)


def page():
    rows = [f"| `nvx {name}` | {row[1]} |\n" for name, row in assigned("cli.py", "COMMANDS").items()]
    table = f"{EXITS}\n\n| command | purpose |\n|---|---|\n" + "".join(rows)
    parts = ["## Functions\n", *functions(), "## Classes\n", *classes(), TABLES, "## Commands\n", table]
    return HEAD + "\n" + "\n".join(parts) + "\n<!-- end of the reference -->\n"


if __name__ == "__main__":
    PAGE.write_text(page())
