"""A contributor's tools: the tests that `make test T=...` selects, the hook for subjects, and the timing of CI."""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def select(root):
    script = runpy.run_path(str(root / "scripts" / "select_tests.py"))
    return lambda text, tree=root: script["select"](tree, text)


@pytest.fixture
def tree(tmp_path):
    """Two components: C++ tests, some of them with parameters, and Python tests, one of them made by assignment."""
    net, torch = tmp_path / "tests" / "net", tmp_path / "tests" / "torch"
    net.mkdir(parents=True)
    torch.mkdir()
    (net / "link_test.cc").write_text(
        "TEST(Link, Opens) {\n}\nTEST_P(Contract, Holds) {\n}\nINSTANTIATE_TEST_SUITE_P(Links, Contract,\n"
    )
    (net / "header_test.cc").write_text("TEST_F(Header, OpensAndCloses) {\n}\n")
    (torch / "test_ddp.py").write_text("def test_open():\n    pass\n\n\ntest_closed = on_ranks(2)(body)\n")
    return tmp_path


def test_a_folder_selects_its_tests_of_both_languages(select, tree):
    assert select("net", tree) == ["program net_test", r"ctest ^net\."]
    assert select("tests/net/", tree) == select("net", tree)
    assert select("torch", tree) == [f"pytest {tree}/tests/torch", "pytest -m", "pytest not slow"]


def test_a_folder_of_a_component_selects_its_own_tests(select, tree):
    inner = tree / "tests" / "net" / "ucx"
    inner.mkdir()
    (inner / "worker_test.cc").write_text("TEST(Worker, Opens) {\n}\n")
    assert select("net/ucx", tree) == ["program net_test", r"ctest ^(net\.Worker\.Opens)(/|$)"]
    assert select("net", tree) == ["program net_test", r"ctest ^net\."]


def test_a_file_selects_its_tests(select, tree):
    assert select("tests/torch/test_ddp.py", tree) == [f"pytest {tree}/tests/torch/test_ddp.py"]
    assert select("torch/test_ddp.py::test_open", tree) == [f"pytest {tree}/tests/torch/test_ddp.py::test_open"]
    header = ["program net_test", r"ctest ^(net\.Header\.OpensAndCloses)(/|$)"]
    assert select("tests/net/header_test.cc", tree) == header


def test_a_name_selects_by_regular_expression(select, tree):
    opens = r"ctest ^(net\.Header\.OpensAndCloses|net\.Link\.Opens)(/|$)"
    assert select("Opens", tree) == ["program net_test", opens]
    assert select("Opens$|test_open", tree) == [
        "program net_test",
        r"ctest ^(net\.Link\.Opens)(/|$)",
        f"pytest {tree}/tests/torch/test_ddp.py::test_open",
    ]
    assert select("closed", tree) == [f"pytest {tree}/tests/torch/test_ddp.py::test_closed"]


def test_a_test_with_parameters_is_selected_with_all_of_them(select, tree):
    contract = ["program net_test", r"ctest ^(net\.Links/Contract\.Holds)(/|$)"]
    assert select("Contract", tree) == contract
    assert select("ContractTest", tree) == contract
    assert re.search(contract[1].split(maxsplit=1)[1], "net.Links/Contract.Holds/ucx")


def test_a_parameter_is_selected_by_the_name_that_the_built_program_gives_it(select, tree):
    program = tree / "build" / "make" / "cpp" / "net_test"
    program.parent.mkdir(parents=True)
    listed = "Link.\n  Opens\nLinks/Contract.\n  Holds/ucx  # GetParam() = 1\n  Holds/lossy_1\n"
    program.write_text(f"#!/bin/sh\ncat <<'.'\n{listed}.\n")
    program.chmod(0o755)
    assert select("lossy", tree) == ["program net_test", r"ctest ^(net\.Links/Contract\.Holds/lossy_1)(/|$)"]
    assert select("Holds", tree) == ["program net_test", r"ctest ^(net\.Links/Contract\.Holds)(/|$)"]
    assert select("Opens|ucx", tree)[1] == (
        r"ctest ^(net\.Header\.OpensAndCloses|net\.Link\.Opens|net\.Links/Contract\.Holds/ucx)(/|$)"
    )


def test_a_selection_that_matches_nothing_lists_the_choices(root, tmp_path):
    ended = subprocess.run(
        ["make", "test", "T=NoSuchTestAnywhere[0]"], cwd=root, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert "nvx: no test matches T=NoSuchTestAnywhere[0]. T is a folder of tests (base bench " in ended.stderr
    assert "What is here" not in ended.stdout  # before any install or build


def test_malformed_regular_expression_is_named(root):
    ended = subprocess.run(["make", "test", "T=(broken"], cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "nvx: (broken is neither a folder or file of tests nor a regular expression: " in ended.stderr


def test_every_cpp_test_is_found_by_its_own_name(select, root):
    for path in root.glob("tests/**/*_test.cc"):
        component = path.relative_to(root / "tests").parts[0]
        named = re.findall(r"^TEST\((\w+), (\w+)\)", path.read_text(), re.MULTILINE)
        found = select("|".join(f"{suite}[.]" for suite in {suite for suite, _ in named}))[-1] if named else ""
        assert all(rf"{component}\.{suite}\.{name}" in found for suite, name in named), path


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("net: close idle endpoints", None),
        ("net, torch: bring both ends together", None),
        ("ci: pass the budget on", None),
        ("fixup! net: close idle endpoints", None),
        ("net: closes idle endpoints", "is no imperative"),
        ("net: closed idle endpoints", "is no imperative"),
        ("net: closing idle endpoints", "is no imperative"),
        ("net: Close idle endpoints", "upper case"),
        ("net: close idle endpoints.", "full stop"),
        ("Idle endpoints are closed", "is not `part: imperative`"),
        ("moon: close idle endpoints", "is no folder of the tree"),
        (f"net: close {'x' * 61}", "under 72"),
        ("", "is not `part: imperative`"),
    ],
)
def test_the_hook_judges_a_subject(root, subject, fault):
    complaint = runpy.run_path(str(root / "scripts" / "check_subject.py"))["complaint"]
    complaints = complaint(subject, {"net", "torch", "ci"})
    assert fault in complaints if fault else complaints == ""


