"""A raw TCP socket between two ranks: a reference for small messages between hosts."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

import torch
import torch.distributed as dist

from .peers import Call, Case, Contender, Unsupported, of_cpu_tensors, repeat
from .world import World

_SIOCGIFADDR = 0x8915
CONNECT_S = 10.0


def _own_address() -> str:
    """The address of the interface that the ranks are configured to use; of loopback without configuration."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])


class SocketContender(Contender):
    """One connection, over which both ranks send their message at once, without computation. Both poll, because a
    sleeping rank would pay for its wake-up."""

    exact = False

    def __init__(self, name: str, world: World) -> None:
        super().__init__(name)
        of_cpu_tensors(name, world)
        if world.size != 2:
            raise Unsupported("the socket contender needs exactly 2 ranks")
        self.world = world
        self.socket = self._connect()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)

    def _connect(self) -> socket.socket:
        """Rank 0 listens for one connection, and sends its address over the control group."""
        why_not = ""
        try:
            server = socket.create_server((_own_address(), 0))
        except OSError as error:
            why_not = str(error)
        if why_not := self.world.agreed(why_not):  # before the broadcast, in which both must take part
            raise Unsupported(why_not)
        with server:
            named = [server.getsockname()]
            dist.broadcast_object_list(named, src=0)
            server.settimeout(CONNECT_S)
            try:
                return server.accept()[0] if self.world.rank == 0 else socket.create_connection(named[0], CONNECT_S)
            except OSError as error:
                raise Unsupported(f"{error}: between hosts, GLOO_SOCKET_IFNAME names their interface") from None

    def call(self, case: Case, times: int = 1) -> Call:
        if case.row.name != "all_reduce":
            raise Unsupported("the socket contender measures all_reduce only")
        out = memoryview(case.send.view(torch.uint8).numpy())
        back = memoryview(bytearray(len(out)))
        channel, whole = self.socket, len(out)

        def once() -> None:
            sent = got = 0
            while sent < whole or got < whole:
                try:
                    if sent < whole:
                        sent += channel.send(out[sent:])
                except BlockingIOError:
                    pass
                try:
                    if got < whole:
                        got += channel.recv_into(back[got:])
                except BlockingIOError:
                    pass

        return repeat(once, times)

    def close(self) -> None:
        self.socket.close()
