"""The command line, the doctor and the Makefile."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import nvx as nvx_module
import pytest
import torch
import warm
from nvx import cli, doctor
from nvx.bench import collectives
from nvx.bench.sizes import parse_size


def nvx(*arguments, timeout=300):
    return warm.run(["-m", "nvx.cli", *arguments], capture_output=True, text=True, timeout=timeout, check=False)


def test_usage_lists_the_commands_there_are(capsys):
    assert cli.main([]) == 0
    listed = re.findall(r"^  (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(cli.COMMANDS)
    assert {"demo", "doctor", "explain", "env"} <= set(listed)


def test_a_command_that_does_not_exist_is_named(capsys):
    assert cli.main(["absent"]) == 2
    assert "no command 'absent'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["env", "topo", "demo", "explain all_reduce 8", "drill --fault kill --phase init"])
def test_a_command_reports_why_the_module_cannot_serve(monkeypatch, capsys, words):
    monkeypatch.delitem(sys.modules, "nvx._C", raising=False)
    monkeypatch.setattr(nvx_module, "_build_facts", lambda: types.SimpleNamespace(TORCH="1.0"))
    assert cli.main(words.split()) == 2
    printed = capsys.readouterr()
    name = words.split()[0]
    assert (
        re.match(rf"nvx {name}: nvx \S+ was built for torch 1\.0 and cannot serve torch \S+: ", printed.err)
        and not printed.out
    )


@pytest.mark.parametrize(
    ("key", "state"), [("", "set, but empty: no group can be made"), ("k" * 16, "set to a secret")]
)
def test_env_shows_whether_there_is_a_key(monkeypatch, capsys, key, state):
    monkeypatch.setenv("NVX_JOB_KEY", key)
    assert cli.main(["env"]) == 0
    assert re.search(rf"^NVX_JOB_KEY\n(    .*\n)+    {state}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_and_a_full_device_end_a_command(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    command, environment = [sys.executable, "-m", "nvx.cli", "env"], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, timeout=300, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=-1, env=environment, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (2, "nvx: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("command", ["tune", "drill"])
def test_help_needs_no_docstrings(monkeypatch, command):
    """Python with -OO has none."""
    module = importlib.import_module(f"nvx.commands.{command}")
    monkeypatch.setattr(module, "__doc__", None)
    with pytest.raises(SystemExit, match="0"):
        module.parse(["--help"])


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([command, "--help"])
    assert "usage:" in capsys.readouterr().out


def test_doctor_passes_here_and_reports_it_in_json():
    ended = nvx("doctor", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["schema"] == doctor.SCHEMA
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    of_gpus = {"GPUs", "GPUDirect", "peer memory", "dma-buf"}
    assert of_gpus & set(states) == (of_gpus if torch.cuda.is_available() else {"GPUs"})
    assert states["build"] == states["registration"] == states["collectives"] == "OKAY"
    ucx = nvx_module._load().build_info()["ucx"]
    assert states["between hosts"] == ("OKAY" if ucx else "WARN")
    texts = {finding["name"]: finding["text"] for finding in report["findings"]}
    how = r"UCX \d+\.\d+\.\d+ \(.*libucp.*\), \w+.*; over .*; the same collectives exact between two hosts"
    assert not ucx or re.match(how, texts["between hosts"])


def test_a_bad_job_key_keeps_no_command_from_describing_this_machine(monkeypatch):
    monkeypatch.setenv("NVX_JOB_KEY", "too short")
    ended = nvx("explain", "all_reduce", "1M", "-n", "4")
    assert ended.returncode == 0, ended.stderr


def test_doctor_reports_why_a_build_has_no_kernels(monkeypatch):
    facts = {name: value for name, value in vars(nvx_module._build_facts()).items() if name.isupper()}
    monkeypatch.setattr(nvx_module._load(), "build_info", lambda: {"cuda": False, "ucx": True})
    for why, text in (("no nvcc", "cuda False (no nvcc), ucx True"), ("", "cuda False, ucx True")):
        built = types.SimpleNamespace(**facts | {"NO_KERNELS": why})
        monkeypatch.setattr(nvx_module, "_build_facts", lambda built=built: built)
        assert doctor.check_build().text == text


def test_doctor_reports_what_the_gpus_do_and_the_command_to_run(monkeypatch):
    if not torch.cuda.is_available():
        assert doctor.check_gpus().text.startswith("none here")
    verdict = {"kernels": True, "wrong": []}
    assert doctor.judge_gpus([verdict] * 2, "").line() == "[OKAY] GPUs: kernels, exact on 2 ranks"
    found = doctor.judge_gpus([verdict, verdict | {"wrong": ["all_reduce"]}], "")
    assert (found.state, found.text) == ("FAIL", "wrong results from all_reduce")
    host = {"kernels": False, "wrong": []}
    log = "[nvx] group 0: collectives on device 0 go through host memory: a kernel takes 3 ms. Next: start MPS\n"
    found = doctor.judge_gpus([host] * 2, log)
    expected = "[WARN] GPUs: collectives go through host memory, exact on 2 ranks: a kernel takes 3 ms -> start MPS"
    assert found.line() == expected
    assert doctor.judge_gpus([host] * 2, "").text.endswith(": NVX_KERNELS=0")
    slow = "rank 1 is reached through pinned host memory, which is slower: no P2P\n"
    found = doctor.judge_gpus([verdict] * 2, slow * 2)
    assert found.text.count("rank 1 is reached through pinned host memory") == 1
    assert "nvidia-smi topo" in found.hint

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "NVIDIA H100")
    monkeypatch.setattr(nvx_module._load(), "build_info", lambda: {"cuda": False})
    found = doctor.check_gpus()
    assert "2 x NVIDIA H100: collectives go through host memory, because this build has no kernels" in found.text
    monkeypatch.setattr(nvx_module._load(), "build_info", lambda: {"cuda": True})
    broken = doctor.Finding("GPUs", "WARN", "slow", "reboot it")
    monkeypatch.setattr(doctor, "try_gpus", lambda gpus: doctor.okay("GPUs", "fine") if gpus == [0] else broken)
    assert doctor.check_gpus().line() == "[WARN] GPUs: 2 x NVIDIA H100: slow; GPU 1 alone: slow -> reboot it"


def test_doctor_reports_how_hosts_reach_each_other_or_what_is_missing(monkeypatch):
    def fails(function, args, nprocs, daemon):
        raise torch.multiprocessing.ProcessRaisedException("rank 0\nRuntimeError: nvx: no libucp here", 0, 1)

    monkeypatch.setattr(torch.multiprocessing, "spawn", fails)
    monkeypatch.setattr(nvx_module._load(), "build_info", lambda: {"ucx": True})
    found = doctor.check_between_hosts()
    assert (found.state, found.text) == ("WARN", "a rank failed: RuntimeError: nvx: no libucp here")
    assert doctor.check_smoke().state == "FAIL"
    monkeypatch.setattr(nvx_module._load(), "build_info", lambda: {"ucx": False})
    assert "pip install libucx" in doctor.check_between_hosts().hint
    monkeypatch.undo()
    monkeypatch.setenv("NVX_JOB_KEY", "too short")
    found = doctor.check_between_hosts()
    assert (found.state, found.hint) == ("FAIL", "change NVX_JOB_KEY, or unset it")
    monkeypatch.setenv("NVX_JOB_KEY", "sixteen characters or more")
    found = doctor.check_between_hosts()
    assert found.text.startswith("TCP with a job key, at "), found.text


@pytest.mark.parametrize("ours", [False, True])
def test_doctor_warns_of_another_distribution_named_nvx(monkeypatch, tmp_path, ours):
    assert doctor.check_distribution() is None
    folder = tmp_path / "nvx-0.2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nvx\nVersion: 0.2.0\n")
    if ours:
        (folder / "entry_points.txt").write_text("[torch.backends]\nnvx = nvx:_autoload\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor.check_distribution()
    whose = "an older build of nvx" if ours else "another project's"
    assert found.state == "WARN" and found.text.startswith(f"the distribution nvx 0.2.0 is {whose}, ")
    assert found.hint.startswith("pip uninstall nvx torch-nvx")


def test_doctor_reports_what_a_served_name_gets(monkeypatch):
    monkeypatch.delenv("NVX_AS", raising=False)
    assert doctor.check_served_names() is None
    monkeypatch.setenv("NVX_AS", "gloo")
    found = doctor.check_served_names()
    text = "a group requested as gloo runs over nvx, and get_backend() answers gloo"
    assert (found.state, found.text) == ("OKAY", text)
    with monkeypatch.context() as patched:
        patched.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        found = doctor.check_served_names()
        assert (found.state, found.text) == ("FAIL", "a group requested as gloo runs over gloo")
    monkeypatch.setenv("NVX_AS", "gloo,mpi")
    assert doctor.check_served_names().text.startswith("NVX_AS=gloo,mpi: nvx cannot replace mpi")


def variables_reported(**environment):
    script = "from nvx import doctor; found = doctor.check_variables(); print(found.state, found.text)"
    again = {**os.environ, **environment}
    return warm.run(["-c", script], capture_output=True, text=True, check=True, env=again).stdout


def test_doctor_names_the_variables_that_are_wrong():
    output = variables_reported(NVX_SPIN_US="much", NVX_STAGING_MB="0", NVX_TIMOUT_S="3", NVX_ALGO="one_shot")
    assert output.startswith("WARN ")
    assert "NVX_SPIN_US=much is not a number: the default (-1: 200, or 0 where" in output
    assert "NVX_STAGING_MB=0 is less than 1: the default (30) is used" in output
    assert "NVX_TIMOUT_S is not a variable of nvx (did you mean NVX_TIMEOUT_S?)" in output
    assert "NVX_ALGO" not in output
    assert variables_reported(NVX_ALLOW_FROM="10.0.0").endswith(": groups over several hosts fail\n")
    assert variables_reported(NVX_ALGO="one_shot").startswith("OKAY ")
    assert variables_reported(NVX_TUNE="lease=1").startswith("FAIL NVX_TUNE: lease=1 is not a number from 262144")
    assert variables_reported(NVX_CPU_LEVEL="BASE").startswith("OKAY "), "any case will do"


def test_doctor_fails_for_what_init_process_group_refuses(monkeypatch):
    if not nvx_module._load().build_info()["ucx"]:
        pytest.skip("built without UCX")
    monkeypatch.setenv("NVX_SOCKET_IFNAME", "nosuch")
    found = doctor.check_between_hosts()
    assert found.state == "FAIL" and "names no interface that is up" in found.text
    assert "NVX_SOCKET_IFNAME" in found.hint


def test_doctor_sees_the_limits_of_the_cgroups_above(tmp_path):
    own = tmp_path / "cgroup"
    slice_ = tmp_path / "a.slice"
    (slice_ / "b").mkdir(parents=True)
    (tmp_path / "memory" / "c").mkdir(parents=True)
    assert doctor.memory_limit(tmp_path / "absent", tmp_path) is None
    own.write_text("0::/a.slice/b\n")
    assert doctor.memory_limit(own, tmp_path) is None
    (slice_ / "b" / "memory.max").write_text("max\n")
    (slice_ / "memory.max").write_text("1048576\n")
    assert doctor.memory_limit(own, tmp_path) == 1 << 20
    own.write_text("3:cpu:/\n4:memory:/c/of/the/host\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    assert doctor.memory_limit(own, tmp_path) is None
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("2097152\n")
    assert doctor.memory_limit(own, tmp_path) == 2 << 20


def test_doctor_gives_a_hint_with_whatever_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Finding("disk", "FAIL", "on fire", "call someone"),))
    assert doctor.main([]) == 2
    assert capsys.readouterr().out == "[FAIL] disk: on fire -> call someone\n"


def test_doctor_reports_why_a_fresh_python_cannot_import_torch(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libgone.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.check_registration()
    assert (found.state, found.text) == (
        "FAIL",
        "`import torch` in a fresh Python ended with 1: ImportError: libgone.so: cannot open",
    )
    assert found.hint.startswith("repair the installation of torch")
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    assert doctor.check_registration().text == "`import torch` in a fresh Python ended with -6"


def test_doctor_gives_its_advice_once_where_the_build_is_for_another_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "nvx._C", raising=False)
    monkeypatch.setattr(nvx_module, "_build_facts", lambda: types.SimpleNamespace(TORCH="1.0"))
    found = doctor.check_build()
    assert re.fullmatch(r"nvx \S+ was built for torch 1\.0 and cannot serve torch \S+", found.text)
    assert found.hint.startswith("build it again with `pip install") and found.line().count("again") == 1


def test_doctor_fails_on_warnings_only_when_strict(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Finding("disk", "WARN", "warm", "open a window"),))
    monkeypatch.setattr(doctor, "check_smoke", lambda: doctor.okay("collectives", "not run"))
    monkeypatch.setattr(doctor, "check_between_hosts", lambda: doctor.okay("between hosts", "not run"))
    monkeypatch.setattr(doctor, "check_gpus", lambda: doctor.okay("GPUs", "not run"))
    assert doctor.main([]) == 0
    assert doctor.main(["--strict"]) == 1


def test_doctor_names_the_collective_that_is_wrong(monkeypatch, tmp_path):
    def verdicts(function, args, nprocs, daemon):
        for rank in range(nprocs):
            (tmp_path / f"{rank}.json").write_text(json.dumps({"wrong": ["broadcast"] * rank, "seconds": 0.1}))

    monkeypatch.setattr(torch.multiprocessing, "spawn", verdicts)
    monkeypatch.setattr(doctor.tempfile.TemporaryDirectory, "__enter__", lambda self: str(tmp_path))
    found = doctor.check_smoke()
    assert (found.state, found.text) == ("FAIL", "wrong results from broadcast")


def test_explain_reads_sizes_as_people_write_them():
    assert [parse_size(text) for text in ("8", "4K", "64m", "1G")] == [8, 4096, 64 << 20, 1 << 30]
    ended = nvx("explain", "all_reduce", "8", "64M", "-n", "2")
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.strip().splitlines()) >= 2


@pytest.mark.parametrize("name", ["one_shot", "pipelined"])
def test_one_variable_sets_the_algorithm(name):
    code = "import torch, nvx; print(*(nvx.explain('all_reduce', count, 8) for count in (8, 64 << 10)))"
    told = warm.run(
        ["-c", code], env={**os.environ, "NVX_ALGO": name}, capture_output=True, text=True, check=True
    ).stdout
    assert told.count("reduce_" + name) == 2, told


def test_explain_estimates_every_way_and_states_its_basis(capsys):
    assert cli.main(["explain", "all_reduce", "1M", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    one_shot, pipelined = answer["ways"]
    assert (one_shot["runs"], one_shot["estimate_us"]) == (False, None) and "65536" in one_shot["why"]
    assert pipelined["runs"] and pipelined["estimate_us"] > 10 and pipelined["steps"] > 1
    assert "bench/results/targets.json" in pipelined["basis"] and pipelined["set_by"] == "nothing"
    assert cli.main(["explain", "all_reduce", "4K", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert {way["set_by"] for way in answer["ways"]} == {"NVX_ALGO, NVX_TUNE"}
    assert cli.main(["explain", "all_reduce", "64M", "-n", "64", "--hosts", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(bool(re.search(r"\d+ ms .* between hosts +(ring|halving_doubling) ", line)) for line in lines) == 2
    assert sum("nvx's table of sizes and hosts names " in line for line in lines) >= 2
    legend = lines.index("steps: how often a rank waits for others, one wait after another.")
    assert lines[legend - 1].startswith("  estimates: ") and "not by estimates" in lines[-1]


def test_explain_uses_the_rate_of_the_fastest_active_port(tmp_path):
    from nvx.commands.explain import rdma_gb_s

    assert rdma_gb_s(str(tmp_path)) == 0
    for port, (state, rate) in enumerate((("4: ACTIVE", "200 Gb/sec (4X HDR)"), ("1: DOWN", "400 Gb/sec"))):
        folder = tmp_path / "mlx5_0" / "ports" / str(port + 1)
        folder.mkdir(parents=True)
        (folder / "state").write_text(state + "\n")
        (folder / "rate").write_text(rate + "\n")
    assert rdma_gb_s(str(tmp_path)) == 25.0


def test_explain_covers_several_hosts(capsys):
    assert cli.main(["explain", "all_reduce", "8", "64M", "-n", "4", "--hosts", "2"]) == 0
    output = capsys.readouterr().out
    small, large = (line for line in output.splitlines() if line.startswith("all_reduce of "))
    assert small.startswith("all_reduce of 8 bytes a rank, 4 ranks on 2 hosts, 2 on each: "), small
    assert "between hosts pair (small, two hosts: one exchange) by one rank of each host" in small
    assert "between hosts ring (" in large and " on 2 rails " in large and " slices of " in large
    assert cli.main(["explain", "all_reduce", "8", "-n", "5", "--hosts", "2"]) == 0
    assert "5 ranks on 2 hosts, 3 on the largest: " in capsys.readouterr().out
    for ranks, hosts in (("2", "3"), ("2", "0"), ("0", "1")):
        assert cli.main(["explain", "all_reduce", "8", "-n", ranks, "--hosts", hosts]) == 2
        assert capsys.readouterr().err.startswith("nvx explain: ")
    for given in (["8", "-n", "-1"], ["8", "--hosts", "-1"], ["9" * 20], ["8", "-n", "9" * 20]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["explain", "all_reduce", *given])
        assert "nvx explain: error: " in capsys.readouterr().err


def test_simulate_runs_the_schedule_that_explain_names(capsys):
    command = ["simulate", "allreduce", "4M", "--hosts", "4", "--ranks-per-host", "2", "--inter", "1GB/s"]
    assert cli.main(command) == 0
    line, header, row, *legend = capsys.readouterr().out.splitlines()
    assert line.startswith("all_reduce of 4194304 bytes a rank, 8 ranks on 4 hosts, 2 on each: ") and " ring (" in line
    assert header.split()[:5] == ["hosts", "ranks", "size", "time", "schedule"] and legend
    assert row.split()[:3] == ["4", "8", "4M"] and " ring " in row and row.endswith("between hosts")
    assert cli.main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["between_bytes"] == 4 * row["bytes"] * 3 // 8 and row["all_bytes"] == 4 * row["between_bytes"]
    assert 0.99 < row["between_seconds"] / (row["between_bytes"] / 1e9) < 1.01 < row["seconds"] / row["between_seconds"]


def test_simulate_over_hosts_and_sizes(capsys):
    links = ["--inter", "50GB/s", "--intra", "450GB/s", "--latency", "3us", "--cards", "8", "--json"]
    command = ["simulate", "all_reduce", "64M", "--hosts", "1250", "--ranks-per-host", "8", *links]
    assert cli.main([*command, "--over", "hosts"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["hosts"] for row in rows] == [*(1 << k for k in range(1, 11)), 1250]
    assert {row["schedule"] for row in rows} == {"ring", "halving_doubling"}
    assert cli.main([*command, "--over", "sizes"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["bytes"] for row in rows] == [4**k for k in range(5, 14)]
    assert sorted(row["seconds"] for row in rows) == [row["seconds"] for row in rows]
    assert rows[0]["bottleneck"] == "latency" and rows[-1]["ranks"] == 10000
    assert cli.main(["simulate", "barrier", "--hosts", "10000", *links[:2]]) == 0
    assert "dissemination" in capsys.readouterr().out


def test_simulate_takes_bits_and_bytes(capsys):
    def rows(rate):
        assert cli.main(["simulate", "all_reduce", "8M", "--hosts", "2", "--inter", rate, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["rows"]

    assert rows("50GB/s") == rows("400Gbit/s") == rows("400Gb/s") == rows("0.4Tb/s") != rows("400GB/s")
    for unknown in ("400Gbits/s", "400", "4.0.0GB/s", "5\nGB/s"):
        with pytest.raises(SystemExit, match="2"):
            rows(unknown)
        text = f"{unknown!r} is not a number with a unit, such as 50GB/s (bytes) or 400Gbit/s (bits)"
        assert text in capsys.readouterr().err


def test_simulate_refuses_nonsense(capsys):
    for given in (["8M"], ["--hosts", "2"], ["--hosts", "4", "--inter", "5"], ["--hosts", "1", "--inter", "1GB/s"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["simulate", "all_reduce", *given])
        assert "nvx simulate: error: " in capsys.readouterr().err
    for option in ("--hosts", "--ranks-per-host", "--cards"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["simulate", "all_reduce", "8M", "--hosts", "2", "--inter", "1GB/s", option, "9" * 20])
        assert f"{'9' * 20} is not at most 4611686018427387903" in capsys.readouterr().err
    for given in (["--inter", "0GB/s"], ["--inter", "1GB/s", "--cards", "2"]):
        assert cli.main(["simulate", "all_reduce", "8M", "--hosts", "2", *given]) == 2
        assert capsys.readouterr().err.startswith("nvx simulate: ")
    assert cli.main(["simulate", "sum", "8M", "--hosts", "2", "--inter", "1GB/s"]) == 2
    assert "there is no collective sum" in capsys.readouterr().err


def test_python_m_nvx_is_the_command():
    ended = warm.run(["-m", "nvx", "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, nvx_module.__version__ + "\n"), ended.stderr


@pytest.mark.parametrize("line", ["", "--help", "--version", "status 0", "trace absent", "simulate --help"])
def test_commands_without_torch_do_not_load_it(tmp_path, line):
    """As installed: with the entry point, `import nvx` leaves the registration to `import torch`."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was loaded')")
    add_entry_point(tmp_path)
    folders = [str(tmp_path), str(pathlib.Path(nvx_module.__file__).parent.parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "nvx", *line.split()]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "torch was loaded" not in ended.stderr and ended.returncode == (line in ("status 0", "trace absent")), ended


def add_entry_point(folder):
    (folder / "torch_nvx-0.dist-info").mkdir()
    (folder / "torch_nvx-0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nnvx = nvx:_autoload\n")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_explain_reports_where_there_is_nothing_to_choose(capsys, device):
    """A barrier has no size, even if a size is given."""
    for arguments in (["barrier"], ["barrier", "8"]):
        assert cli.main(["explain", *arguments, "-n", "4", "--device", device]) == 0
        output = capsys.readouterr().out
        assert output == "barrier of 4 ranks on one host: flags in shared memory, nothing to choose\n"
    assert cli.main(["explain", "all_reduce", "8", "-n", "1", "--device", device]) == 0
    assert "1 rank on one host: no other rank, so nothing is chosen" in capsys.readouterr().out
    assert cli.main(["explain", "broadcast", "0", "-n", "2", "--device", device]) == 0
    assert "2 ranks on one host: no data to move" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["explain", "all_reduce"])
    assert "give a size" in capsys.readouterr().err
    assert cli.main(["explain", "foo", "--device", device]) == 2
    assert "there is no collective foo; there are all_reduce, " in capsys.readouterr().err
    assert cli.main(["explain", ""]) == 2
    assert "there is no collective ; there are all_reduce, " in capsys.readouterr().err


