"""`nvx bench <collective>`: every requested size, dtype, operation and root, over every contender, checked and
timed."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from . import collectives, hosts, machine, payload, report, sizes
from .collectives import Collective
from .contenders import enlist
from .peers import Call, Case, Contender, Unsupported, captured
from .probe import flag_round
from .runner import Effort, measure
from .world import World

Result = dict[str, Any]
FAILURES = (torch.distributed.DistError, torch.OutOfMemoryError, torch.AcceleratorError)  # others are refusals


class Sweep:
    """One run of the bench, the same on every rank."""

    def __init__(self, world: World, arguments: argparse.Namespace, command: str) -> None:
        self.world, self.arguments, self.command = world, arguments, command
        self.effort = Effort(arguments.blocks, arguments.iters, arguments.warmup_iters, arguments.block_ms / 1e3)
        names = [arguments.backend, *arguments.vs]
        self.contenders, self.refused = enlist(names, world, arguments.timeout)
        self.results: list[Result] = []
        self.notes: dict[str, str] = dict(self.refused)
        self.rounds: list[float | None] = []
        self.salt, self.failed = 0, False

    def run(self) -> int:
        """Measures all, prints it on rank 0 and writes the file; 1 if a result was wrong, or a call failed."""
        main = self.contenders[0].name if self.contenders else ""
        if main != self.arguments.backend:
            why = self.refused[self.arguments.backend]
            self.world.log(f"nvx bench: no group can be made over {self.arguments.backend}: {why}")
            return 2
        given = {key: value for key, value in vars(self.arguments).items() if key not in ("rendezvous", "json", "run")}
        document = machine.document("sweep", self.command, given)
        peers = [contender.name for contender in self.contenders[1:]]
        tensors = "" if self.world.device.type == "cpu" else f", tensors of {self.world.device.type}"
        ranks = f"{self.world.size} rank{'s' if self.world.size > 1 else ''}{hosts.layout()}"
        effort = f"{ranks}, one thread each{tensors}; {_shown_effort(self.effort)}"
        self.world.log(report.opening(self.command, document, effort, [main, *peers]))
        if missed := self._missed_end():
            self.world.log(f"# {missed}")
        for row in self._rows():
            shown = (row.variants[: 1 if self.arguments.primary else None], self._checks(self.contenders[0], row))
            self._collective(row, report.Table(main, peers, *shown, bool(self.arguments.per_iter_timing)))
        document |= {"ranks": self.world.size, "hosts": hosts.layout().removeprefix(" on ") or "1 host"}
        document |= {"effort": asdict(self.effort), "flag_round_us": self.rounds, "notes": self.notes}
        document["results"] = self.results
        if self.arguments.json and self.world.rank == 0:
            machine.write(self.arguments.json, document)
        for contender in self.contenders:
            contender.close()
        return 1 if self.failed or any(result["wrong"] for result in self.results) else 0

    def _rows(self) -> list[Collective]:
        return [collectives.find(name) for name in self.arguments.collectives]

    def _sizes(self, row: Collective) -> list[int]:
        arguments = self.arguments
        if row.sends == "nothing":
            return [0]
        if arguments.sizes:
            return arguments.sizes
        return sizes.scan(arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes)

    def _missed_end(self) -> str:
        arguments = self.arguments
        moving = next((row for row in self._rows() if row.sends != "nothing"), None)
        return sizes.missed_end(self._sizes(moving), arguments.maxbytes) if moving and not arguments.sizes else ""

    def _collective(self, row: Collective, table: report.Table) -> None:
        log, before, earlier = self.world.log, len(self.results), self.failed
        self.failed = False
        self.rounds.append(flag_round(self.world))
        log(f"#\n# Collective test starting: {row.name}\n{report.state(self.rounds[-1])}")
        log(table.header())
        ops = self.arguments.op if row.reduces else ["none"]
        roots = self.arguments.root if row.rooted else [-1]
        for dtype in self.arguments.datatype:
            for op in ops:
                if op != "none" and not payload.meaningful(op, payload.DTYPES[dtype]):
                    continue
                for root in roots:
                    for nbytes in self._sizes(row):
                        log(self._line(row, nbytes, dtype, op, root, table))
        mine = self.results[before:]
        busbw = [result["busbw"] for result in mine if result["backend"] == table.main]
        wrong = sum(result["wrong"] or 0 for result in mine)
        for result in mine:
            if result["wrong"] and result["backend"] != table.main:
                where = f"{result['size']} B, {result['variant']}"
                log(f"# wrong over {result['backend']}: {result['wrong']} at {where}")
        log(report.closing(row.name, wrong, self.failed, bool(self.arguments.check), busbw))
        self.failed |= earlier

    def _line(self, row: Collective, nbytes: int, dtype: str, op: str, root: int, table: report.Table) -> str:
        found: dict[tuple[str, str], Result] = {}
        shared: Result = {}
        for variant in table.variants:
            case = Case(
                row, nbytes, dtype, "sum" if op == "none" else op, max(root, 0), variant, self.world,
                self.arguments.unalign,
            )  # fmt: skip
            shared = {
                "collective": row.name, "size": case.nbytes, "count": case.shown_count, "type": dtype,
                "redop": op, "root": root, "ranks": self.world.size,
            }  # fmt: skip
            for result in self._case(case, shared):
                found[result["backend"], variant] = result
                self.results.append(result)
        return table.row(shared, found)

    def _case(self, case: Case, shared: Result) -> list[Result]:
        """Runs every contender on one case: first checked, then timed."""
        calls: list[tuple[Contender, Call, int | None]] = []
        for contender in self.contenders:
            call, wrong, reason = self._tried(contender, case)
            reason = self.world.agreed(reason)
            if reason or call is None:
                where = f"{contender.name} {case.row.name} {case.dtype_name} {case.op} {case.variant}"
                if contender is self.contenders[0] and self.notes.get(where) != reason:
                    self.failed |= ": failed: " in reason
                    self.world.log(f"# N/A: {reason}")
                self.notes[where] = reason
            else:
                calls.append((contender, call, wrong))
        case.zero()
        timings = measure(self.world, [call for _, call, _ in calls], self.effort, self.arguments.agg_iters)
        out: list[Result] = []
        for (contender, _, wrong), timing in zip(calls, timings, strict=True):
            algbw, busbw = collectives.bandwidth(case.row, case.nbytes, self.world.size, timing.time)
            figures = {"algbw": round(algbw, 4), "busbw": round(busbw, 4), "wrong": wrong}
            same = {"backend": contender.name, "variant": case.variant, **shared}
            out.append(same | timing.in_microseconds() | figures)
        return out

    def _checks(self, contender: Contender, row: Collective) -> bool:
        return contender.exact and row.sends != "nothing" and self.arguments.check > 0

    def _tried(self, contender: Contender, case: Case) -> tuple[Call | None, int | None, str]:
        """(the call, wrong elements over all ranks or None if results are not checked, the reason why it cannot take
        part)."""
        wrong, call, reason = 0, None, ""
        try:
            call = contender.call(case, self.arguments.agg_iters)
            once = contender.checked(case)
            if self.arguments.cudagraph:
                call = captured(call)
        except Unsupported as error:
            return None, None, str(error)
        checked = self._checks(contender, case.row)
        for _ in range(max(1, self.arguments.check)):
            self.salt += 1
            if checked:
                case.prepare(self.salt)
            try:
                once()
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                reason = (str(error).removeprefix("nvx: ").strip().splitlines() or [type(error).__name__])[0]
                reason = "failed: " * isinstance(error, FAILURES) + reason
                break
            wrong += case.count_wrong(self.salt) if checked else 0
        return call, int(self.world.total([wrong])[0]) if checked else None, reason


def _shown_effort(effort: Effort) -> str:
    block = f"{effort.calls()} iterations" if effort.iterations else f"about {effort.block_seconds * 1e3:g} ms"
    return f"{effort.blocks} blocks of {block} a contender, {effort.warmup} warm-up calls a block"
