"""Several hosts on one machine: network namespaces, each with one interface, joined by a bridge.

Needs root and iproute2. Without them the ranks only claim to be on different hosts (`NVX_HOST_ID`), and use the
loopback interface."""

from __future__ import annotations

import ctypes
import glob
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence

INTERFACE = "nvx0"
_NEW_NETWORK, _NEW_MOUNTS = 0x40000000, 0x00020000  # flags of clone(2)
_SLAVE_ALL, _DETACH = 0x4000 | 0x80000, 2  # MS_REC | MS_SLAVE, and MNT_DETACH
LAYOUT = "BENCH_HOSTS"  # gives the ranks the number and the kind of the hosts


def why_no_namespaces() -> str | None:
    """None if this process can make namespaces."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2 (on Debian: apt-get install iproute2)"
    name = f"nvx-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("link", "add", INTERFACE, "type", "veth", "peer", "name", "peer0", inside=name)
    except RuntimeError as error:
        return f"network namespaces cannot be made or joined here: {error}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


def ip(*arguments: str, inside: str | None = None) -> None:
    within = ["-n", inside] if inside else []
    done = subprocess.run(["ip", *within, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join([*within, *arguments])}: {done.stderr.strip()}")


def _remove_orphans() -> None:
    """Removes the namespaces of processes that were killed."""
    for name in glob.glob("nvx-*", root_dir="/run/netns"):
        owner = re.fullmatch(r"nvx-(\d+)-.*", name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


class Hosts:
    """Namespaces host0, host1 ... with addresses 10.77.0.1, 10.77.0.2 ...; removed when the context ends, but not in a
    forked child."""

    _made = itertools.count()

    def __init__(self, count: int) -> None:
        self.count, self.owner = count, os.getpid()
        self.tag = f"nvx-{self.owner}-{next(self._made)}"

    def __enter__(self) -> Hosts:
        _remove_orphans()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self.owner:
            self._remove()

    def name(self, host: int) -> str:
        return f"{self.tag}-{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on that host."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def environment(self) -> dict[str, str]:
        """Variables that make every backend use the interface between the hosts."""
        own = ("NVX_SOCKET_IFNAME", "UCX_NET_DEVICES", "NVX_UCX_NET_DEVICES")  # of the interfaces outside
        names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", *(name for name in own if name in os.environ)]
        return dict.fromkeys(names, INTERFACE)

    def set_link(self, host: int, state: str) -> None:
        """`state`: up or down."""
        ip("link", "set", INTERFACE, state, inside=self.name(host))

    def _make(self) -> None:
        for host in range(self.count):
            ip("netns", "add", self.name(host))
        self._join()
        for host in range(self.count):
            ip("address", "add", f"{self.address(host)}/24", "dev", INTERFACE, inside=self.name(host))
            ip("link", "set", INTERFACE, "up", inside=self.name(host))
            ip("link", "set", "lo", "up", inside=self.name(host))

    def _join(self) -> None:
        """Gives each host its interface: two hosts are joined by a veth pair, more by a bridge."""
        if self.count == 2:
            ip("link", "add", INTERFACE, "type", "veth", "peer", "name", "peer0", inside=self.name(0))
            ip("link", "set", "peer0", "netns", self.name(1), inside=self.name(0))
            ip("link", "set", "peer0", "name", INTERFACE, inside=self.name(1))
            return
        switch = f"{self.tag}-s"
        ip("netns", "add", switch)
        ip("link", "add", "bridge0", "type", "bridge", inside=switch)
        ip("link", "set", "bridge0", "up", inside=switch)
        for host in range(self.count):
            port = f"port{host}"
            ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, inside=switch)
            ip("link", "set", INTERFACE, "netns", self.name(host), inside=switch)
            ip("link", "set", port, "master", "bridge0", "up", inside=switch)

    def _remove(self) -> None:
        for name in [*(self.name(host) for host in range(self.count)), f"{self.tag}-s"]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def enter(name: str) -> None:
    """Moves this process to a namespace, which makes it a rank of that host. Existing threads stay behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")
    # Remounts /sys, as `ip netns exec` does: UCX looks there for this host's interfaces.
    if libc.unshare(_NEW_MOUNTS) == 0 and libc.mount(b"none", b"/", None, _SLAVE_ALL, None) == 0:
        libc.umount2(b"/sys", _DETACH)
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)


def host_of(rank: int, ranks: int, hosts: int) -> int:
    """Ranks fill one host after the other."""
    return rank * hosts // ranks


def layout() -> str:
    """In a rank: the layout of the ranks on hosts, as text; empty if they are on one host, or MPI started them."""
    count, _, kind = os.environ.get(LAYOUT, "").partition(" ")
    if not count:
        here, all_ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
        return " on several hosts" if here and here != all_ranks else ""
    joined = "in network namespaces joined by veth" if kind == "namespaces" else "of NVX_HOST_ID, joined by loopback"
    return f" on {count} hosts ({joined})"
