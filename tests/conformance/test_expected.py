"""The stand-in for a missing expecttest."""

import subprocess
import sys

import pytest

from tests.conformance import expected

PROGRAM = """
import sys
sys.modules["expecttest"] = None
from tests.conformance import expected
expected.stand_in()
from torch.testing._internal import common_distributed, common_utils
assert issubclass(common_distributed.MultiProcessTestCase, expected.TestCase)
assert common_utils.expecttest is expected
"""


def test_torchs_test_utilities_accept_it():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


class Case(expected.TestCase):
    def same(self):
        self.assertExpectedInline("a\nb", "a\nb")
        self.assertExpectedInline(f"a{expected.CPP_STACK} here", "a")

    def different(self):
        self.assertExpectedInline("a\nb", "a\nc")

    def raises(self):
        self.assertExpectedRaisesInline(ValueError, int, "invalid literal for int() with base 10: 'x'", "x")

    def raises_another(self):
        self.assertExpectedRaisesInline(ValueError, int, "something else", "x")

    def raises_nothing(self):
        self.assertExpectedRaisesInline(ValueError, int, "", "1")


@pytest.mark.parametrize(
    ("name", "passes"),
    [("same", True), ("different", False), ("raises", True), ("raises_another", False), ("raises_nothing", False)],
)
def test_it_compares_texts(name, passes):
    assert Case(name).run().wasSuccessful() == passes
