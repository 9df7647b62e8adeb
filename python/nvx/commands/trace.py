"""`nvx trace`: the calls and waits of a job as a Chrome trace, with a process for each rank.

With NVX_TRACE each rank keeps its page (status.py) and its last calls, messages and waits in a file of that folder.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile

from .. import interrupts
from ..bench.machine import check_writable
from . import refusing, status

DESCRIPTION = """\
Writes a Chrome trace of a job over nvx, for ui.perfetto.dev or chrome://tracing: a process for each rank, a slice for
each call, and inside it a slice for each wait, with the rank that was waited for.

  nvx trace -o trace.json -- torchrun --nproc-per-node 8 train.py    runs the command, then writes its trace
  NVX_TRACE=folder torchrun ...; nvx trace folder                    for several hosts: a folder that they share
  nvx trace folder --flight-recorder dumps                           for torchfrtrace dumps --allow-incomplete-ranks"""
CALL, WAIT, SEND, RECV, LAUNCH = range(5)
FIELDS = "stamp began ended number count bytes collective dtype op form peer slot kind algorithm schedule"


class Rank:
    """One file: its groups, by slot, and its records. Raises status.Refused, OSError."""

    def __init__(self, path):
        self.path = path
        page = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.layout = layout = status.layout_of(page)
            self.epoch, self.host, self.groups = int(layout["epoch"]), status.printable(layout["host"]), {}
            self.at, self.count, form, fields = layout["trace"]
            self.form = struct.Struct("<" + form)
            if not 0 < self.count <= 1 << 20 or fields != FIELDS or self.form.size > 256:
                raise ValueError("trace")
            for key in ("algorithms", "schedules"):
                layout[key] = dict(enumerate(status.printable(layout[key]).split(), 1))
            for slot in range(layout["slots"]):
                place = layout["at"] + slot * layout["bytes"]
                parts = status.unpacked(layout, status.copied(page, layout, place))
                group = parts["group"][0] | parts["texts"][0] | {"calls": parts["calls"]}
                if group["size"] and not 0 <= group["rank"] < group["size"] <= 1 << 20:
                    raise ValueError("group")
                self.groups |= {slot: group} if group["size"] else {}
            self.rank = self.groups[min(self.groups)]["rank"]  # in the job's group, usually
            records = [*self.form.iter_unpack(os.pread(page, self.count * self.form.size, self.at))]
            if len(records) != self.count:
                raise ValueError("cut off")
            began = [record[1] for record in records if record[0] and record[1]]
            self.began = self.epoch + min([*began, *(group["since"] for group in self.groups.values())])
        except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
            raise status.Refused("it is damaged, or no trace") from error
        finally:
            os.close(page)

    def rows(self):
        """The records in the order in which they were begun, without those that are being written."""
        size = self.count * self.form.size
        with open(self.path, "rb", buffering=0) as file:
            first, again = (os.pread(file.fileno(), size, self.at) for _ in range(2))
        if len(first) != size or len(again) != size:
            raise OSError("it has become shorter")
        pairs = zip(self.form.iter_unpack(first), self.form.iter_unpack(again), strict=True)
        rows = [dict(zip(FIELDS.split(), row, strict=True)) for row, same in pairs if row == same and row[0]]
        return sorted(rows, key=lambda row: row["stamp"])

    def events(self, pid, origin):
        """Calls and waits nest, so they are slices of the group's line; messages overlap, so they are asynchronous."""

        def event(phase, name, at, slot, category, args, **more):
            ts = (self.epoch + at - origin) / 1000
            return {"ph": phase, "name": name, "cat": category, "ts": ts, "pid": pid, "tid": slot, "args": args, **more}

        rows = self.rows()
        title = f"rank {self.rank} (process {self.layout['pid']}, host {self.host})"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": self.rank}}
        for slot, group in self.groups.items():
            title = f"group {group['name']}: rank {group['rank']} of {group['size']}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": slot, "args": {"name": title}}
            if group["failure"]:
                yield event("i", "failed", group["since"], slot, "failure", {"failure": group["failure"]}, s="t")
            if group["begun"] != group["ended"]:  # a call that goes on, or that its process did not outlive
                call = group["calls"][group["begun"] % 2]
                yield event("B", self.name_of(call), call["began"], slot, "collective", self.facts(call, group))
                if group["awaited"]:
                    args = {"rank": group["awaited"] - 1}
                    ends = [row["ended"] for row in rows if (row["slot"], row["kind"]) == (slot, WAIT)]
                    began = max([call["began"], *ends])
                    yield event("B", f"wait for rank {args['rank']}", began, slot, "wait", args)
        for row in rows:
            slot, kind, peer, began, ended = (row[key] for key in ("slot", "kind", "peer", "began", "ended"))
            args = self.facts(row | {"root": peer}, self.groups.get(slot, {"name": "?"}))
            if kind == CALL:
                yield event("X", self.name_of(row), began, slot, "collective", args, dur=(ended - began) / 1000)
            elif kind == LAUNCH:
                yield event("i", self.name_of(row), began, slot, "launch", args, s="t")
            elif kind == WAIT:
                name = f"wait for rank {peer}" if peer >= 0 else "wait for any rank"
                args = {"rank": peer, "group": args["group"], "sequence": row["number"]}
                yield event("X", name, began, slot, "wait", args, dur=(ended - began) / 1000)
            else:
                name = f"{'send to' if kind == SEND else 'recv from'} rank {peer}"
                args = {"rank": peer, "tag": row["number"], **{key: args[key] for key in ("group", "bytes", "dtype")}}
                for phase, at in (("b", began), ("e", ended)):
                    yield event(phase, name, at, slot, "message", args, id=f"{pid}.{row['stamp']}")

    def name_of(self, call):
        return dict(enumerate(self.layout["collectives"])).get(call["collective"], "?")

    def dtype_of(self, call):
        return dict(enumerate(self.layout["types"])).get(call["dtype"], "?")

    def facts(self, call, group):
        args = {"call": status.call_of(self.layout, call, 0)["call"], "group": group["name"]}
        args |= {"sequence": call["number"], "bytes": call["bytes"], "dtype": self.dtype_of(call)}
        for key in ("algorithm", "schedule"):
            names = self.layout[key + "s"]
            args |= {key: names[call[key]]} if call.get(key) in names else {}
        return args