def test_explain_accepts_the_names_that_bench_accepts(capsys):
    for alias in (alias for alias, name in collectives.ALIASES.items() if name != "sendrecv"):
        assert cli.main(["explain", alias, "8"]) == 0, alias
        assert capsys.readouterr().out.startswith(f"{collectives.ALIASES[alias]} of ")


def explained(monkeypatch, capsys, *arguments, why_no_nccl=""):
    """The lines of an answer, and the lines that are marked as run."""
    monkeypatch.setattr("nvx.delegate.obstacle", lambda: why_no_nccl)
    assert cli.main(["explain", *arguments, "--device", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, [line for line in lines if line.startswith("  runs")]


def test_explain_shows_the_route_of_cuda_tensors_and_the_alternatives(monkeypatch, capsys):
    lines, running = explained(monkeypatch, capsys, "allreduce", "4K", "1M", "-n", "8")
    headings = [line for line in lines if line.startswith("all_reduce of ")]
    assert len(headings) == len(running) == 2
    assert "4096 bytes a rank, 8 ranks on one host, CUDA tensors" in headings[0]
    for way in ("NCCL", "kernels", "host memory", "NVX_DELEGATE"):
        assert sum(way in line for line in lines) >= 2, way
    by_host = [line for line in lines if "if no way above is possible" in line]
    assert [line.split()[-1] for line in by_host] == ["NVX_TUNE", "nothing"], "1 MiB is more than a slot holds"
    assert sum("not measured on a device" in line for line in lines) >= 2
    (taken,) = {line for line in lines if line.startswith("  kernels take ")}
    assert "take 24 SMs while they run: a block of 512 threads on each, with up to 128 registers" in taken
    assert re.search(r" lives 1\d\.\d MiB of the GPU and \d+ KiB of pinned host memory", taken), taken
    assert all(re.match(r"  runs +\d+ [um]s ", line) for line in running), running


def test_explain_lists_the_keys_with_their_values_and_where_these_come_from(monkeypatch, tmp_path):
    file = tmp_path / "two.tune"
    file.write_text("ranks = 2\nbroadcast.one_shot = 8K\nslice = 64K\n")
    monkeypatch.setenv("NVX_TUNE", f"@{file},slice=128K")
    rows = {line.split()[0]: line.split()[1:] for line in nvx("explain", "-n", "2").stdout.splitlines()}
    assert rows["key"] == "value set by at least at most between meaning".split()
    assert rows["broadcast.one_shot"][:6] == ["8K", "file", "0", "64K", "shared", "memory"]
    assert rows["slice"][:5] == ["128K", "variable", "64K", "64M", "hosts"]
    assert rows["all_reduce.one_shot"][:2] == ["64K", "default"]
    assert rows["kernels.two_shot"][:5] == ["any", "default", "0", "any", "GPUs,"]
    assert rows["kernels.chunk"][0] == "64K" and rows["kernels.packets"][0] == "5504"
    assert len(rows) == len(nvx_module._load().tuning()) + 1
    four = nvx("explain", "all_reduce", "8", "-n", "4", "--json")
    assert "no file of NVX_TUNE is for 4 ranks on a host" in four.stderr
    values = {row["key"]: (row["value"], row["set_by"]) for row in json.loads(four.stdout)["keys"]}
    assert values["broadcast.one_shot"] == (65536, "default") and values["slice"] == (131072, "variable")
    assert values["all_reduce.one_shot"] == (16384, "default")
    assert nvx("explain", "broadcast", "8K").stdout.endswith("tuned: slice = 128K (variable)\n")
    monkeypatch.setenv("NVX_TUNE", "slice=1")
    refused = nvx("explain", "all_reduce", "8")
    assert refused.returncode == 2 and refused.stderr.startswith("nvx explain: NVX_TUNE: slice=1 is not a number from")


def test_explain_reports_that_there_is_no_nccl(monkeypatch, capsys):
    why = "torch 2.0 was built without NCCL: nvx cannot delegate to it"
    lines, _ = explained(monkeypatch, capsys, "all_reduce", "1M", why_no_nccl=why)
    (row,) = (line for line in lines if "ProcessGroupNCCL" in line)
    assert why in row and "another torch" in row


def test_explain_follows_nvx_delegate():
    """nvx reads `NVX_DELEGATE` once in a process. Its sizes are those of the whole message, and the answer defines
    them."""
    script = (
        "import nvx.delegate, nvx.cli, sys; nvx.delegate.obstacle = lambda: ''; "
        "sys.exit(nvx.cli.main(['explain', sys.argv[1], '4K', '1M', '-n', '4', '--device', 'cuda']))"
    )
    again = {**os.environ, "NVX_DELEGATE": "all_reduce:1M, all_gather:16K, reduce_scatter:8K"}

    def rows(collective):
        ended = warm.run(["-c", script, collective], capture_output=True, text=True, timeout=60, check=True, env=again)
        running = [line for line in ended.stdout.splitlines() if line.startswith("  runs")]
        return ended.stdout, ["NCCL" in line for line in running]

    output, by_nccl = rows("all_reduce")
    assert by_nccl == [False, True]
    assert "smaller than the limit in NVX_DELEGATE: 4096 of at least 1048576 bytes" in output
    assert rows("all_gather")[1] == [True, True], "4 KiB of each of 4 ranks are 16 KiB"
    assert rows("reduce_scatter")[1] == [False, True], "what each puts in is the whole"
    assert rows("broadcast")[1] == [False, False]


def test_explain_covers_cuda_tensors_over_several_hosts(capsys):
    assert cli.main(["explain", "all_reduce", "8", "64M", "-n", "4", "--hosts", "2", "--device", "cuda"]) == 0
    output = capsys.readouterr().out
    assert output.count("4 ranks on 2 hosts, CUDA tensors:\n") == 2
    assert len(re.findall(r"^  runs .* between hosts \w+", output, re.MULTILINE)) == 2
    assert "kernels and host memory" in output


@pytest.mark.parametrize("name", ["send", "recv", "sendrecv", "pingpong"])
def test_explain_shows_how_messages_travel(capsys, name):
    assert cli.main(["explain", name, "8", "1M"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("send and recv have one algorithm: ") and len(output.splitlines()) == 1
    assert cli.main(["explain", name, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["summary"] + "\n" == output and answer["answers"] == [] and answer["keys"]


def test_env_lists_the_registry_and_what_is_set(monkeypatch, capsys):
    monkeypatch.setenv("NVX_DEBUG", "warn")
    monkeypatch.setenv("NVX_JOB_KEY", "of this job alone")
    assert cli.main(["env"]) == 0
    output = capsys.readouterr().out
    assert "NVX_DEBUG\n" in output and "set to 'warn'" in output
    assert "set to a secret" in output and "of this job alone" not in output
    assert 0 < len(re.findall(r"^NVX_\w+$", output, re.MULTILINE)) <= 25
    assert "accepts a whole number from 1 on\n    default 30\n" in output


def test_env_marks_what_a_variable_does_not_take(monkeypatch, capsys):
    monkeypatch.setenv("NVX_DEBUG", "bla")
    monkeypatch.setenv("NVX_SPIN_US", "much")
    monkeypatch.setenv("NVX_TIMEOUT_S", "-1")
    monkeypatch.setenv("NVX_ON_ERROR", "Abort")
    assert cli.main(["env"]) == 0
    output = capsys.readouterr().out
    assert "set to 'bla', which is none of warn, info, trace: the default (warn) is used\n" in output
    assert "set to 'much', which is not a number: the default (-1: 200, or" in output
    assert "set to '-1', which is less than 0: the default (0: the group's timeout) is used\n" in output
    assert "set to 'Abort' (default raise)\n" in output


def test_make_help_names_every_target(root):
    output = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    for target in ("demo", "quick", "test", "test-two-hosts", "test-rdma", "check", "bench", "conformance", "wheels"):
        assert f"make {target} " in output


def test_the_script_refuses_an_unknown_target(root):
    ended = subprocess.run([root / "scripts" / "run.sh", "dance"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    targets = (
        "demo quick test test-install test-two-hosts test-rdma test-hosts test-slow test-frameworks check bench "
        "conformance wheels"
    )
    assert ended.stderr == f"nvx: no target dance: one of {targets}\n"
