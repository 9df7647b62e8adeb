"""Each resource that nvx requests from the kernel runs out once: a named error, and nothing lost. See resources.py."""

import tempfile

import pytest

from tests.nemesis import resources

_C = pytest.importorskip("nvx._C", reason="nvx is not built")

NOT_CALLED = {  # by ranks of so many hosts
    1: {"fallocate", "eventfd", "epoll_create1", "epoll_ctl"},
    2: {"fallocate", "sendmsg", "recvmsg", "epoll_create1", "epoll_ctl", "pidfd_open"},
}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", NOT_CALLED)
def test_each_resource_that_runs_out_is_named(hosts):
    """Two processes for each call that fails: 10 s on 2 cores."""
    if hosts > 1 and not _C.build_info()["ucx"]:
        pytest.skip("this nvx was built without UCX")
    usual, failed, defects = None, {}, []
    with tempfile.TemporaryDirectory() as folder:
        for line in resources.run(resources.FUNCTIONS, resources.build(folder), hosts):
            usual = line["reports"] if line["n"] == 0 else usual
            failed[line["function"]] = line["n"]
            if why := resources.wrong(line, usual):
                defects.append(f"{line['function']} {line['n']}: {why}")
    assert not defects, "\n".join(defects)
    missed = {function for function in resources.FUNCTIONS if failed.get(function, 0) <= 1}
    assert missed <= NOT_CALLED[hosts], f"the calls of nvx do not fail: {failed}"
