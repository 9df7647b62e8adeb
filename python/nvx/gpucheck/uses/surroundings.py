"""What some parts need of where they run, and the environments that they get: of all ranks, and of each by itself.
Nothing here needs torch."""

from __future__ import annotations

# torch renamed it in 2.9 and reads both.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
VISIBLE = "CUDA_VISIBLE_DEVICES"
HOST = "NVX_HOST_ID"
# Their ranks have to be on a GPU at once, or one each.
AT_ONCE = ("replay_time",)
# Torch itself needs numpy for them: to exchange objects, and for its own tests.
WITH_NUMPY = ("pipeline", "torch_tests")
NO_NUMPY = "torch needs numpy for it, which is not installed"


def has_numpy() -> bool:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True


def of_all(part: str, given: dict[str, str]) -> dict[str, str]:
    """What is set before torch is imported. given: the environment as it is."""
    if part != "expandable":
        return {}
    others = [word for name in ALLOCATOR for word in given.get(name, "").split(",") if word]
    kept = dict.fromkeys(word for word in others if not word.startswith("expandable_segments"))
    return dict.fromkeys(ALLOCATOR, ",".join([*kept, EXPANDABLE]))


def visible_to(number: int, gpus: int, given: str | None) -> str:
    """Each rank sees all of them in an order of its own, its own one first: so all of them call theirs number 0."""
    names = [name.strip() for name in given.split(",")] if given else [str(i) for i in range(gpus)]
    names = names[:gpus]
    first = number % len(names)
    return ",".join(names[first:] + names[:first])


def of_rank(part: str, number: int, gpus: int, given: dict[str, str]) -> dict[str, str]:
    """What a rank sets before it touches a device."""
    if part == "relay":
        return {HOST: "ab"[number // 2]}
    return {VISIBLE: visible_to(number, gpus, given.get(VISIBLE))} if part == "visible" else {}


def ranks_of(part: str, gpus: int, asked: int) -> int:
    """With several GPUs each has a rank; but two of each host are wanted where there are two hosts."""
    return asked if gpus < 2 or part == "relay" else min(gpus, 8)


def devices_of(part: str, gpus: int) -> int:
    """How many numbers of devices the ranks take in turn."""
    return 1 if part == "visible" else gpus
