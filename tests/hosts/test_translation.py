"""A host behind address translation."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from tests.hosts.nat import SEEN_AS, TranslatedHosts
from tests.hosts.test_strangers import both_versions, clustered


def translated(folder):
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("no /dev/net/tun here")
    return clustered(TranslatedHosts(), folder)


@both_versions
def test_it_is_named_with_what_to_set(tmp_path, library):
    with translated(tmp_path) as cluster:
        words = cluster.start("send_first", 2, environment=library, admitted=False).results(60)[1]
        assert "rank 0 (pid" in words, words
        assert f"between {cluster.hosts.address(1)} (nvx0) here and {cluster.hosts.address(0)} (nvx0) there" in words, (
            words
        )
        assert "set NVX_ALLOW_FROM there" in words, words
        assert "tried to connect" in (tmp_path / "rank0.log").read_text()


@both_versions
def test_it_is_admitted_by_the_variable(tmp_path, library):
    with translated(tmp_path) as cluster:
        cluster.start("send_first", 2, environment={**library, "NVX_ALLOW_FROM": SEEN_AS}, admitted=True)
        assert cluster.results() == ["good", "good"]