def parts_of(root):
    lines = (root / ".ci" / "budget").read_text().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line and not line.startswith("#")}


def test_the_parts_of_ci_are_targets_and_fit(root):
    output = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    assert all(f"make {part} " in output for part in parts_of(root))
    assert sum(parts_of(root).values()) <= 45


@pytest.fixture
def ci(root, tmp_path):
    """Runs .ci/run over parts that need no time: (table, recipe of `test`) -> its outcome."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", tmp_path / ".ci" / "run")

    def run(table, recipe, *parts):
        (tmp_path / ".ci" / "budget").write_text(table)
        (tmp_path / "Makefile").write_text(f"test:\n\t{recipe}\ncheck:\n\t@echo checked\n")
        environment = {name: value for name, value in os.environ.items() if name != "NO_SKIPS"}
        command = [tmp_path / ".ci" / "run", *parts]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return run


def test_ci_reports_parts_over_their_budget_and_passes(ci):
    ended = ci("# minutes\ntest 0.01\ncheck 5\n", "sleep 2")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^test +passed +0\.\d of +0\.0 min +OVER BUDGET by 0\.\d min$", ended.stdout, re.MULTILINE)
    assert re.search(r"^check +passed +0\.0 of +5\.0 min$", ended.stdout, re.MULTILINE)


def test_ci_goes_on_after_a_part_that_fails_and_fails(ci):
    ended = ci("test 1\ncheck 1\n", "false")
    assert ended.returncode == 1
    assert "checked" in ended.stdout and re.search(r"^test +FAILED", ended.stdout, re.MULTILINE)


def test_ci_runs_the_part_that_is_named(ci):
    ended = ci("test 1\ncheck 1\n", "false", "check")
    assert ended.returncode == 0 and "##### make test" not in ended.stdout
    assert ci("test 1\n", "true", "dance").stderr == ".ci/budget has no part dance\n"


@pytest.mark.parametrize(("no_skips", "verdict"), [("", "none failed; skipped: shell"), ("1", "FAILED: shell")])
def test_a_gate_without_its_tool_fails_where_nothing_may_be_skipped(root, tmp_path, no_skips, verdict):
    environment = {"PATH": str(tmp_path), "NO_SKIPS": no_skips}
    command = [sys.executable, root / "tests" / "gates" / "run", "shell"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.stdout.endswith(verdict + "\n"), ended.stdout + ended.stderr
    assert ended.returncode == (1 if no_skips else 0)


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("died, exit code -11", True),
        ("rank 1 ended with -6", True),
        ("assert -11 == 0", True),
        ("rank 0: exit code 0, signal 11", True),
        ("all_reduce: 1 of 100 wrong, first at 17: 3.0, want 4.0", True),
        ("wrong result of 7 all_reduce: 3.0 at 17, not 4.0", True),
        ("rank 1: wrong output", True),
        ("rank 1: wrote outside its tensors", True),
        ("all_reduce: wrote outside the tensor", True),
        ("rank 1: changed its input", True),
        ("rank 1 has another byte at 17", True),
        ('f"{what}: {int(differs.sum())} of {got.numel()} wrong, first at {at}"', False),
        ("it took 61 s, and the limit is 60 s", False),
        ("died, exit code -9", False),
        ("assert 8 == 6", False),
        ("rank 0: exit code 1, signal 0", False),
    ],
)
def test_a_crash_and_a_wrong_result_get_no_second_try(root, text, final, monkeypatch):
    words = re.search(r"^final='(.*)'$", (root / "scripts/test.sh").read_text(), re.MULTILINE)[1]
    monkeypatch.syspath_prepend(root / "tests" / "gates")
    assert words == importlib.import_module("builds").FINAL.pattern
    found = subprocess.run(["grep", "-qE", words], input=text, text=True, check=False)
    assert (found.returncode == 0) == bool(re.search(words, text)) == final


@pytest.mark.parametrize(("case", "again"), [('name="ended with -6"', True), ('message="ended with -6"', False)])
def test_a_name_with_the_words_of_a_crash_is_no_crash(root, tmp_path, case, again):
    pytest_stub = tmp_path / "pytest"
    pytest_stub.write_text(f"#!/bin/sh\necho '<testcase {case}/>' >{tmp_path}/some.xml\nexit 1\n")
    pytest_stub.chmod(0o755)
    script = 'set -euo pipefail; say() { echo "$@"; }; source scripts/test.sh; run_pytest some'
    variables = {"root": tmp_path, "results": tmp_path, "py": pytest_stub, "jobs": "1", "SECOND_TRY": "1"}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = ["bash", "-c", script]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and not ended.stderr
    assert ("Once more" in ended.stdout) == again


def test_ci_refuses_a_table_that_adds_up_to_more_than_there_is(ci):
    ended = ci("test 40\ncheck 6\n", "true")
    assert ended.returncode == 1 and "#####" not in ended.stdout
    assert ended.stderr == ".ci/budget: the parts add up to 46 minutes, and CI has 45\n"
    assert "not a part and its minutes: test" in ci("test\n", "true").stderr
