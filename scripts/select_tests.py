"""select_tests.py SELECTION: which tests `make test T=SELECTION` runs, and what they need built.

SELECTION is a folder of tests (group, group/plan, tests/net), a file (tests/torch/test_ddp.py or
tests/group/p2p/mailbox_test.cc; pytest's ...py::test_name too), or a regular expression for names: MailboxTest,
test_all_reduce, ^group.HostProxy. The names of parameters of C++ tests (all_gather_bruck) are those in the test
programs built last in build/make/cpp. Each line it prints is one of these: `program NAME`, a test program to build;
`ctest REGEX`, its tests to run; `pytest ARGUMENT`.
"""

import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CPP_TEST = re.compile(r"^TEST(|_F|_P)\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
INSTANCE = re.compile(r"^INSTANTIATE_TEST_SUITE_P\(\s*(\w+),\s*(\w+),", re.MULTILINE)
PYTHON_TEST = re.compile(r"^(?:def )?(test_\w+)(?=\(| =)", re.MULTILINE)


class NothingMatches(Exception):
    pass


def component_of(root, path):
    """The folder of `tests` that holds a path. One test program is built from all of its C++ tests."""
    return root / "tests" / path.relative_to(root / "tests").parts[0]


def cpp_tests(root, folder):
    """(name, file) of the C++ tests in a folder and below. The names are those of ctest, up to the parameter."""
    component = component_of(root, folder)
    texts = {path: path.read_text() for path in sorted(component.rglob("*_test.cc"))}
    prefixes = {}
    for text in texts.values():
        for prefix, suite in INSTANCE.findall(text):
            prefixes.setdefault(suite, []).append(f"{prefix}/")
    for path, text in texts.items():
        if not path.is_relative_to(folder):
            continue
        for kind, suite, name in CPP_TEST.findall(text):
            for prefix in prefixes.get(suite, []) if kind == "_P" else [""]:
                yield f"{component.name}.{prefix}{suite}.{name}", path


@functools.cache
def built_tests(root):
    """The names of ctest, with their parameters, of the tests in the programs that are built."""
    names = []
    for program in sorted((root / "build" / "make" / "cpp").glob("*_test")):
        listed = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=False)
        suite = ""
        for line in listed.stdout.splitlines():
            name = line.split("#")[0].strip()
            if line.startswith("  "):
                names.append(f"{program.name.removesuffix('_test')}.{suite}{name}")
            else:
                suite = name
    return names


def components(root):
    return sorted(path for path in (root / "tests").iterdir() if path.is_dir())


def of_cpp(tests):
    """The lines for (name, file) of C++ tests."""
    found = sorted({name for name, _ in tests})
    if found:
        yield from (f"program {component}_test" for component in sorted({name.split(".")[0] for name in found}))
        yield f"ctest ^({'|'.join(re.escape(name) for name in found)})(/|$)"


def of_folder(root, folder):
    if folder == component_of(root, folder):
        if any(folder.rglob("*_test.cc")):
            yield from (f"program {folder.name}_test", rf"ctest ^{folder.name}\.")
    else:
        yield from of_cpp(cpp_tests(root, folder))
    if any(folder.rglob("test_*.py")):
        yield f"pytest {folder}"
        yield from ("pytest -m", "pytest not slow")


def of_file(root, path, rest):
    if path.name.endswith("_test.cc"):
        yield from of_cpp(test for test in cpp_tests(root, path.parent) if test[1] == path)
    elif path.match("test_*.py"):
        yield f"pytest {path}{rest}"


def of_name(root, text):
    try:
        wanted = re.compile(text)
    except re.error as wrong:
        raise NothingMatches(f"{text} is neither a folder or file of tests nor a regular expression: {wrong}") from None
    found = {name for component in components(root) for name, _ in cpp_tests(root, component) if wanted.search(name)}
    of_parameters = {
        name for name in built_tests(root) if wanted.search(name) and name.rpartition("/")[0] not in found | {""}
    }
    yield from of_cpp((name, None) for name in found | of_parameters)
    for component in components(root):
        for path in sorted(component.rglob("test_*.py")):
            for name in dict.fromkeys(PYTHON_TEST.findall(path.read_text())):
                if wanted.search(name):
                    yield f"pytest {path}::{name}"


def select(root, text):
    """The lines for a selection. Raises NothingMatches, which says what to do."""
    file, colons, name = text.partition("::")
    path = next((p for p in (root / file, root / "tests" / file) if p.exists() and p.parent != root), None)
    if path is None:  # the suite is called Mailbox, and MailboxTest is a common guess
        lines = list(of_name(root, text)) or list(of_name(root, text.removesuffix("Test")))
    elif path.is_dir():
        lines = list(of_folder(root, path))
    else:
        lines = list(of_file(root, path, colons + name))
    if not lines:
        folders = " ".join(component.name for component in components(root) if any(of_folder(root, component)))
        raise NothingMatches(
            f"no test matches T={text}. T is a folder of tests ({folders}), a file such as tests/torch/test_ddp.py, "
            "or a regular expression for names such as MailboxTest or test_all_reduce. The name of a parameter, "
            "such as all_gather_bruck, is known once its tests are built: T=schedule builds and runs those"
        )
    return lines


if __name__ == "__main__":
    try:
        print("\n".join(select(ROOT, sys.argv[1])))
    except NothingMatches as nothing:
        sys.exit(f"nvx: {nothing}")
