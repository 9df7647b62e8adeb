"""Each resource that nvx requests from the kernel runs out once: a named error, and nothing lost. See resources.py."""

import tempfile

import pytest

from tests.nemesis import resources

pytest.importorskip("nvx._C", reason="nvx is not built")

NOT_CALLED = {"fallocate", "eventfd", "epoll_create1", "epoll_ctl"}  # by ranks of one host


@pytest.mark.slow
def test_each_resource_that_runs_out_is_named():
    """Two processes for each call that fails: 10 s on 2 cores."""
    usual, failed, defects = None, {}, []
    with tempfile.TemporaryDirectory() as folder:
        for line in resources.run(resources.FUNCTIONS, resources.build(folder)):
            usual = line["reports"] if line["n"] == 0 else usual
            failed[line["function"]] = line["n"]
            if why := resources.wrong(line, usual):
                defects.append(f"{line['function']} {line['n']}: {why}")
    assert not defects, "\n".join(defects)
    missed = {function for function in resources.FUNCTIONS if failed.get(function, 0) <= 1}
    assert missed <= NOT_CALLED, f"the calls of nvx do not fail: {failed}"
