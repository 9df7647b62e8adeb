"""A stranger at the port where a rank accepts TCP connections: it tries to write to the rank's memory through UCX,
sends malformed data, and keeps connections open.

    python -m tests.hosts.stranger <pid of a rank> <its address> <own address, or ""> <file with an address of a tensor>

Starts when the rank listens, and runs until SIGTERM. Prints the number of connections that it tried to make, and has
made."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import sys
from pathlib import Path

MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
PUT = 33
GREETING = struct.pack("<Q", 0x316370747876_6E00)  # the first bytes of a handshake with a job key
LISTENS = "0A"
MOST_KEPT = 500


def message(kind: int, body: bytes) -> bytes:
    return struct.pack("<BI", kind, len(body)) + body


def put(address: int, data: bytes) -> bytes:
    return MAGIC + message(PUT, struct.pack("<QQI", address, len(data), 1)) + data


def listening(pid: str) -> list[tuple[str, int]]:
    """Addresses, in hexadecimal digits as the kernel writes them, and ports."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [row.split() for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            found += [row[1].split(":") for row in rows if row[3] == LISTENS]
    return [(address, int(port, 16)) for address, port in found]


def listening_ports(pid: str) -> set[int]:
    return {port for _, port in listening(pid)}


def attacks(chance: random.Random, memory: Path):
    """Without an address in the rank's memory, a PUT goes to one that it has not."""
    while True:
        with contextlib.suppress(OSError, ValueError):
            yield put(int(memory.read_text()), struct.pack("<16f", *[666.0] * 16))
        yield MAGIC + message(chance.randrange(256), chance.randbytes(chance.randrange(64)))
        yield chance.randbytes(chance.randrange(1, 200))
        yield put(0x1000, b"x" * 64)
        yield GREETING + chance.randbytes(chance.randrange(300))


def connect(own: str, there: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in there else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        if own:
            connection.bind((own, 0))
        connection.settimeout(0.1)
        connection.connect((there, port))
    except OSError:
        connection.close()
        return None
    return connection


def main() -> None:
    pid, there, own, memory = sys.argv[1:]
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    tried, made, kept = 0, 0, []
    for attack in attacks(random.Random(1), Path(memory)):
        while not (ports := listening_ports(pid)) and not ended:
            pass
        if ended or not os.path.exists(f"/proc/{pid}"):
            break
        for port in ports:
            tried += 1
            if connection := connect(own, there, port):
                made += 1
                kept.append(connection)
                if len(kept) > MOST_KEPT:
                    kept.pop(0).close()
                with contextlib.suppress(OSError):
                    connection.sendall(attack)
    print(tried, made)


if __name__ == "__main__":
    main()
