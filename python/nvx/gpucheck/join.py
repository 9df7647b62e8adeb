"""Files of several calls as one, judged together."""

from __future__ import annotations

from typing import Any

from . import judge, parts

MACHINE = ("gpus", "driver")
VERSIONS = ("torch", "nvx", "commit", "cuda", "nccl", "nvcc", "compiler")
RAN = ("passed", "failed", "timed out", "died", "interrupted")


def differences(documents: list[dict[str, Any]]) -> list[str]:
    """What some of them do not say, and whether the commit is all there is to say. ValueError: not of one kind of
    machine, or not of the same versions."""
    doubts = []
    heads = [document.get("versions", {}) | {name: document.get(name) for name in MACHINE} for document in documents]
    for name in (*MACHINE, *VERSIONS):
        said = [head.get(name) for head in heads]
        known = [one for one in said if one is not None]
        other = next((one for one in known if one != known[0]), None)
        if other is not None:
            raise ValueError(f"the files differ in their {name}: {known[0]} and {other}")
        if known and len(known) < len(documents):
            doubts.append(f"not all of the files say their {name}: {known[0]} is that of the others")
    if any(head.get("dirty") for head in heads):
        doubts.append("of some files the sources differ from their commit, and may differ from each other")
    return doubts


def join(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The head of the first, and of each part what the last call has found that ran it; in `doubts`, why they may not
    belong together. ValueError: they do not."""
    first = documents[0]
    doubts = differences(documents)
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        for name, part in document["parts"].items():
            if part["state"] in RAN or name not in found:
                found[name] = part
    order = {name: number for number, name in enumerate(parts.NAMES)}
    whole = first | {"parts": dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))}
    whole["command"] = "; ".join(document["command"] for document in documents)
    whole["minutes"] = round(sum(document.get("minutes", 0) for document in documents), 2)
    if doubts:
        whole["doubts"] = doubts
    whole["targets"] = [verdict.as_json() for verdict in judge.judge(whole)]
    return whole
