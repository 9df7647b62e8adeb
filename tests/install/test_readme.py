"""What the README shows, runs."""

import re
import subprocess
import sys


def blocks(root, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_trains_over_nvx(root, tmp_path):
    (program,) = blocks(root, "python")
    assert len(program.strip().splitlines()) <= 25
    (tmp_path / "train.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    loss = float(re.search(r"^nvx: loss ([\d.]+)$", ended.stdout, re.MULTILINE)[1])
    assert loss < 1.0  # it starts near 64


def test_the_commands_it_names_exist(root):
    from nvx import cli

    text = (root / "README.md").read_text()
    assert set(re.findall(r"\bnvx (doctor|bench|explain|env|demo|topo)\b", text)) <= set(cli.commands())
    makefile = (root / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^[\w -]*\b{target}\b[\w -]*:", makefile, re.MULTILINE), target


def test_the_pages_it_links_exist(root):
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
