"""The hosts of a file's tests, and the programs that a test starts on them. Imports wait until a test needs them:
pytest also reads this file where torch is missing."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def namespaces():
    from nvx.bench.hosts import why_no_namespaces

    if why_not := why_no_namespaces():
        (pytest.fail if os.environ.get("NO_SKIPS") else pytest.skip)(why_not)


@pytest.fixture(scope="module")
def hosts(namespaces):
    from tests.hosts.network import Hosts

    with Hosts(2) as made:
        yield made


@pytest.fixture
def cluster(hosts, tmp_path):
    from tests.hosts.world import Cluster

    made = Cluster(hosts, tmp_path)
    yield made
    made.end()
    for host in range(hosts.count):
        hosts.set_link(host, "up")