def write(folder, output, dumps=None):
    """Writes the trace of a folder, or its dumps. Returns the exit status."""
    ranks = []
    for path in sorted(pathlib.Path(folder).glob("nvx-trace.*")):
        try:
            ranks.append(Rank(path))
        except (status.Refused, OSError) as why:
            print(f"not shown: {path}: {why}", file=sys.stderr)
    if not ranks:
        why = "no rank has recorded anything in" if os.path.isdir(folder) else "there is no folder"
        print(f"nvx trace: {why} {folder}", file=sys.stderr)
        return 1
    with contextlib.suppress(BrokenPipeError):  # a reader that has gone changes no status
        if dumps:
            from . import flight_recorder

            return flight_recorder.write(ranks, dumps)
        ranks.sort(key=lambda rank: (rank.rank, rank.began))
        origin = min(rank.began for rank in ranks)
        with open(output, "w") as file:
            file.write(f'{{"otherData": {{"began_ns": "{origin}"}}, "displayTimeUnit": "ns", "traceEvents": [\n')
            for pid, rank in enumerate(ranks):
                for n, event in enumerate(rank.events(pid, origin)):
                    file.write(",\n" * (pid + n > 0) + json.dumps(event))
            file.write("\n]}\n")
        told = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}; open it in ui.perfetto.dev or chrome://tracing"
        print(f"{output}: {told}", file=sys.stderr if output.startswith("/dev/") else sys.stdout)
    return 0


def run(command, output, dumps):
    os.makedirs(dumps, exist_ok=True) if dumps else check_writable(output)
    job = None

    def forward(number, frame):
        if job and number != signal.SIGINT:  # the command has Ctrl-C too
            job.send_signal(number)

    with interrupts.interruptible(), tempfile.TemporaryDirectory(prefix="nvx-trace-") as folder:
        try:
            with interrupts.handled(forward):
                with interrupts.deferred():
                    job = subprocess.Popen(command, env={**os.environ, "NVX_TRACE": folder})
                job.wait()
        except OSError as error:
            print(f"nvx trace: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return 127
        ended, written = job.returncode, write(folder, output, dumps)
        return ended if ended > 0 else 128 - ended if ended < 0 else written


def main(arguments=None):
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    usage, as_is = "nvx trace [OPTIONS] (folder | -- COMMAND ...)", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="nvx trace", usage=usage, description=DESCRIPTION, formatter_class=as_is)
    parser.add_argument("folder", nargs="?", help="the folder that NVX_TRACE named")
    parser.add_argument("-o", "--output", default="trace.json", help="the file to write (default: trace.json)")
    parser.add_argument("--flight-recorder", metavar="FOLDER", help="instead write dumps of each rank for torchfrtrace")
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if bool(command) == bool(options.folder):
        parser.error("name a folder, or -- and a command")
    dumps = options.flight_recorder
    with refusing(OSError):
        return run(command, options.output, dumps) if command else write(options.folder, options.output, dumps)
