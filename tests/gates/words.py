"""Text that must not be in the tree: paths of a machine, hosts that are not public, and private words (a regular
expression a line, in git's info/private-words)."""

import pathlib
import re
import subprocess

MACHINE_PATH = re.compile(r"(?<![\w./~$}*-])/(?:home|root|work|workspace|Users|mnt|scratch|data|srv)/[\w.-]+")
URL = re.compile(r"\b(?:https?|ftp|git|ssh)://(?:[\w.-]+@)?([\w.-]+|\[[0-9a-f:]+\])")
PUBLIC = re.compile(
    r"(?:[\w-]+\.)*(?:github\.com|githubusercontent\.com|pytorch\.org|python\.org|pypi\.org|readthedocs\.io|kernel\.org"
    r"|llvm\.org|gnu\.org|openucx\.org|nvidia\.com|doi\.org|arxiv\.org|opensource\.org|debian\.org|shields\.io|astral\.sh"
    r"|wikipedia\.org|man7\.org|json-schema\.org|w3\.org|example\.(?:com|org|invalid))$|localhost$|127\.0\.0\.1$"
)


def private_words(root):
    """The listed expressions, and a note on their origin."""
    git = ["git", "-C", str(root), "rev-parse", "--git-common-dir"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    listed = pathlib.Path(root) / found.stdout.strip() / "info" / "private-words"
    if found.returncode != 0 or not listed.is_file():
        return None, "no list of private words here"
    lines = [line for line in listed.read_text().splitlines() if line and not line.startswith("#")]
    if not lines:
        return None, "the list of private words is empty"
    return re.compile("|".join(f"(?:{line})" for line in lines), re.IGNORECASE), f"{len(lines)} private words"


def is_binary(path):
    with open(path, "rb") as file:
        return b"\0" in file.read(4096)


def breaches(path, text, private):
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        hits = [f"path of a machine: {m.group()}" for m in MACHINE_PATH.finditer(line)]
        hosts = [m.group(1) for m in URL.finditer(line)]
        hits += [f"host not known as public: {host}" for host in hosts if not PUBLIC.match(host)]
        if private:
            hits += [f"private word: {m.group()}" for m in private.finditer(line)]
        found += [f"{path}:{number}: {hit}" for hit in hits]
    return found


EXAMPLE_PRIVATE = re.compile(r"\bplover-7\b", re.IGNORECASE)
EXAMPLES = (
    ("read " + "/home" + "/someone/nvx/x.cc", True),
    ("cd " + "/root" + "/nvx", True),
    ("build" + "/work" + "/x", False),
    ("/usr/src/googletest /dev/shm /proc/self/ns/net", False),
    ("https://" + "registry.corp.internal/simple", True),
    ("https://download.pytorch.org/whl/cpu and https://github.com/x/y", False),
    ("https://" + "evilgithub.com", True),
    ("tcp://127.0.0.1:29500", False),
    ("seen on Plover-7", True),
    ("a plover", False),
)
