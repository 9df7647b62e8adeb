"""docs/reference.md matches the docstrings, and they agree with the module."""

import runpy

import nvx


def test_the_page_matches_the_docstrings(root):
    script = runpy.run_path(str(root / "scripts" / "reference.py"))
    assert script["PAGE"].read_text() == script["page"](), "run scripts/reference.py"


def test_the_page_has_every_public_name(root):
    page = (root / "docs" / "reference.md").read_text()
    shown = {line.partition("(")[0].strip("#` ").removeprefix("nvx.") for line in page.splitlines() if "###" in line}
    assert shown == set(nvx.__all__) - {"__version__"} | {"torchft.ProcessGroupNVX"}


def test_the_stub_describes_options_as_the_module_does(root):
    script = runpy.run_path(str(root / "scripts" / "reference.py"))
    stub = script["named"](script["tree"]("_C.pyi"), script["ast"].ClassDef)["Options"]
    assert script["ast"].get_docstring(stub).split() == nvx.Options.__doc__.split()
