"""The command line: which passes, which tests, what to write."""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time

from tests.conformance.passes import PASSES


def parse(argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--backend", default="nvx", help="the backend under test (default nvx)")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        metavar="MODULE",
        help="import this first: it registers the backend (default: the backend's own name)",
    )
    parser.add_argument(
        "--pass",
        dest="passes",
        action="append",
        choices=list(PASSES),
        help="; ".join(f"{p.name}: {p.purpose}" for p in PASSES.values()) + " (default: all)",
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="PATH",
        help="tests upon torch's multi-process test classes, in place of DistributedTest",
    )
    parser.add_argument("-n", "--ranks", type=int, default=4)
    parser.add_argument("-k", action="append", default=[], metavar="WORD", help="part of a name, or a glob")
    parser.add_argument("-x", "--exact", action="append", default=[], metavar="TEST", help="this test")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a test may take (120)")
    parser.add_argument(
        "--device",
        default="cpu",
        help="where tensors are that tests request on CUDA: cuda, which ranks share, or another device that an import"
        " brings (default: the CPU). Off the CPU, only tests that request CUDA are run",
    )
    parser.add_argument("--devices", type=int, default=1, help="so many there are: ranks take them in turn (1)")
    parser.add_argument("--module", default="", metavar="FILE", help="nvx's torch module, in the place of its own")
    parser.add_argument(
        "--served",
        action="store_true",
        help="let nvx serve the name that the tests use, by NVX_AS, in place of an alias",
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it; the rest is skipped then")
    parser.add_argument("--debug", choices=["OFF", "INFO", "DETAIL"], help="TORCH_DISTRIBUTED_DEBUG")
    parser.add_argument("--fresh", action="store_true", help="new ranks for every test")
    parser.add_argument("-q", "--quiet", action="store_true", help="no line for a skipped test")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--junit", metavar="FILE")
    parser.add_argument(
        "--floor", metavar="FILE", help="fail if a test is skipped that this file of runs has as passed with this torch"
    )
    parser.add_argument("--record", metavar="FILE", help="put the run into this file of runs, one for each torch")
    parser.add_argument("--list", action="store_true", help="list the passes and stop")
    return parser.parse_args(argv)


def selector(words, exact):
    """All tests if none are selected."""

    def selected(test: str) -> bool:
        if test in exact or not (words or exact):
            return True
        return any(fnmatch.fnmatch(test, w) if re.search(r"[*?\[]", w) else w in test for w in words)

    return selected


def work(options) -> list:
    """(pass, file) in order; the file is empty for DistributedTest."""
    if options.served:
        return [(PASSES["gloo"], "")]  # the tests of the other passes use names that nvx does not serve
    if options.file:
        names = options.passes or ["gloo"]
        return [(PASSES[name], os.path.abspath(file)) for name in names for file in options.file]
    return [(PASSES[name], "") for name in options.passes or PASSES]


def _import_once() -> None:
    """Imports the modules that every pass needs and that do not read the backend's name."""
    from tests.conformance import expected

    expected.stand_in()
    import torch.testing._internal.common_distributed  # noqa: F401


def _host(spec, pipe) -> None:
    from tests.conformance.host import host

    os.setpgid(0, 0)
    try:
        host(spec, pipe.send)
    finally:
        pipe.close()


def run_pass(spec, report) -> bool:
    """Runs the pass in its own process. False if that process did not finish."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_host, args=(spec, theirs))
    process.start()
    theirs.close()
    try:
        report.begin(spec.one, ours.recv())
        while True:
            report.add(ours.recv())
    except EOFError:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
        process.join()
        raise
    finally:
        ours.close()
    return process.exitcode == 0


def main(argv=None) -> int:
    options = parse(argv)
    if options.list:
        print("\n".join(f"{p.name:8} {p.purpose}" for p in PASSES.values()))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # there are more ranks than cores
    if options.device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise every test is skipped for lack of 4 GPUs
    if options.debug:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = options.debug
    if options.served:
        os.environ["NVX_AS"] = "gloo"  # torch's import reads it
    _import_once()
    from tests.conformance.host import Spec
    from tests.conformance.place import Place
    from tests.conformance.report import Report

    report = Report(options.backend, options.ranks, options.quiet)
    folder, begin, whole = tempfile.mkdtemp(prefix="conformance-"), time.monotonic(), True
    imports = tuple(options.imports or ([] if options.backend == "gloo" else [options.backend]))
    try:
        for one, file in work(options):
            spec = Spec(
                one,
                options.backend,
                options.ranks,
                options.timeout,
                folder,
                folder,
                selector(options.k, options.exact),
                report.ran() if one.believes else set(),
                imports,
                options.fresh,
                file,
                Place(options.device, options.devices),
                options.module,
                begin + options.seconds,
                options.served,
            )
            if not run_pass(spec, report):
                whole = False
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - begin
    report.print_summary(seconds)
    if options.json:
        report.write_json(options.json, seconds)
    if options.record:
        report.record(options.record, seconds)
    if options.junit:
        report.write_junit(options.junit, seconds)
    if not whole:
        print("a pass did not come to its end", file=sys.stderr)
    lost = report.lost(options.floor) if options.floor else []
    for test in lost:
        print(f"skipped now, and passed in {options.floor}: {test}", file=sys.stderr)
    if not any(r.outcome == "passed" for r in report.results):
        print("nothing passed: is the selection right?", file=sys.stderr)
        return 1
    return 1 if report.failed() or lost or not whole else 0
