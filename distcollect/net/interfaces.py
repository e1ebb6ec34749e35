"""This host's network interfaces, routes to other hosts, and sockets that listen on one address."""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from distcollect.errors import LaunchError

LOOPBACK = "127.0.0.1"
ALLOW_PUBLIC = "DISTCOLLECT_ALLOW_PUBLIC"
_SIOCGIFCONF = 0x8912  # linux/sockios.h
_IFREQ = struct.Struct("16s24s")
_MAX_IPV4 = 1024
_ANY_PORT = 9  # nothing is sent to it


def interfaces() -> dict[str, list[str]]:
    """Map this host's interfaces to the addresses of each, its primary address first.

    IPv4 comes before IPv6. An IPv4 address with its own label (``eth0:1``) is under that label.
    """
    found: dict[str, list[str]] = {}
    # This is the only call that returns all of an interface's IPv4 addresses, not just one.
    space = array.array("B", bytes(_IFREQ.size * _MAX_IPV4))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(space), space.buffer_info()[0])
        (length, _) = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for name, address in _IFREQ.iter_unpack(space.tobytes()[:length]):
        found.setdefault(name.rstrip(b"\0").decode(), []).append(socket.inet_ntoa(address[4:8]))
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        lines = []
    # Global addresses before link-local ones.
    for line in sorted(lines, key=lambda line: line.split()[3]):
        packed, *_, name = line.split()
        address6 = str(ipaddress.IPv6Address(bytes.fromhex(packed)))
        found.setdefault(name, []).append(address6)
    return found


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has ``address``; None if there is none."""
    ip = _ip(address)
    if ip.is_loopback:
        return "lo"
    return next((name for name, addresses in interfaces().items() if str(ip) in addresses), None)


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])  # a link-local one names its interface
    return getattr(ip, "ipv4_mapped", None) or ip


def is_loopback(address: str) -> bool:
    """Return True if only processes of this host reach ``address``."""
    return _ip(address).is_loopback


def same_address(one: str, other: str) -> bool:
    """Return True if two addresses reach the same place, however they are written."""
    first, second = _ip(one), _ip(other)
    return first == second or (first.is_loopback and second.is_loopback)


def route_to(host: str) -> str:
    """Return this host's address on the route to ``host``; nothing is sent.

    Raises:
        LaunchError: ``host`` has no address, or no route leads to it.
    """
    return _route(host)[0]


def address_towards(host: str) -> str | None:
    """Do as :func:`route_to`, but return None if ``host`` is this host.

    A host's own name says nothing about its network: it often stands for 127.0.1.1.
    """
    here, there = _route(host)
    return None if here == there or _ip(here).is_loopback else here


def own_address_of(name: str) -> str | None:
    """Return the address that this host's ``name`` stands for, if other hosts can reach it."""
    try:
        found = socket.getaddrinfo(name, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    mine = {address for addresses in interfaces().values() for address in addresses}
    usable = (str(address[0]) for *_, address in found)
    return next((a for a in usable if a in mine and not _ip(a).is_loopback), None)


def _route(host: str) -> tuple[str, str]:
    problem: OSError = OSError("no address")
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        found, problem = [], error
    for family, kind, proto, _, address in found:
        with socket.socket(family, kind, proto) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                problem = error
                continue
            return str(probe.getsockname()[0]), str(address[0])
    raise LaunchError(
        f"no route to {host!r} ({problem}); check the name, or set MASTER_ADDR to an address "
        "that every host can reach"
    ) from problem


def check_not_public(address: str) -> None:
    """Refuse an address that the whole internet may reach.

    Raises:
        LaunchError: ``address`` is public, or stands for all of this host's addresses.
    """
    ip = _ip(address)
    if ip.is_unspecified:
        raise LaunchError(
            f"refusing to listen on every interface ({address}): name one address of this host; "
            f"it has {_own()}"
        )
    if ip.is_global and os.environ.get(ALLOW_PUBLIC) != "1":
        raise LaunchError(
            f"refusing to listen on the public address {address}: everyone who reaches it could "
            f"run code here. Use a private network's address, or set {ALLOW_PUBLIC}=1 if a "
            "firewall protects it"
        )


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on ``address`` alone.

    Raises:
        LaunchError: this host does not have the address, it is public, or the port is taken.
    """
    check_not_public(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # getaddrinfo adds the scope of a link-local address.
        info = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)
        listener.bind(info[0][4])
        listener.listen(1024)
    except OSError as error:
        listener.close()
        why = f"can't listen on {address} port {port}: {error.strerror}"
        raise LaunchError(f"{why}; {_remedy(error.errno)}") from error
    return listener


def _remedy(number: int | None) -> str:
    if number == errno.EADDRINUSE:
        return (
            "another process does, perhaps of an earlier run, or another collector of this one: "
            "end it, or choose another port (listen=, DISTCOLLECT_LISTEN; under srun MASTER_PORT)"
        )
    if number == errno.EACCES:
        return "choose a port above 1023"
    return f"name one address of this host; it has {_own()}"


def _own() -> str:
    """List this host's addresses but for link-local ones, in words."""
    each = ((address, name) for name, found in interfaces().items() for address in found)
    return ", ".join(
        f"{address} ({name})" for address, name in each if not _ip(address).is_link_local
    )


def is_address(text: str) -> bool:
    """Return True if ``text`` is an IP address, not a name."""
    try:
        _ip(text)
    except ValueError:
        return False
    return True
