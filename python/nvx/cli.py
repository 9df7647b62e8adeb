"""The `nvx` command: one word names what to do, the rest belongs to it."""

import importlib
import importlib.util
import os
import select
import sys

# name: module with a main(arguments) -> exit status, and what it is for. Loaded only when called.
COMMANDS = {
    "demo": ("nvx.demo", "train a small model over nvx and over gloo, side by side"),
    "doctor": ("nvx.doctor", "check this machine and this build, and run every collective once"),
    "bench": ("nvx.bench", "time collectives against another backend, in nccl-tests' columns, and plot them"),
    "topo": ("nvx.commands.topo", "show this machine, how its GPUs are joined, and what nvx would use"),
    "explain": ("nvx.commands.explain", "say what a collective of some size would run, and why"),
    "env": ("nvx.commands.env", "list the NVX_* variables, their defaults and what is set"),
}


def commands():
    """The rows of COMMANDS that this installation has."""
    return {name: row for name, row in COMMANDS.items() if importlib.util.find_spec(row[0]) is not None}


def usage():
    lines = ["usage: nvx COMMAND [arguments]   (nvx COMMAND --help says more)", ""]
    lines += [f"  {name:10}{purpose}" for name, (_, purpose) in commands().items()]
    return "\n".join(lines)


def main(arguments=None):
    status = 0
    try:
        status = run(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout is not None:  # it was closed before this began
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def run(arguments):
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        from ._version import __version__

        print(__version__)
        return 0
    row = commands().get(arguments[0])
    if row is None:
        print(f"nvx: no command {arguments[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    return importlib.import_module(row[0]).main(arguments[1:])


def _nobody_reads():
    """Whether whoever read what this prints, as `head` does, has seen enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
