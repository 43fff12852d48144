"""The address by which other hosts reach this one, and the interface that leads to another."""

import fcntl
import ipaddress
import socket
import struct

LOOPBACK = "lo"
"""Linux's name of the interface that no other host reaches."""
LOOPBACK_ADDRESS = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""
_SOMEWHERE = "192.0.2.1"
"""Reserved for documentation: nothing answers there, and nothing is sent."""


def network_address() -> str:
    """IPv4 address of this host. Its loopback address where it has no network.

    A host name is no address for others: many systems map their own name to the loopback interface.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    except OSError:
        found = []
    outside = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    return outside[0] if outside else source_address(_SOMEWHERE)


def source_address(target: str) -> str:
    """Address of this host's interface that leads to ``target``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:  # no route: a machine without a network
            return LOOPBACK_ADDRESS
        return str(probe.getsockname()[0])


def interface_towards(target: str) -> str:
    """Name of this host's interface that leads to the address ``target``; "" where there is none."""
    address = source_address(target)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
