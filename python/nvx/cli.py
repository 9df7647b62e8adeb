"""The `nvx` command: `nvx COMMAND [arguments]`."""

import errno
import importlib
import os
import select
import sys

from . import Unusable, __version__
from .commands import Refused

# name: (module with `main(arguments) -> exit status`, purpose). A module is loaded only when its command runs.
COMMANDS = {
    "demo": ("nvx.demo", "train a small model over nvx and over gloo, side by side"),
    "doctor": ("nvx.doctor", "check this machine and this build, and run every collective once"),
    "bench": ("nvx.bench.cli", "time collectives and training steps against another backend, in nccl-tests' columns"),
    "status": ("nvx.commands.status", "show the calls of this machine's running ranks, and the ranks they wait for"),
    "trace": ("nvx.commands.trace", "write a Chrome trace of a job: each call, and the ranks that it waited for"),
    "drill": ("nvx.commands.drill", "inject faults into jobs, and check how soon the other ranks name the faulty one"),
    "topo": ("nvx.commands.topo", "show this machine, its GPU links, and the transports that nvx would use"),
    "explain": ("nvx.commands.explain", "show the algorithm that a collective of a given size would use, and why"),
    "simulate": ("nvx.commands.simulate", "simulate a collective on hosts and links of given rates: time, bottleneck"),
    "tune": ("nvx.commands.tune", "measure the sizes at which algorithms change, and write them for NVX_TUNE"),
    "env": ("nvx.commands.env", "list the NVX_* variables, their defaults and their current values"),
}


def usage():
    lines = ["usage: nvx COMMAND [arguments]   (see nvx COMMAND --help)", ""]
    lines += [f"  {name:10}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(lines)


def main(arguments=None):
    status = 0
    try:
        status = run(sys.argv[1:] if arguments is None else list(arguments))
        if sys.stdout is not None:  # stdout was closed before this process started
            sys.stdout.flush()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EIO):
            status = 2
            print(f"nvx: {error}", file=sys.stderr)
        elif not isinstance(error, BrokenPipeError) or not reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return status


def run(arguments):
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(__version__)
        return 0
    row = COMMANDS.get(arguments[0])
    if row is None:
        print(f"nvx: no command {arguments[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(row[0]).main(arguments[1:])
    except (Unusable, Refused, FileNotFoundError) as why:
        if isinstance(why, FileNotFoundError) and "temporary directory" not in str(why):  # tempfile's, in any command
            raise
        print(f"nvx {arguments[0]}: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def reader_is_gone():
    """Whether the reader of stdout, such as `head`, has closed the pipe."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
