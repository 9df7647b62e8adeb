"""`nvx trace`: the calls and waits of a job as a Chrome trace, with a process for each rank.

With NVX_TRACE each rank keeps its page (status.py) in a file of that folder, with a ring of its last calls, messages
and waits. The file is complete at any time, also if the rank is killed. This command reads the files.
"""

import argparse
import contextlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

from . import status

DESCRIPTION = """\
Writes a Chrome trace of a job over nvx, for ui.perfetto.dev or chrome://tracing: a process for each rank, a slice for
each call, and inside it a slice for each wait, with the rank that was waited for.

  nvx trace -o trace.json -- torchrun --nproc-per-node 8 train.py    runs the command, then writes its trace
  NVX_TRACE=folder torchrun ...; nvx trace folder                    for several hosts: a folder that they share"""
CALL, WAIT, SEND, RECV, LAUNCH = range(5)


def rows_of(page, layout):
    """The records in the order in which they were begun, without those that are being written."""
    at, count, form, fields = layout["trace"]
    form = struct.Struct("<" + form)
    if type(at) is not int or type(count) is not int or not 0 < count * form.size <= 1 << 28:
        raise ValueError("trace")
    first, again = (os.pread(page, count * form.size, at) for _ in range(2))
    if len(first) != count * form.size or len(again) != len(first):
        raise ValueError("trace")
    pairs = zip(form.iter_unpack(first), form.iter_unpack(again), strict=True)
    rows = [dict(zip(fields.split(), row, strict=True)) for row, same in pairs if row == same and row[0]]
    return sorted(rows, key=lambda row: row["stamp"])


class Rank:
    """One file: its groups, by slot, and its records. Raises status.Refused, OSError."""

    def __init__(self, path):
        page = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.layout = layout = status.layout_of(page)
            self.rows, self.epoch, self.groups = rows_of(page, layout), int(layout["epoch"]), {}
            self.host = status.printable(layout["host"])
            for slot in range(layout["slots"]):
                place = layout["at"] + slot * layout["bytes"]
                parts = status.unpacked(layout, os.pread(page, layout["bytes"], place))
                if parts["group"][0]["size"]:
                    self.groups[slot] = {**parts["group"][0], **parts["texts"][0], "calls": parts["calls"]}
            self.first = min(self.groups)  # the job's group, as a rule
        except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
            raise status.Refused("it is damaged, or no trace") from error
        finally:
            os.close(page)
        self.rank = self.groups[self.first]["rank"]
        begins = [group["since"] for group in self.groups.values()] + [row["began"] for row in self.rows]
        self.began = self.epoch + min(begins)

    def events(self, pid, origin):
        """Calls and waits nest, so they are slices of the group's line; messages overlap, so they are asynchronous."""

        def event(phase, name, at, slot, category, args, **more):
            ts = (self.epoch + at - origin) / 1000
            return {"ph": phase, "name": name, "cat": category, "ts": ts, "pid": pid, "tid": slot, "args": args, **more}

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
                    ends = [row["ended"] for row in self.rows if (row["slot"], row["kind"]) == (slot, WAIT)]
                    began = max([call["began"], *ends])
                    yield event("B", f"wait for rank {args['rank']}", began, slot, "wait", args)
        for row in self.rows:
            slot, kind, peer, began, took = (row[key] for key in ("slot", "kind", "peer", "began", "ended"))
            args = self.facts(row | {"root": peer}, self.groups.get(slot, {"name": "?"}))
            took = (took - began) / 1000
            if kind == CALL:
                yield event("X", self.name_of(row), began, slot, "collective", args, dur=took)
            elif kind == LAUNCH:
                yield event("i", self.name_of(row), began, slot, "launch", args, s="t")
            elif kind == WAIT:
                name = f"wait for rank {peer}" if peer >= 0 else "wait for any rank"
                args = {"rank": peer, "group": args["group"], "sequence": row["number"]}
                yield event("X", name, began, slot, "wait", args, dur=took)
            else:
                name = f"{'send to' if kind == SEND else 'recv from'} rank {peer}"
                args = {"rank": peer, "tag": row["number"], **{key: args[key] for key in ("group", "bytes", "dtype")}}
                for phase, at in (("b", began), ("e", row["ended"])):
                    yield event(phase, name, at, slot, "message", args, id=f"{pid}.{row['stamp']}")

    def name_of(self, call):
        return dict(enumerate(self.layout["collectives"])).get(call["collective"], "?")

    def facts(self, call, group):
        args = {"call": status.call_of(self.layout, call, 0)["call"], "group": group["name"]}
        args |= {"sequence": call["number"], "bytes": call["bytes"]}
        args["dtype"] = dict(enumerate(self.layout["types"])).get(call["dtype"], "?")
        for key in ("algorithm", "schedule"):
            names = dict(enumerate(status.printable(self.layout[key + "s"]).split(), 1))
            args |= {key: names[call[key]]} if call.get(key) in names else {}
        return args


def write(folder, output):
    """Writes the trace of a folder and prints a summary. Returns the exit status."""
    ranks, waits = [], {}
    for path in sorted(pathlib.Path(folder).glob("nvx-trace.*")):
        try:
            ranks.append(Rank(path))
        except (status.Refused, OSError) as why:
            print(f"not shown: {path}: {why}", file=sys.stderr)
    if not ranks:
        print(f"nvx trace: no rank has recorded anything in {folder}", file=sys.stderr)
        return 1
    ranks.sort(key=lambda rank: (rank.rank, rank.began))
    origin = min(rank.began for rank in ranks)
    with open(output, "w") as file:
        file.write(f'{{"otherData": {{"began_ns": "{origin}"}}, "displayTimeUnit": "ns", "traceEvents": [\n')
        for pid, rank in enumerate(ranks):
            for n, event in enumerate(rank.events(pid, origin)):
                file.write(",\n" * (pid + n > 0) + json.dumps(event))
            for row in rank.rows:
                if row["kind"] == WAIT and row["slot"] == rank.first:
                    waits[row["peer"]] = waits.get(row["peer"], 0) + (row["ended"] - row["began"]) / 1e9
        file.write("\n]}\n")
    print(f"{output}: {len(ranks)} ranks; open it in ui.perfetto.dev or chrome://tracing")
    for late, slept in sorted(waits.items(), key=lambda item: -item[1])[:4]:
        print(f"  waited for rank {late}: {status.span(slept)} in all")
    return 0


def run(command, output):
    with tempfile.TemporaryDirectory(prefix="nvx-trace-") as folder:
        try:
            job = subprocess.Popen(command, env={**os.environ, "NVX_TRACE": folder})
        except OSError as error:
            print(f"nvx trace: {command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return 127
        while job.returncode is None:
            with contextlib.suppress(KeyboardInterrupt):  # the command has it too
                job.wait()
        ended, written = job.returncode, write(folder, output)
        return ended if ended > 0 else 128 - ended if ended < 0 else written


def main(arguments=None):
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="nvx trace", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", help="the folder that NVX_TRACE named; or -- and a command")
    parser.add_argument("-o", "--output", default="trace.json", help="the file to write (default: trace.json)")
    options, command = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if bool(command) == bool(options.folder):
        parser.error("name a folder, or -- and a command")
    return run(command, options.output) if command else write(options.folder, options.output)
