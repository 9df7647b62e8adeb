"""`nvx env`: lists the NVX_* variables from the registry that the C++ core uses."""

import argparse
import os
import sys

import nvx


def rows():
    """(name, default, meaning, why the current value is invalid) of every variable."""
    return nvx._load().config_table()


def text():
    lines = []
    for name, default, meaning, fault in rows():
        state = f"set to {os.environ[name]!r}" if name in os.environ else f"default {default!r}"
        if fault:
            state += f", which is {fault}: the default{f' {default!r}' if default else ''} is used"
        lines.append(f"{name}\n    {meaning}\n    {state}")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="nvx env", description="Lists the NVX_* variables.")
    parser.parse_args(arguments)
    obstacle = nvx.obstacle()
    if obstacle is not None:
        print(f"nvx env: {obstacle}", file=sys.stderr)
        return 2
    print(text())
    return 0
