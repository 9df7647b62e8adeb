#!/usr/bin/env python3
"""check_subject.py FILE: the commit-msg hook. The first line of FILE reads `part: imperative`, under 72 characters.

A part is a folder of the tree (csrc/net is net, tests/torch is torch), or build, ci or readme; several have commas
between them. The first word after it must not end as a past, a participle or a third person does.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
OTHER_PARTS = {"build", "ci", "readme"}
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
# Imperatives that have the ending of another form.
IMPERATIVES = {"bias", "bring", "embed", "focus", "ping", "ring", "shed", "string"}


def parts_of(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True).stdout
    return {part for path in listed.splitlines() for part in pathlib.Path(path).parts[:-1]} | OTHER_PARTS


def complaint(subject, folders):
    """Why the subject is refused, and what to do; empty if it is accepted."""
    if subject.startswith(MADE_BY_GIT):
        return ""
    if len(subject) >= 72:
        return f"the subject has {len(subject)} characters: keep it under 72, and put the reason into the body"
    parts = re.fullmatch(r"([a-z0-9_.-]+(?:, ?[a-z0-9_.-]+)*): (\S.*)", subject)
    if not parts:
        return "the subject is not `part: imperative`, such as `net: close idle endpoints`"
    unknown = [part for part in re.split(r", ?", parts[1]) if part not in folders]
    if unknown:
        return f"{unknown[0]!r} is no folder of the tree: name the one that changes, or build, ci or readme"
    first = parts[2].split()[0]
    if first[:1].isupper() and first[1:].islower():
        return f"{first!r} begins in upper case: write {first.lower()!r}"
    if re.search(r"(?:[^e]ed|ing|[^s]s)$", first) and first not in IMPERATIVES:
        return f"{first!r} is no imperative: write `add`, not `added`, `adds` or `adding`"
    if parts[2].endswith("."):
        return "the subject ends with a full stop: leave it out"
    return ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(
            "usage: scripts/check_subject.py FILE, whose first line is the subject; git runs it as commit-msg hook"
        )
    lines = [line for line in pathlib.Path(sys.argv[1]).read_text().splitlines() if not line.startswith("#")]
    why = complaint(lines[0] if lines else "", parts_of(ROOT))
    if why:
        sys.exit(f"nvx: {why}")
