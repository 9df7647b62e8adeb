"""Strangers at the sockets where ranks listen: they try to write to a rank's memory through UCX, send malformed data or
what looks like a handshake, byte by byte, and keep connections open.

    python -m tests.hosts.stranger <pid of a rank> <its address> <own address, or ""> <file with an address of a tensor>
        [tcp|early|ipc]

`tcp` attacks the TCP ports of the rank, `early` each of them once, as soon as it listens, `ipc` the Unix sockets of
all ranks of this host; without this argument the ports and the Unix sockets are attacked. Starts when something
listens, and runs until SIGTERM. Prints the number of TCP connections that it tried to make and has made, and the number
of connections to Unix sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import sys
import time
from pathlib import Path

MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
PUT = 33
HELLO = struct.pack("<Q", 0x3170637478766E00)  # the first bytes of a handshake with a job key
ESTABLISHED, LISTENS = "01", "0A"
INFO = struct.pack("<Ii120s", 0x6378766E, 1, b"rank 1")  # the first message of a rank at a Unix socket
TOKEN = 14  # bytes before every packet there
MOST_KEPT = 200
SPEAKING = 20  # of those, clients that send
FEW = 20  # connections of which the rank's end is looked for
BURST = 8  # connections to a port between two looks at the clock
LOOK = 0.5  # seconds between two looks at the ports: the kernel's table of thousands of connections is long


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("<BI", kind, len(body)) + body


def put(address: int, data: bytes) -> bytes:
    return MAGIC + message(PUT, struct.pack("<QQI", address, len(data), 1)) + data


def overwriting(memory: Path) -> bytes:
    """A PUT to the tensor. Raises OSError, ValueError while its address is unknown."""
    return put(int(memory.read_text()), struct.pack("<16f", *[666.0] * 16))


def sockets(pid: str, state: str) -> list[list[str]]:
    """Rows of the kernel's tables."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [row.split() for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            found += [row for row in rows if row[3] == state]
    return found


def listening(pid: str) -> list[tuple[str, int]]:
    """Addresses, in hexadecimal digits as the kernel writes them, and ports."""
    return [(address, int(port, 16)) for address, port in (row[1].split(":") for row in sockets(pid, LISTENS))]


def listening_ports(pid: str) -> set[int]:
    return {port for _, port in listening(pid)}


def attacks(chance: random.Random, memory: Path):
    """While the tensor's address is unknown, a PUT goes to an address that the rank does not have."""
    while True:
        with contextlib.suppress(OSError, ValueError):
            yield overwriting(memory)
        yield MAGIC + message(chance.randrange(256), chance.randbytes(chance.randrange(64)))
        yield chance.randbytes(chance.randrange(1, 200))
        yield put(0x1000, b"x" * 64)
        yield HELLO + chance.randbytes(chance.randrange(300))


def ipc_sockets() -> list[str]:
    """The Unix sockets at which ranks of this host listen."""
    rows = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()]
    return ["\0" + row[7][1:] for row in rows if len(row) == 8 and row[3] == "00010000" and row[7].startswith("@nvx-")]


def packets(chance: random.Random):
    """Of clients that do not know the token."""
    while True:
        yield chance.randbytes(TOKEN)  # requests memory
        yield chance.randbytes(TOKEN) + INFO
        yield chance.randbytes(chance.randrange(1, 200))


class Client:
    """`pace`: how many bytes it sends at a time."""

    def __init__(self, family: int, kind: int, own: str, there: object, request: bytes, pace: int) -> None:
        self.socket = socket.socket(family, kind)
        self.socket.setblocking(False)
        self.rest, self.pace = request, pace
        with contextlib.suppress(OSError):
            if own:
                self.socket.bind((own, 0))
            self.socket.connect(there)

    def send_some(self) -> None:
        with contextlib.suppress(OSError):
            self.rest = self.rest[self.socket.send(self.rest[: self.pace]) :] if self.rest else b""

    def leave(self, pid: str = "") -> bool:
        """Whether the rank has let it in. The client's end does not show it: if the listener gets its filter within
        the handshake, that end is connected to nothing. So with a pid, the rank's end is looked for too. An end that
        the rank has closed was connected."""
        with self.socket:
            try:
                self.socket.getpeername()
                state = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                own = f":{self.socket.getsockname()[1]:04X}"
            except OSError:
                return False
            if not pid or state != int(ESTABLISHED, 16):
                return True
            return any(row[2].endswith(own) for row in sockets(pid, ESTABLISHED))


def paced(attacks):
    """Each attack in turn at once, byte by byte, and by a client that sends nothing."""
    for attack, manner in zip(attacks, itertools.cycle((1 << 20, 1, 0)), strict=False):
        yield (attack, manner) if manner else (b"", 1)


def attack(pid: str, there: str, own: str, memory: Path, what: str, ended: list) -> tuple[int, int, int]:
    chance = random.Random(1)
    of_tcp, of_ipc = paced(attacks(chance, memory)), paced(packets(chance))
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    made, visits, kept, ipc_kept = 0, 0, [], []
    tried, ports, look = 0, [], 0.0
    while not ended and os.path.exists(f"/proc/{pid}"):
        if what != "ipc" and time.monotonic() >= look:
            ports = sorted(listening_ports(pid)) * BURST
            look = time.monotonic() + (LOOK if ports else 0)
        for port in ports:
            tried += 1
            kept.append(Client(family, socket.SOCK_STREAM, own, (there, port), *next(of_tcp)))
        for name in ipc_sockets() if what != "tcp" else ():
            visits += 1
            ipc_kept.append(Client(socket.AF_UNIX, socket.SOCK_SEQPACKET, "", name, *next(of_ipc)))
        for client in kept[-SPEAKING:] + ipc_kept[-SPEAKING:]:
            client.send_some()
        for _ in range(len(kept) - MOST_KEPT):
            made += kept.pop(0).leave(pid if made < FEW else "")
        for _ in range(len(ipc_kept) - MOST_KEPT):
            ipc_kept.pop(0).socket.close()
    return tried, made + sum(client.leave(pid if made < FEW else "") for client in kept), visits


def attack_early(pid: str, there: str, memory: Path, ended: list) -> tuple[int, int, int]:
    known, clients = set(), []
    while not ended and os.path.exists(f"/proc/{pid}"):
        for port in listening_ports(pid) - known if memory.exists() else ():
            known.add(port)
            request = overwriting(memory)
            for _ in range(4):
                clients.append(Client(socket.AF_INET, socket.SOCK_STREAM, "", (there, port), request, len(request)))
        for client in clients:
            client.send_some()
        time.sleep(0.01)
    return len(clients), sum(client.leave(pid) for client in clients), 0


def main() -> None:
    pid, there, own, memory, *what = sys.argv[1:]
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    if what == ["early"]:
        print(*attack_early(pid, there, Path(memory), ended))
    else:
        print(*attack(pid, there, own, Path(memory), "".join(what), ended))


if __name__ == "__main__":
    main()
