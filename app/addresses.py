"""Where alerts may go: not into the server's own network, unless its operator says so.

A name is resolved once, every address that it has is judged, and the connection goes to one that
was judged: a name that resolves to another address a moment later leads nowhere.
"""

import asyncio
import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Azure's address for its machines' own metadata, which is among the public ones.
METADATA = (ipaddress.ip_address("168.63.129.16"),)
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Forbidden(Exception):
    """An address within the server's own network."""


async def resolved(host: str, port: int, *, private: bool) -> str:
    """Return the address to connect to. private: the operator allows the server's own network.

    Raises Forbidden, and OSError if the name does not resolve.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]).partition("%")[0] for each in found]
    if not private:
        for each in addresses:
            if not is_public(each):
                raise Forbidden(f"{host} is {each}, within the server's own network")
    return addresses[0]


def is_public(text: str) -> bool:
    """Tell whether an address is one of the Internet's, whatever it is wrapped in."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address.teredo:
            return False
        if address in NAT64 or int(address) >> 32 == 0:  # the latter: IPv4-compatible
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast and address not in METADATA
