"""`nvx status [PID]`: the groups of the running ranks of this machine, their calls, and the ranks they wait for.

Each rank writes to a memfd of its own, and this command reads it through /proc/PID/fd: a rank opens no port, starts no
thread and is not interrupted. The memory begins with its own description (csrc/group/core/status.h). A damaged
page is harmless: everything is copied, checked, and printed without control characters.
"""

import argparse
import json
import os
import pwd
import re
import shlex
import socket
import struct
import subprocess
import sys
import time
from concurrent import futures

from ..bench.sizes import show_size
from . import Refused, refusing
from .topo import columns

SCHEMA = 1
VERSION = 1
LINK = re.compile(r"/memfd:nvx-status|.*/nvx-trace\.\w{6}( |$)")  # a file if NVX_TRACE is set
STATES = ("free", "set-up", "open", "failed", "left")
BARE = ("barrier", "none")
SSH, ANSWER_S = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--"), 20
DESCRIPTION = """\
Shows the groups of the running ranks of this machine: their calls, the ranks for which they wait, and bytes and times
by collective. --hosts a,b shows a job on several hosts: it runs `nvx status` on each of them over ssh."""


class NoRank(Refused):
    """No rank was found. The command ends with 1."""


# --- reading one process


def first_lines(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(65536).decode(errors="replace")


def open_page(pid):
    """The process's page, and its description; None if it has none. Raises Refused, OSError."""
    inner = [line.split()[-1] for line in first_lines(pid, "status").splitlines() if line.startswith("NSpid:")]
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        try:
            if not LINK.match(os.readlink(path)):
                continue
            page = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:  # closed since
            continue
        try:
            layout = layout_of(page)
        except Refused:
            os.close(page)
            raise
        if str(layout["pid"]) in inner:
            return page, layout
        os.close(page)  # a forked child has its parent's too
    return None


def layout_of(page):
    """The page's description of itself, checked. Raises Refused."""
    try:
        layout = json.loads(os.pread(page, 4096, 0).split(b"\0")[0])
        version = layout["version"]
        if version != VERSION:
            its = f"its nvx writes version {printable(str(version))} of this page and this command reads version"
            raise Refused(f"{its} {VERSION}: use the nvx command of that rank's installation")
        for name, most in (("pid", 1 << 32), ("at", 1 << 20), ("slots", 1 << 12), ("bytes", 1 << 16)):
            if type(layout[name]) is not int or not 0 < layout[name] <= most:
                raise ValueError(name)
        for name in ("collectives", "types", "operators"):
            layout[name] = printable(layout[name]).split()
        for name, (at, records, form, fields) in layout["sections"].items():
            size = struct.calcsize("<" + form)
            if not 0 <= at <= at + records * size <= layout["bytes"] or records > 64:
                raise ValueError(name)
            layout["sections"][name] = (at, records, struct.Struct("<" + form), fields.split())
        return layout
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise Refused("its page is damaged") from error


def printable(text):
    return "".join(c if c.isprintable() else "?" for c in text.split("\0")[0])


def unpacked(layout, slot):
    """The sections of a slot, each a list of records. Raises ValueError if one has fields of another type."""
    found = {}
    for name, (at, records, form, fields) in layout["sections"].items():
        rows = [form.unpack_from(slot, at + i * form.size) for i in range(records)]
        if any(type(value) is not (bytes if name == "texts" else int) for row in rows for value in row):
            raise ValueError(name)
        if name == "texts":
            rows = [[printable(value.decode(errors="replace")) for value in row] for row in rows]
        found[name] = [dict(zip(fields, row, strict=True)) for row in rows]
    return found


def copied(page, layout, place):
    """A copy of a slot whose calls did not change during the copy; the last one if they change all the time."""
    head = layout["sections"]["group"][2].size
    for _ in range(20):
        before = os.pread(page, head, place)
        slot = os.pread(page, layout["bytes"], place)
        if os.pread(page, head, place) == before == slot[:head]:
            break
    if len(slot) < layout["bytes"]:
        raise Refused("its page is damaged")
    return slot


def call_of(layout, record, now):
    name = dict(enumerate(layout["collectives"])).get(record["collective"], "?")
    words = []
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        words.append(dict(enumerate(layout["operators"])).get(record["op"], "?"))
    words.append(dict(enumerate(layout["types"])).get(record["dtype"], "?"))
    words += ["sparse"] * (record["form"] == 1)
    words += [f"{record['count']} elements"] * (record["count"] > 0)
    words += [f"root {record['root']}"] * (record["root"] >= 0)
    return {
        "number": record["number"],
        "call": name if name in BARE else f"{name}({', '.join(words)})",
        "since_s": seconds(now, record["began"]),
        "bytes": record["bytes"],
    }


def seconds(now, then):
    return round(max(0, now - then) / 1e9, 6)


def group_of(layout, slot, now):
    """One group in the form that --json prints; None if the slot is free."""
    parts = unpacked(layout, slot)
    head, texts, calls = parts["group"][0], parts["texts"][0], parts["calls"]
    state = dict(enumerate(STATES)).get(head["state"], "?")
    if state in ("free", "left"):
        return None
    begun, ended, on_device = head["begun"], head["ended"], max(0, head["launched"] - head["completed"])
    running, before = begun != ended, calls[ended % 2]
    last = {**call_of(layout, before, now), "ago_s": seconds(now, before["ended"])} if ended else None
    launch = {**call_of(layout, parts["launch"][0], now), "open": on_device} if on_device else None
    message = {"open": head["messages"], "oldest": texts["message"], "since_s": seconds(now, head["oldest"])}
    kinds = [*layout["collectives"], "send", "recv"]
    return {
        "name": texts["name"],
        "id": f"{head['id']:016x}",
        "rank": head["rank"],
        "size": head["size"],
        "state": state,
        "since_s": seconds(now, head["since"]),
        "failure": texts["failure"] or None,
        "issued": head["issued"],
        "call": call_of(layout, calls[begun % 2], now) if running else None,
        "waits_for": head["awaited"] - 1 if running and head["awaited"] else None,
        "last_finished": last,
        "on_device": launch,
        "messages": message if head["messages"] else None,
        "totals": {
            kind: {"calls": row["calls"], "bytes": row["bytes"], "seconds": row["ns"] / 1e9}
            for kind, row in zip(kinds, parts["totals"], strict=False)
            if row["calls"]
        },
        "waited_for": [
            {"rank": row["rank"] - 1, "seconds": row["ns"] / 1e9, "last_in": row["times"]}
            for row in sorted(parts["lates"], key=lambda row: -row["ns"])
            if row["rank"]
        ],
    }


def groups_of(page, layout):
    """The groups of a page. Raises Refused."""
    now = time.monotonic_ns()
    places = range(layout["at"], layout["at"] + layout["slots"] * layout["bytes"], layout["bytes"])
    try:
        found = [group_of(layout, copied(page, layout, place), now) for place in places]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refused("its page is damaged") from error
    return [group for group in found if group]


def process(pid):
    """One process in the form that --json prints; None if it has no page. Raises Refused, OSError."""
    opened = open_page(pid)
    if opened is None:
        return None
    try:
        groups = groups_of(*opened)
    finally:
        os.close(opened[0])
    state, parent = first_lines(pid, "stat").rpartition(")")[2].split()[:2]
    command = printable(first_lines(pid, "cmdline").replace("\0", " ").strip())
    return {"pid": pid, "parent": int(parent), "command": command, "stopped": state in "Tt", "groups": groups}


# --- finding processes


def parents():
    """The parent of each process. Raises Refused."""
    found = {}
    try:
        names = os.listdir("/proc")
    except OSError as error:
        raise Refused(f"/proc cannot be read: {error.strerror}. Next: mount it (mount -t proc proc /proc)") from error
    for name in filter(str.isdigit, names):
        try:
            found[int(name)] = int(first_lines(name, "stat").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended
            continue
    return found


def below(pid, parent):
    """The process and its descendants, such as the ranks of a torchrun."""
    family = {pid}
    while more := {p for p, q in parent.items() if q in family} - family:
        family |= more
    return family


def absent(pid):
    advice = "`nvx status` without a PID lists the ranks; if it was a rank, see its log"
    return f"there is no process {pid} on this machine. Next: {advice}"


def refusal(pid, error):
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
        if owner == os.geteuid():
            return f"process {pid} cannot be read: {error.strerror}. Next: run this as root, outside any container"
        owner = pwd.getpwuid(owner).pw_name
    except OSError:
        return absent(pid)
    except KeyError:  # a user without a name
        pass
    return f"process {pid} belongs to user {owner}. Next: run this as that user, or as root"


def gather(pid=None, all_users=False):
    """The whole report, in the form that --json prints. Raises Refused if `pid` cannot be shown."""
    parent = parents()
    if pid is not None and pid not in parent:
        raise NoRank(absent(pid))
    report = {"schema": SCHEMA, "host": socket.gethostname(), "ranks": [], "unread": []}
    others = 0
    for each in sorted(parent if pid is None else below(pid, parent)):
        try:
            if pid is None and not all_users and os.stat(f"/proc/{each}").st_uid != os.geteuid():
                continue
            found = process(each)
        except PermissionError as error:
            if each == pid:
                raise Refused(refusal(pid, error)) from error
            others += 1
        except OSError:  # it has ended
            continue
        except Refused as why:
            report["unread"].append(f"process {each}: {why}")
        else:
            report["ranks"] += [found] if found else []
    if others and all_users:
        report["unread"].append(f"{others} unreadable processes: run this as root, outside any container")
    return report


def answer(host):
    """The report of a host, which runs the interpreter of this path, or the reason why there is none."""
    command = [*SSH, host, shlex.join([sys.executable, "-m", "nvx", "status", "--json"])]
    try:
        ssh = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=ANSWER_S)
        found = json.loads(ssh.stdout)
        if found["schema"] == SCHEMA:
            return found
        why = f"its nvx has schema {found['schema']} of this report, and this command reads schema {SCHEMA}"
    except subprocess.TimeoutExpired:
        why = f"no answer within {ANSWER_S} s"
    except (ValueError, TypeError, KeyError):
        why = ssh.stderr.strip().rpartition("\n")[2] or "no report"
    return {"ranks": [], "unread": [printable(why)]}


def gather_from(hosts):
    """The reports of several hosts as one. Raises Refused without hosts or ssh."""
    hosts = [*filter(None, map(str.strip, hosts.split(",")))]
    if not hosts:
        raise Refused("--hosts names no host")
    with refusing(OSError), futures.ThreadPoolExecutor(len(hosts)) as pool:
        answers = dict(zip(hosts, pool.map(answer, hosts), strict=True))
    ranks = [rank | {"host": host} for host, found in answers.items() for rank in found["ranks"]]
    unread = [f"host {host}: {why}" for host, found in answers.items() for why in found["unread"]]
    return {"schema": SCHEMA, "hosts": hosts, "ranks": ranks, "unread": unread}


# --- text


def span(value):
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def calls(number):
    return f"{number} call{'s' * (number != 1)}"


def activity(group):
    """The cells `call` and `for` of a rank."""
    if group["state"] == "set-up":
        return "set-up: waits for the other ranks", span(group["since_s"])
    if group["call"]:
        return f"#{group['call']['number']} {group['call']['call']}", span(group["call"]["since_s"])
    if group["messages"]:
        return group["messages"]["oldest"], span(group["messages"]["since_s"])
    if on_device := group["on_device"]:
        return f"on its GPU: #{on_device['number']} {on_device['call']}", span(on_device["since_s"])
    return "none", ""


def row_of(rank, group):
    last = group["last_finished"]
    waits_for = "" if group["waits_for"] is None else f"rank {group['waits_for']}"
    finished = f"#{last['number']} {last['call']}, {span(last['ago_s'])} ago" if last else "none"
    pid = f"{rank['place']}{' (stopped)' * rank['stopped']}"
    return [f"  {group['rank']}", pid, *activity(group), waits_for, finished, str(group["issued"])]


def awaited_lines(members, hint):
    """Why the ranks wait: the ranks that others wait for, and that wait for nobody themselves."""
    lines = []
    waiting = {group["rank"]: group["waits_for"] for _, group in members if group["waits_for"] is not None}
    here = {group["rank"]: (rank, group) for rank, group in members}
    for peer in sorted(set(waiting.values()) - set(waiting)):
        if peer not in here:
            lines.append(f"  rank {peer} is waited for, and is not shown: {hint}")
            continue
        rank, group = here[peer]
        numbers = [g["call"]["number"] for _, g in members if g["waits_for"] == peer and g["call"]]
        if numbers and group["last_finished"] and group["last_finished"]["number"] >= max(numbers):
            continue  # it was read later, and has gone on
        call, _ = activity(group)
        does = "has not made that call" if call == "none" else f"is in {call}"
        does = "is stopped (SIGSTOP, a debugger)" if rank["stopped"] else does
        lines.append(f"  rank {peer} (pid {rank['place']}) is waited for, and {does}: py-spy dump --pid {rank['pid']}")
    return lines


def total_lines(members):
    """Bytes and times by collective, and the ranks that came late, over all ranks of this host."""
    lines = []
    for kind in dict.fromkeys(kind for _, group in members for kind in group["totals"]):
        rows = [group["totals"][kind] for _, group in members if kind in group["totals"]]
        times = sorted(row["seconds"] for row in rows)
        took = span(times[0]) if len(times) == 1 else f"{span(times[0])} to {span(times[-1])}"
        most, nbytes = max(row["calls"] for row in rows), show_size(max(row["bytes"] for row in rows))
        lines.append(f"  {kind}: {calls(most)}, {nbytes}, {took} a rank")
    lates = {}
    for _, group in members:
        for late in group["waited_for"]:
            slept, times = lates.get(late["rank"], (0, 0))
            lates[late["rank"]] = slept + late["seconds"], max(times, late["last_in"])
    for late, (slept, times) in sorted(lates.items(), key=lambda item: -item[1][0])[:4]:
        if slept < 0.001:
            break
        lines.append(f"  waited for rank {late}: {span(slept)} in all; it was the last in {calls(times)}")
    return lines


def text(report, pid=None):
    groups = {}
    hint = "leave out the PID, or use --hosts" if pid else "give the host of that rank to --hosts"
    for rank in report["ranks"]:
        rank["place"] = f"{rank['pid']} on {rank['host']}" if "host" in rank else str(rank["pid"])
        for group in rank["groups"]:
            job = rank["parent"] if group["state"] == "set-up" else None  # it has no id before its set-up is complete
            groups.setdefault((group["name"], group["id"], group["size"], job), []).append((rank, group))
    lines = []
    for (name, _, size, _), members in groups.items():
        members.sort(key=lambda member: member[1]["rank"])
        where = "these hosts" if "hosts" in report else "this host"
        lines.append(f"group {name}: {len(members)} of {size} ranks are on {where}")
        rows = [["  rank", "pid", "call", "for", "waits for", "last finished", "issued"]]
        lines += columns(rows + [row_of(*member) for member in members])
        lines += [f"  rank {group['rank']} failed: {group['failure']}" for _, group in members if group["failure"]]
        lines += awaited_lines(members, hint) + total_lines(members) + [""]
    idle = [rank["place"] for rank in report["ranks"] if not rank["groups"]]
    lines += [f"without a group at present: process {', '.join(idle)}"] * bool(idle)
    return "\n".join(lines + [f"not shown: {why}" for why in report["unread"]]).rstrip()


def show(options):
    report = gather_from(options.hosts) if options.hosts is not None else gather(options.pid, options.all)
    whose = f"neither process {options.pid} nor one that it started" if options.pid else "no process of this user"
    nothing = f"{whose} has a group of nvx at present"
    if not (report["ranks"] or report["unread"] or options.json or options.watch):
        raise NoRank(nothing)
    print(json.dumps(report) if options.json else text(report, options.pid) or nothing, flush=True)
    return 0 if report["ranks"] else 1


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="nvx status", description=DESCRIPTION)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("pid", nargs="?", type=int, help="only this process, such as a torchrun, and its children")
    which.add_argument("--all", action="store_true", help="the ranks of all users; needs root")
    which.add_argument("--hosts", metavar="A,B", help="of these hosts, over ssh; Python has the same path on each")
    parser.add_argument("--watch", action="store_true", help="repeat every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object; with --watch, one a line")
    options = parser.parse_args(arguments)
    try:
        while options.watch:
            if sys.stdout.isatty() and not options.json:
                print("\x1b[H\x1b[2J", end="")
            show(options)
            time.sleep(1)
        return show(options)
    except Refused as why:
        print(f"nvx status: {why}", file=sys.stderr)
        return 1 if isinstance(why, NoRank) else 2
    except KeyboardInterrupt:
        return 0
