"""The stderr output of nvx, on one host and on several: readable, true, and no more than requested."""

import os
import re
import subprocess
import sys
import time

import nvx
import pytest
import warm
from ranks import only_nvx

pytestmark = only_nvx

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import nvx
store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("nvx", store=dist.FileStore(store, world), rank=rank, world_size=world)
{body}
"""


def printed(folder, body, hosts, **environment):
    """The stderr output of ranks on these hosts, one host name per rank. All ranks must succeed."""
    store = os.path.join(folder, f"store-{time.monotonic_ns()}")
    command = ["-c", PROGRAM.format(body=body), store]
    ranks = [
        warm.Popen(
            [*command, str(rank), str(len(hosts))],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NVX_HOST_ID": host, "NVX_DEBUG": "info", **environment},
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        lines = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(hosts), lines
    return lines


def has_ucx():
    """An installed UCX that does not work is no reason to skip."""
    return nvx._load().build_info()["ucx"] and "no libucp.so.0 could be loaded" not in nvx._load().network()["none"]


def only_with_ucx(hosts):
    if len(set(hosts)) > 1 and not has_ucx():
        pytest.skip("hosts cannot reach each other here")


@pytest.mark.parametrize(
    ("hosts", "spread", "plan"),
    [
        (["left"], "1 rank on host left", "1 rank on one host: no other rank, so nothing is chosen"),
        (["left"] * 2, "2 ranks on host left through shared memory", r"2 ranks on one host: reduce_pipelined \("),
        (
            ["left", "right", "left"],
            "3 ranks on 2 hosts: 2 on left, 1 on right",
            r"3 ranks on 2 hosts, 2 on the largest: inside a host \w+, between hosts ring \(.*\) on 1 rail",
        ),
    ],
)
def test_group_is_logged_once(tmp_path, hosts, spread, plan):
    only_with_ucx(hosts)
    lines = printed(str(tmp_path), "dist.destroy_process_group()", hosts)
    assert re.search(rf"^nvx\[\d+\] group \w+: {re.escape(spread)}; \d+ cores", lines[0], re.MULTILINE), lines[0]
    assert re.search(rf"^nvx\[\d+\] group \w+: all_reduce of 1048576 bytes a rank, {plan}", lines[0], re.MULTILINE)
    assert all(spread not in other for other in lines[1:])


@pytest.mark.parametrize(
    ("hosts", "tune", "plain", "tuned"),
    [
        (["left"] * 2, "all_reduce.one_shot=0", "16 bytes: reduce_one_shot", "16 bytes: reduce_pipelined"),
        (["left", "right"], "all_reduce.fewest_steps=0", "between hosts: pair", "between hosts: ring"),
    ],
)
def test_a_tuned_group_runs_what_its_options_choose(tmp_path, hosts, tune, plain, tuned):
    """As the results are the same."""
    only_with_ucx(hosts)
    body = f"""
group = dist.new_group(pg_options=nvx.Options(tune="{tune}"))
for each in (None, group):
    dist.all_reduce(torch.ones(4), group=each)
dist.destroy_process_group()
"""
    for lines in printed(str(tmp_path), body, hosts, NVX_DEBUG="trace"):
        for group, way in enumerate((plain, tuned)):
            assert re.search(rf"group {group} rank \d #1 all_reduce {way}$", lines, re.MULTILINE), lines


def test_rank_that_leaves_in_order_is_not_reported_lost(tmp_path):
    """Rank 0 outlives the other processes and leaves only then."""
    only_with_ucx(["left", "right"])
    body = """
dist.all_reduce(torch.ones(10))
dist.barrier()
if rank == 0:
    time.sleep(1.5)
dist.destroy_process_group()
if rank == 0:
    time.sleep(1.5)
