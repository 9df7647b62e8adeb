"""Files of several calls as one, judged together."""

from __future__ import annotations

from typing import Any

from . import judge, parts

RAN = ("passed", "failed", "timed out", "died", "interrupted")


def join(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The head of the first, and of each part what the last call has found that ran it. ValueError: not of one kind of
    machine, or not of the same versions."""
    first = documents[0]
    for document in documents[1:]:
        for key in ("gpus", "driver"):
            if document.get(key) != first.get(key):
                raise ValueError(f"the files differ in their {key}: {first.get(key)} and {document.get(key)}")
        torchs = [one.get("versions", {}).get("torch") for one in (first, document)]
        if torchs[0] != torchs[1]:
            raise ValueError(f"the files differ in their torch: {torchs[0]} and {torchs[1]}")
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        for name, part in document["parts"].items():
            if part["state"] in RAN or name not in found:
                found[name] = part
    order = {name: number for number, name in enumerate(parts.NAMES)}
    whole = first | {"parts": dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))}
    whole["command"] = "; ".join(document["command"] for document in documents)
    whole["minutes"] = round(sum(document.get("minutes", 0) for document in documents), 2)
    whole["targets"] = [verdict.as_json() for verdict in judge.judge(whole)]
    return whole
