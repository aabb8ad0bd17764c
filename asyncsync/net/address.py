"""Addresses of this host: the one by which another host reaches it."""

from __future__ import annotations

import ipaddress
import socket

from asyncsync.errors import NotConnected

PORT = 9  # any: nothing is sent
# Addresses that are set aside for documentation: the way there is the default route, and nobody is disturbed.
ANYWHERE = ("192.0.2.1", "2001:db8::1")


def address_towards(host: str) -> str:
    """The address of this host that connections to ``host`` come from, and by which that one reaches this. What is
    given to other hosts must not be ``gethostbyname(gethostname())``, which often is a loopback address.

    Raises NotConnected: there is no such host, or no way there.
    """
    try:
        found = socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise NotConnected(f"host {host!r} is not found: {error}; give its numeric address") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: chooses the way, and sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise NotConnected(f"there is no route to {host!r} ({failure}); is the network up?")


def own_address() -> str:
    """The address of this host on its default route; a loopback address where it has none."""
    for anywhere in ANYWHERE:
        try:
            return address_towards(anywhere)
        except NotConnected:
            continue
    return "127.0.0.1"


def tcp_endpoint(host: str, port: int | str) -> str:
    """An endpoint of ZeroMQ's; addresses of IPv6 get their brackets."""
    try:
        is_wide = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_wide = False
    return f"tcp://[{host}]:{port}" if is_wide else f"tcp://{host}:{port}"
