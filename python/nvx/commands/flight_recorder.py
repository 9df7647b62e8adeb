"""`nvx trace --flight-recorder`: a job's trace as dumps of torch's flight recorder, one a rank, for `torchfrtrace`.

A backend outside torch cannot add to torch's own recorder: libtorch_cpu does not export FlightRecorder<c10::Event>, and
a recorder that is compiled from its header is another one, which `_dump_fr_trace` does not read.
"""

import pathlib
import pickle

from . import trace

VERSION = "2.10"  # of the format, in torch 2.11 to 2.14
BACKEND = "nccl"  # the analyzer of torch 2.11 refuses all names but this one and xccl
NAMES = {"barrier": "all_reduce_barrier"}  # it knows no barrier either
STATES = {trace.CALL: "completed", trace.LAUNCH: "scheduled"}


def sizes_of(name, count, size):
    """The elements of a rank's input and output. `count` is the longer one's; of uneven lists the mean is taken."""
    share = count // size
    if name == "all_gather":
        return share, share * size
    return (share * size, share) if name == "reduce_scatter" else (count, count)


def entry_of(rank, row, state):
    group, name, number = rank.groups[row["slot"]], rank.name_of(row), row["number"]
    entry = {"process_group": (f"{group['id']:x}", f"group {group['name']}"), "state": state, "frames": []}
    entry |= {"profiling_name": f"{BACKEND}:{NAMES.get(name, name)}", "time_created_ns": rank.epoch + row["began"]}
    entry |= {"collective_seq_id": number, "op_id": number, "p2p_seq_id": 0, "is_p2p": False}
    entry["duration_ms"] = (row["ended"] - row["began"]) / 1e6 if state == "completed" else None
    for key, count in zip(("input", "output"), sizes_of(name, row["count"], group["size"]), strict=True):
        entry |= {f"{key}_sizes": [[count]], f"{key}_dtypes": [rank.dtype_of(row)]}
    return entry


def entries_of(rank):
    """Its collectives, one for each number. No messages: torchfrtrace expects each entry on all ranks of a group."""
    rows = [(row, STATES[row["kind"]]) for row in rank.rows() if row["kind"] in STATES]
    for slot, group in rank.groups.items():
        if group["begun"] != group["ended"]:
            rows.append((group["calls"][group["begun"] % 2] | {"slot": slot}, "started"))
    found = {}
    for row, state in sorted(rows, key=lambda row: row[0]["began"]):
        if row["slot"] in rank.groups and rank.name_of(row) not in ("nothing", "?"):
            found.setdefault((row["slot"], row["number"]), entry_of(rank, row, state))
    return list(found.values())


def write(ranks, folder):
    """Writes a dump for each rank to rank_0, rank_1, ..., and removes older ones. If a rank was started again, its last
    run counts."""
    ranks = {rank.rank: rank for rank in sorted(ranks, key=lambda rank: rank.began)}
    entries = {number: entries_of(rank) for number, rank in ranks.items()}
    members, firsts, folder = {}, {}, pathlib.Path(folder)
    for number, rank in ranks.items():
        for slot, group in rank.groups.items():
            whole = slot == min(rank.groups)  # the job's group, also where a rank has no file
            members.setdefault(group["id"], set()).update(range(group["size"]) if whole else [number])
        for entry in entries[number]:  # a rank keeps its last ones only
            firsts.setdefault(entry["process_group"], {}).setdefault(number, entry["collective_seq_id"])
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("rank_*"):  # of a larger job: torchfrtrace would read it too
        if stale.name[5:].isdigit() and stale.is_file():
            stale.unlink()
    for number, rank in ranks.items():
        config = {}
        for group in (group for group in rank.groups.values() if group["id"]):  # 0: not set up
            uid = f"{group['id']:x}"
            config[uid] = {"name": uid, "desc": f"group {group['name']}", "ranks": str(sorted(members[group["id"]]))}
        kept = [e for e in entries[number] if e["collective_seq_id"] >= max(firsts[e["process_group"]].values())]
        dump = {"version": VERSION, "pg_config": config, "entries": [e | {"record_id": i} for i, e in enumerate(kept)]}
        (folder / f"rank_{number}").write_bytes(pickle.dumps(dump))
    print(f"{folder}: dumps of {len(ranks)} rank{'s' * (len(ranks) > 1)}, for torchfrtrace --allow-incomplete-ranks")
    return 0
