"""The pages are correct: their programs run, and their commands, links, files and error texts exist."""

import re
import subprocess
import sys

import pytest

# Pages with generated tables, and generated pages.
OTHERS = {"gpu-evidence.md", "environment.md"}
MOST_LINES = {"README.md": 100, "architecture.md": 200}


def pages(root):
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def run_on_two_ranks(program, folder):
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_readme_program_reduces_over_nvx(root, tmp_path):
    (program,) = blocks(root / "README.md", "python")
    assert run_on_two_ranks(program, tmp_path).count("nvx: [2.0, 2.0, 2.0, 2.0]") == 2


def test_the_example_trains_over_nvx(root, tmp_path):
    (program,) = blocks(root / "docs" / "getting-started.md", "python")
    assert len(program.strip().splitlines()) <= 25
    loss = float(re.search(r"^nvx: loss ([\d.]+)$", run_on_two_ranks(program, tmp_path), re.MULTILINE)[1])
    assert loss < 1.0  # the loss is near 64 at the start


def test_the_commands_they_name_exist(root):
    from nvx import cli

    makefile = (root / "Makefile").read_text()
    missing = []
    for page in pages(root):
        if page.name in OTHERS | {"CHANGELOG.md"}:
            continue
        text = page.read_text()
        shown = "".join(blocks(page, "sh"))
        named = set(re.findall(r"`nvx (?!is )([a-z]+)", text)) | set(re.findall(r"^nvx ([a-z]+)", shown, re.MULTILINE))
        missing += [f"{page.name}: nvx {name}" for name in named - set(cli.COMMANDS)]
        targets = {"".join(found) for found in re.findall(r"^make ([\w-]+)|`make ([\w-]+)", text, re.MULTILINE)}
        missing += [f"{page.name}: make {name}" for name in targets if not has_target(makefile, name)]
    assert missing == []


def has_target(makefile, name):
    return re.search(rf"^[\w -]*(?<![\w-]){name}(?![\w-])[\w -]*:", makefile, re.MULTILINE)


def anchors(page):
    """The anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_pages_they_link_exist(root):
    missing = []
    for page in pages(root):
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text()):
            target = page.parent / link if link else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append(f"{page.name}: {link}#{anchor}")
    assert missing == []


def test_the_files_they_name_exist(root):
    """In text, tables and diagrams; relative to the root, to csrc, to the results, or to the page."""
    kinds = r"cc|h|cu|py|json|md|cmake|sh"
    missing = []
    for page in (*pages(root), *sorted((root / "csrc").glob("*/README.md"))):
        if page.name in OTHERS or page.name == "CHANGELOG.md":
            continue
        places = (root, root / "csrc", root / "bench" / "results", page.parent)
        for name in re.findall(rf"(?<![\w/.$~-])((?:\w[\w-]*/)+[\w-]+\.(?:{kinds}))(?![\w.])", page.read_text()):
            if not any((place / name).exists() for place in places):
                missing.append(f"{page.relative_to(root)}: {name}")
    assert missing == []


def literals(root):
    """The text of all strings of the sources, with adjacent parts joined."""
    sources = [p for folder in ("csrc", "python", "cmake") for p in (root / folder).rglob("*") if p.is_file()]
    text = "\n".join(p.read_text() for p in (*sources, root / "setup.py") if p.suffix in (".cc", ".h", ".py", ".cmake"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.mark.parametrize("page", ["debugging.md", "install.md"])
def test_the_errors_they_list_exist(root, page):
    foreign = (
        "error: invalid command", "Could NOT find Python", "g++: fatal error", "Unknown backend type",
        "ValueError: Your assigned backend", "Failed to load the backend extension",
    )  # fmt: skip
    known = literals(root)
    rows = re.findall(r"^\| (`[^|]*`) \|", (root / "docs" / page).read_text(), re.MULTILINE)
    errors = [
        e for row in rows for e in re.findall(r"`([^`]+)`", row) if " " in e and not e.startswith(("nvx ", *foreign))
    ]
    assert len(errors) >= 3
    parts = [(error, part.strip(" ,`")) for error in errors for part in re.split(r"\.\.\.|[()\d]+", error)]
    assert [both for both in parts if both[1] not in known] == []


def test_no_page_is_too_long(root):
    """Generated tables aside."""
    made = re.compile(r"<!-- made .*?<!-- end", re.DOTALL)
    lengths = {
        page.name: len(made.sub("", page.read_text()).splitlines()) for page in pages(root) if page.name not in OTHERS
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES.get(name, 150)} == {}
