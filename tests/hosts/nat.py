"""Two hosts, the second behind address translation: its packets arrive from another address, and it cannot be reached
at its own address.

    python -m tests.hosts.nat host0 host1
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import sys

from tests.hosts.lossy_link import LossyHosts, open_tun

SEEN_AS = "10.77.0.200"
_OWN, _SEEN = bytes([10, 77, 0, 2]), bytes([10, 77, 0, 200])
_TCP = 6


class TranslatedHosts(LossyHosts):
    """As Hosts, of two; 10.77.0.2 is seen as 10.77.0.200."""

    program = "tests.hosts.nat"


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def rewritten(packet: bytes, at: int, address: bytes) -> bytes:
    """With another address at that place in the header, and the checksums of IP and TCP made anew."""
    length = (packet[0] & 15) * 4
    header, body = bytearray(packet[:length]), bytearray(packet[length:])
    header[at : at + 4] = address
    header[10:12] = body[16:18] = b"\0\0"
    header[10:12] = struct.pack("!H", checksum(bytes(header)))
    pseudo = bytes(header[12:20]) + struct.pack("!HH", _TCP, len(body))
    body[16:18] = struct.pack("!H", checksum(pseudo + bytes(body)))
    return bytes(header + body)


def translate(tuns: list[int]) -> None:
    while True:
        for source in select.select(tuns, [], [])[0]:
            packet = os.read(source, 65536)
            if packet[0] >> 4 != 4 or packet[9] != _TCP:
                continue
            if source == tuns[1]:
                packet = rewritten(packet, 12, _SEEN)
            elif packet[16:20] == _SEEN:
                packet = rewritten(packet, 16, _OWN)
            else:
                continue
            with contextlib.suppress(OSError):
                os.write(tuns[1 - tuns.index(source)], packet)


if __name__ == "__main__":
    ends = [open_tun(name) for name in sys.argv[1:3]]
    print("ready", flush=True)
    translate(ends)
