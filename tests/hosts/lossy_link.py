"""Two hosts joined by a program that carries packets between them, and may drop, delay or stop them. It replaces
`tc netem` on kernels without it.

    python -m tests.hosts.lossy_link host0 host1 loss jitter_ms      (SIGUSR1: silence from now on; SIGUSR2: its end)
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

from nvx.bench.hosts import INTERFACE, enter

from tests.hosts.network import Hosts

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class LossyHosts(Hosts):
    """As Hosts, of two; with this program between them instead of a veth pair."""

    program = "tests.hosts.lossy_link"

    def __init__(self, loss: float = 0.0, jitter_ms: float = 0.0) -> None:
        super().__init__(2)
        self.relay = None
        self.manner = (str(loss), str(jitter_ms))

    def fall_silent(self) -> None:
        self.relay.send_signal(signal.SIGUSR1)

    def end_silence(self) -> None:
        self.relay.send_signal(signal.SIGUSR2)

    def _join(self) -> None:
        names = [self.name(host) for host in range(self.count)]
        command = [sys.executable, "-m", self.program, *names, *self.manner]
        self.relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.relay.stdout.readline() == b"ready\n"

    def _remove(self) -> None:
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
            self.relay.stdout.close()
        super()._remove()


def open_tun(namespace: str) -> int:
    enter(namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH14x", INTERFACE.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def carry(tuns: list[int], loss: float, jitter: float) -> None:
    """Packets keep their order where there is no jitter."""
    silent = []
    signal.signal(signal.SIGUSR1, lambda *_: silent.append(True))
    signal.signal(signal.SIGUSR2, lambda *_: silent.clear())
    chance, late, count = random.Random(1), [], 0
    while True:
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, _, to, packet = heapq.heappop(late)
            try:
                os.write(to, packet)
            except OSError:
                pass  # the interface is full or going: a packet may be lost
        wait = None if not late else max(0.0, late[0][0] - now)
        for source in select.select(tuns, [], [], wait)[0]:
            packet = os.read(source, 65536)
            if silent or chance.random() < loss:
                continue
            count += 1
            to = tuns[1 - tuns.index(source)]
            heapq.heappush(late, (time.monotonic() + chance.random() * jitter, count, to, packet))


if __name__ == "__main__":
    ends = [open_tun(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    carry(ends, float(sys.argv[3]), float(sys.argv[4]) / 1000)
