"""Which interface leads to whom, and sockets that listen on that one alone."""

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


def interfaces() -> dict[str, list[str]]:
    """Names of this host's interfaces and their addresses, the first of each first.

    IPv4 comes before IPv6. An IPv4 address with a label of its own (``eth0:1``) is under that.
    """
    found: dict[str, list[str]] = {}
    # The only call that tells all of an interface's IPv4 addresses, not just the first.
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
    # As the kernel lists them for others: global ones before link-local ones.
    for line in sorted(lines, key=lambda line: line.split()[3]):
        packed, *_, name = line.split()
        address6 = str(ipaddress.IPv6Address(bytes.fromhex(packed)))
        found.setdefault(name, []).append(address6)
    return found


def interface_of(address: str) -> str | None:
    """The name of the network interface that has ``address``; None if it can't be found."""
    ip = _ip(address)
    if ip.is_loopback:
        return "lo"
    return next((name for name, has in interfaces().items() if str(ip) in has), None)


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address.partition("%")[0])  # a link-local one names its interface
    return getattr(ip, "ipv4_mapped", None) or ip


def same_address(one: str, other: str) -> bool:
    """Whether two addresses reach the same place, however they are written."""
    first, second = _ip(one), _ip(other)
    return first == second or (first.is_loopback and second.is_loopback)


def route_to(host: str, port: int = 9) -> str:
    """This host's address on the way to ``host``; nothing is sent.

    Raises:
        LaunchError: ``host`` has no address, or no route leads to it.
    """
    return _way_to(host, port)[0]


def way_to(host: str) -> str | None:
    """As :func:`route_to`; None if ``host`` is this one, by its addresses here.

    A host's own name tells nothing of its network: it often stands for 127.0.1.1.
    """
    here, there = _way_to(host, 9)
    return None if here == there or _ip(here).is_loopback else here


def own_address_of(name: str) -> str | None:
    """The address that this host's own ``name`` stands for, if others can reach that."""
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    mine = {address for has in interfaces().values() for address in has}
    usable = (str(address[0]) for *_, address in found)
    return next((a for a in usable if a in mine and not _ip(a).is_loopback), None)


def _way_to(host: str, port: int) -> tuple[str, str]:
    problem: OSError = OSError("no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
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
    """Refuse to listen where the whole internet may reach.

    Raises:
        LaunchError: ``address`` is public, or stands for all of this host's.
    """
    ip = _ip(address)
    if ip.is_unspecified:
        raise LaunchError(
            f"refusing to listen on every interface ({address}): name one address of this host's, "
            f"which has {_own()}"
        )
    if ip.is_global and os.environ.get(ALLOW_PUBLIC) != "1":
        raise LaunchError(
            f"refusing to listen on the public address {address}: whoever reaches it could run "
            f"code here. Use a private network's address, or set {ALLOW_PUBLIC}=1 if a "
            "firewall keeps others out"
        )


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on ``address`` alone.

    Raises:
        LaunchError: the address isn't this host's, is public, or the port is taken.
    """
    check_not_public(address)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # With its scope, where it is a link-local one.
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
            "another process does, of an earlier run perhaps: end that one, or choose another port "
            "(listen=, DISTCOLLECT_LISTEN; under srun MASTER_PORT)"
        )
    if number == errno.EACCES:
        return "choose a port above 1023"
    return f"name one address of this host's, which has {_own()}"


def _own() -> str:
    """This host's addresses that are good for more than one cable."""
    each = ((has, name) for name, all_of_it in interfaces().items() for has in all_of_it)
    return ", ".join(f"{has} ({name})" for has, name in each if not _ip(has).is_link_local)


def is_address(text: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        _ip(text)
    except ValueError:
        return False
    return True
