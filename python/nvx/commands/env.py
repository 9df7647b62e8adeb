"""`nvx env`: lists the NVX_* variables from the registry that the C++ core uses."""

import argparse
import os

import nvx


def text():
    lines = []
    for name, default, meaning, accepted, fault in nvx._load().config_table():
        state, value = f"default {default}", os.environ.get(name)
        if value:
            used = f"the default ({default}) is used" if name != "NVX_ALLOW_FROM" else "groups over several hosts fail"
            what = f", which is {fault}: {used}" if fault else f" (default {default})"
            state = f"set to {'a secret' if name == 'NVX_JOB_KEY' else repr(value)}{what}"
        elif name == "NVX_JOB_KEY" and value is not None:
            state = "set, but empty: no group can be made"
        lines.append(f"{name}\n    {meaning}\n    accepts {accepted}\n    {state}")
    return "\n".join(lines)


def main(arguments=None):
    argparse.ArgumentParser(prog="nvx env", description="Lists the NVX_* variables.").parse_args(arguments)
    print(text())
    return 0
