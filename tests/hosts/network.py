"""Hosts as tests need them: with more addresses, routes and interfaces, and a count of what they send."""

from __future__ import annotations

import json
import subprocess

from nvx.bench import hosts
from nvx.bench.hosts import INTERFACE, ip


class Hosts(hosts.Hosts):
    def add_idle_interface(self, name: str) -> None:
        """Gives each host one more interface: it is up, has an address in its own network, and leads nowhere."""
        for host in range(self.count):
            inside = self.name(host)
            ip("link", "add", name, "type", "veth", "peer", "name", f"{name}-far", inside=inside)
            ip("address", "add", f"10.{78 + host}.0.1/24", "dev", name, inside=inside)
            ip("link", "set", name, "up", inside=inside)
            ip("link", "set", f"{name}-far", "up", inside=inside)

    def add_address(self, host: int, address: str) -> None:
        """Adds an address, such as "10.77.0.9/24", to the interface between the hosts."""
        ip("address", "add", address, "dev", INTERFACE, *(["nodad"] if ":" in address else []), inside=self.name(host))

    def route_from(self, host: int, network: str, address: str) -> None:
        """Makes the host use `address`, one of its own, as source of packets to `network`."""
        ip("route", "replace", network, "dev", INTERFACE, "src", address, inside=self.name(host))

    def remove_address(self, host: int, address: str) -> None:
        ip("address", "del", address, "dev", INTERFACE, inside=self.name(host))

    def sent_bytes(self, host: int) -> int:
        """Bytes sent from a host's interface, by the kernel's counter."""
        shown = subprocess.run(
            ["ip", "-n", self.name(host), "-s", "-j", "link", "show", "dev", INTERFACE],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"]