"""
    for lines in printed(str(tmp_path), body, ["left", "right"]):
        assert "lost" not in lines and "Endpoint" not in lines, lines


def found_ucx():
    return [one["path"] for one in nvx._load().network()["ucx_found"]] if has_ucx() else []


@pytest.mark.parametrize("turn", [0, 1], ids=["first", "second"])
def test_each_ucx_that_is_found_serves_hosts(tmp_path, turn):
    """Other tests use the first one, which is the newest."""
    if len(found_ucx()) <= turn:
        pytest.skip(f"{len(found_ucx())} libucp.so.0 found here: pip install libucx-cu13, apt-get install libucx0")
    path = found_ucx()[turn]
    body = """
for count in (10, 3_000_000):
    tensor = torch.full((count,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor.zero_(), 0)
    assert tensor.eq(3).all()
dist.barrier()
with open("/proc/self/maps") as maps:
    print("loaded", {line.split()[-1] for line in maps if "libucp" in line}, file=sys.stderr)
dist.destroy_process_group()
"""
    for lines in printed(str(tmp_path), body, ["left", "right"], NVX_LIBUCP=path):
        loaded = [line for line in lines.splitlines() if line.startswith("loaded ")]
        assert loaded == [f"loaded {{'{path}'}}"], lines


@pytest.mark.parametrize(("limit", "least", "most"), [("1", 0, 2), ("30", 4, 32)])
def test_staging_memory_stays_within_its_variable(tmp_path, limit, least, most):
    """Of eight groups that all reduce at once."""
    body = """
groups = [dist.new_group() for _ in range(8)]
works = [dist.all_reduce(torch.ones(1 << 21), group=group, async_op=True) for group in groups]
for work in works:
    work.wait()
dist.barrier()
paths = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
arenas = [path for path in paths if os.path.lexists(path) and "memfd:nvx " in os.readlink(path)]
print("staging", max(os.stat(path).st_blocks * 512 for path in arenas) >> 10, file=sys.stderr)
dist.destroy_process_group()
"""
    for lines in printed(str(tmp_path), body, ["left"] * 2, NVX_STAGING_MB=limit):
        staging = int(re.search(r"^staging (\d+)$", lines, re.MULTILINE)[1])
        assert least << 10 < staging < most << 10, staging


def run_apart(folder, body, environments):
    """Runs each rank on its own host with its own environment; returns stderr, exit codes, and the time taken."""
    store = os.path.join(folder, f"store-{time.monotonic_ns()}")
    started = time.monotonic()
    ranks = [
        warm.Popen(
            ["-c", body, store, str(rank), str(len(environments))],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NVX_HOST_ID": f"host{rank}", **environment},
        )
        for rank, environment in enumerate(environments)
    ]
    try:
        return [(rank.communicate(timeout=100)[1], rank.returncode) for rank in ranks], time.monotonic() - started
    finally:
        for rank in ranks:
            rank.kill()


def test_a_library_that_is_not_there_ends_all_ranks_at_once_and_is_named(tmp_path):
    """Only one of two hosts lacks it: the other host learns from whom, before the set-up times out."""
    only_with_ucx(["left", "right"])
    nowhere = "/nonexistent/libucp.so.0"
    ranks, took = run_apart(str(tmp_path), PROGRAM.format(body=""), [{}, {"NVX_LIBUCP": nowhere}])
    for words, code in ranks:
        assert code == 1, words
        assert f"NVX_LIBUCP={nowhere} is neither a file nor a folder with a libucp.so.0" in words, words
        assert "Next: name one, or unset it" in words, words
    assert re.search(r"rank 1 \(pid \d+, host host1\) failed to create group", ranks[0][0]), ranks[0][0]
    assert took < 60  # the set-up may take half an hour; most of this time is the import of torch


def test_a_library_that_cannot_be_loaded_is_named_with_the_line_to_type(tmp_path):
    only_with_ucx(["left", "right"])
    (tmp_path / "libucp.so.0").write_text("no library")
    ranks, _ = run_apart(str(tmp_path), PROGRAM.format(body=""), [{"NVX_LIBUCP": str(tmp_path)}] * 2)
    for words, code in ranks:
        assert code == 1, words
        assert f"no libucp.so.0 could be loaded ({tmp_path}/libucp.so.0: " in words, words
        advice = "Next: type 'pip install libucx-cu13' or 'apt-get install libucx0', or set NVX_LIBUCP to its path"
        assert advice in words, words


def test_a_libucp_that_comes_after_nvxs_own_is_logged_once(tmp_path):
    """Any library of that name counts: nothing calls it."""
    only_with_ucx(["left", "right"])
    other = tmp_path / "libucp.so.0"
    body = f"""
import ctypes, shutil
with open("/proc/self/maps") as maps:
    some = next(line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line)
if rank == 0:
    shutil.copyfile(some, {str(other)!r})
    ctypes.CDLL({str(other)!r})
for _ in range(2):
    dist.destroy_process_group(dist.new_group())
dist.destroy_process_group()
"""
    ranks, _ = run_apart(str(tmp_path), PROGRAM.format(body=body), [{}, {}])
    assert [code for _, code in ranks] == [0, 0], ranks
    message = f"this process has loaded a second UCX: {other}, beside "
    assert [words.count(message) for words, _ in ranks] == [1, 0], ranks


def test_a_second_libucp_in_the_process_is_logged(tmp_path):
    """nvx uses the library that is loaded already: two of one name would share symbols and crash."""
    if len(found_ucx()) < 2:
        pytest.skip(f"{len(found_ucx())} libucp.so.0 found here: pip install libucx-cu13, apt-get install libucx0")
    there, named = found_ucx()[:2]
    load = f"import ctypes; ctypes.CDLL({there!r}, mode=ctypes.RTLD_GLOBAL)\n"
    body = load + PROGRAM.format(body="dist.all_reduce(torch.ones(10))\ndist.destroy_process_group()")
    ranks, _ = run_apart(str(tmp_path), body, [{"NVX_LIBUCP": named}] * 2)
    for words, code in ranks:
        assert code == 0, words
        message = r"^nvx\[\d+\] (\S+) is already loaded in this process and is used; "
        message += rf"NVX_LIBUCP={re.escape(named)} is ignored$"
        match = re.search(message, words, re.MULTILINE)
        assert match and os.path.realpath(match[1]) == os.path.realpath(there), words


EXPLAINED = {
    "all_reduce": "dist.all_reduce(torch.ones({n}, dtype=torch.uint8))",
    "reduce": "dist.reduce(torch.ones({n}, dtype=torch.uint8), 0)",
    "broadcast": "dist.broadcast(torch.ones({n}, dtype=torch.uint8), 0)",
    "all_gather": "dist.all_gather_into_tensor(torch.empty({n} * world, dtype=torch.uint8),"
    " torch.ones({n}, dtype=torch.uint8))",
    "reduce_scatter": "dist.reduce_scatter_tensor(torch.empty({n} // world, dtype=torch.uint8),"
    " torch.ones({n}, dtype=torch.uint8))",
    "all_to_all": "dist.all_to_all_single(torch.empty({n}, dtype=torch.uint8), torch.ones({n}, dtype=torch.uint8))",
    "barrier": "dist.barrier()",
}
SIZES = (8, 40 << 10, 1 << 20, 8 << 20)


def test_explain_shows_what_runs_on_several_hosts(tmp_path):
    """It prints the text that `NVX_DEBUG=trace` prints for these calls: the schedule between hosts and the steps
    inside."""
    hosts = ["left", "left", "right", "right"]
    only_with_ucx(hosts)
    calls = [(name, n) for name in EXPLAINED for n in (SIZES if name != "barrier" else (0,))]
    body = "\n".join(EXPLAINED[name].format(n=n) for name, n in calls) + "\ndist.destroy_process_group()"
    lines = printed(str(tmp_path), body, hosts, NVX_DEBUG="trace")[0]
    for number, (name, n) in enumerate(calls, start=1):
        own = [line for line in lines.splitlines() if f" #{number} " in line]
        between = {line.rsplit(" ", 1)[1] for line in own if "between hosts:" in line}
        inside = {line.rsplit(" ", 1)[1] for line in own if "bytes:" in line}
        message = nvx.explain(name, n, len(hosts), hosts=2)
        assert set(re.findall(r"between hosts (\w+) \(", message)) == between, (message, own)
        named_inside = set(re.findall(r"inside a host (\w+)", message))
        assert named_inside and named_inside <= inside, (message, own)
        assert n > SIZES[1] or named_inside == inside, (message, own)  # the last of many slices is short


@pytest.mark.parametrize("second", ["after the future", "before the future", "after the callback"])
def test_a_callback_whose_calls_race_with_others_is_named(tmp_path, second):
    """As DDP's powerSGD hook: rank 0 makes the third and later calls in a callback of the first one's future."""
    body = f"""
a, b, c, d = (torch.full((4,), float(10 ** i)) for i in range(4))
go = dist.FileStore(store + "-go", world)
second = {second!r}
sparse = lambda: dist.all_reduce(torch.eye(2).to_sparse())
if rank == 0:
    works = [dist.all_reduce(a, async_op=True)]
    if second == "before the future":
        works.append(dist.all_reduce(b, async_op=True))
    future = works[0].get_future().then(lambda f: [dist.all_reduce(c, async_op=True), sparse(), dist.all_reduce(d)])
    if second == "after the future":
        works.append(dist.all_reduce(b, async_op=True))
    go.set("go", "")
    works += future.wait()[:1]
    if second == "after the callback":
        works.append(dist.all_reduce(b, async_op=True))
    for work in works:
        work.wait()
else:
    go.wait(["go"])
    for x in (a, c, None, d, b) if second == "after the callback" else (a, b, c, None, d):
        sparse() if x is None else dist.all_reduce(x)
assert [x[0].item() for x in (a, b, c, d)] == [2, 20, 200, 2000]
"""
    lines = printed(str(tmp_path), body, ["left", "left"], NVX_DEBUG="warn")
    named = [rank.count("a callback of a future calls all_reduce") for rank in lines]
    assert named == [int(second == "after the future"), 0], lines


def test_ucx_from_pypi_is_found_wherever_python_has_it(tmp_path):
    """Its package is often in another folder than nvx: a checkout, an editable install, a venv over a system."""
    if not nvx._load().build_info()["ucx"]:
        pytest.skip("nvx was built without UCX")
    library = tmp_path / "elsewhere" / "libucx" / "lib" / "libucp.so.0"
    library.parent.mkdir(parents=True)
    library.parent.parent.joinpath("__init__.py").touch()
    library.write_bytes(b"no library\0")
    code = "import nvx; print([one['path'] for one in nvx._load().network()['ucx_found']])"
    path = os.pathsep.join([str(tmp_path / "elsewhere"), *sys.path])
    found = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, text=True)
    assert str(library) in found


@pytest.mark.parametrize("closed", ["before it starts", "after a group"])
def test_closed_standard_streams_become_no_memory_of_nvx(tmp_path, closed):
    """The next files that a process opens get the numbers of closed streams, and then what the process prints."""
    program = f"""
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
for turn in range(2):
    store = dist.FileStore({str(tmp_path)!r} + f"/store{{turn}}", 2)
    dist.init_process_group("nvx", store=store, rank=rank, world_size=2)
    for _ in range(200):
        tensor = torch.ones(4000)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()
        os.write(1, b"x" * 10000)
    dist.destroy_process_group()
    os.closerange(0, 3)
"""
    before = "<&- >&- 2>&-" if closed == "before it starts" else ">/dev/null"
    ranks = [
        subprocess.Popen(
            ["sh", "-c", f'exec "$@" {before}', "sh", sys.executable, "-c", program, str(rank)],
            env={**os.environ, "NVX_DEBUG": "trace"},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_an_interrupt_while_the_module_loads_stays_one():
    """The module itself runs Python code, to find UCX."""
    program = """
import importlib.util
find_spec = importlib.util.find_spec
def interrupted(name, *rest):
    if name == "libucx":
        raise KeyboardInterrupt
    return find_spec(name, *rest)
importlib.util.find_spec = interrupted
import nvx
try:
    nvx._load()
except KeyboardInterrupt:
    print("interrupted")
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "interrupted\n"
