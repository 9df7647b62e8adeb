"""`nvx env`: lists the NVX_* variables from the registry that the C++ core uses."""

import argparse
import os

import nvx


def effect(name, default):
    """What a wrong value does."""
    return "groups over several hosts fail" if name == "NVX_ALLOW_FROM" else f"the default ({default}) is used"


def text():
    lines = []
    for name, default, meaning, accepted, fault in nvx._load().config_table():
        state = f"default {default}"
        if os.environ.get(name):
            what = f", which is {fault}: {effect(name, default)}" if fault else f" (default {default})"
            value = "a secret" if name == "NVX_JOB_KEY" else repr(os.environ[name])
            state = f"set to {value}{what}"
        lines.append(f"{name}\n    {meaning}\n    accepts {accepted}\n    {state}")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="nvx env", description="Lists the NVX_* variables.")
    parser.parse_args(arguments)
    print(text())
    return 0
