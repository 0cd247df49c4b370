"""Destinations of alerts: no addresses of the server's own network, unless a setting allows it.

A name is resolved once, all its addresses are checked, and the connection uses a checked address,
so a name that resolves differently a moment later has no effect.
"""

import asyncio
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Ranges outside the public Internet that `ipaddress` of some supported Python counts as global:
#: Azure's metadata service, and rows of IANA's special-purpose registries (RFC 6890 and updates).
#: IPv4-mapped, translated (SIIT) and NAT64 addresses are private whatever they contain: a network
#: decides by itself where it translates them to.
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24"),
            *("::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96"),
            *("64:ff9b:1::/48", "100::/64", "100:0:0:1::/64", "2001::/23", "3fff::/20"),
            *("5f00::/16", "fec0::/10"),
        ),
    )
)
#: IPv6 prefixes of addresses that embed an IPv4 address, and the number of bits after it:
#: IPv4-compatible and 6to4.
EMBEDDING = ((ipaddress.IPv6Network("::/96"), 0), (ipaddress.IPv6Network("2002::/16"), 80))
#: The upper half of an ISATAP interface identifier, in front of the IPv4 address (RFC 5214).
ISATAP = (0x00005EFE, 0x02005EFE)


#: Timeout of a host name's lookup when a channel is created.
RESOLVE_SECONDS = 5.0


class Forbidden(Exception):
    """An address within the server's own network."""


async def resolved(host: str, port: int, *, private: bool) -> str:
    """Return the address to connect to. private: the server's own network is allowed.

    Raises Forbidden, and OSError if the name does not resolve.
    """
    loop = asyncio.get_running_loop()
    rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(row[4][0]).partition("%")[0] for row in rows]
    if not private:
        for address in addresses:
            if not is_public(address):
                raise Forbidden(f"{host} is {address}, within the server's own network")
    return addresses[0]


def port_of(url: SplitResult) -> int:
    """Return the port of a URL."""
    return url.port or (443 if url.scheme == "https" else 80)


async def forbidden(url: str, *, private: bool) -> str:
    """Return why a URL is refused; empty if it is allowed, or its host does not resolve now.

    Each delivery checks again, since the name may resolve differently by then.
    """
    try:
        parts = urlsplit(url)
        async with asyncio.timeout(RESOLVE_SECONDS):
            await resolved(parts.hostname or "", port_of(parts), private=private)
    except Forbidden as error:
        allowed = "a public address, or any with HALFSTEP_ALERTS_ALLOW_PRIVATE_ADDRESSES=yes"
        return f"{error}; allowed: {allowed}"
    except (OSError, ValueError, TimeoutError):
        return ""
    return ""


def is_public(text: str) -> bool:
    """Return whether an address is on the public Internet, and so is an IPv4 address within it."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if any(not _is_global(embedded) for embedded in _isatap(address)):
            return False
        for prefix, shift in EMBEDDING:
            if address in prefix:
                return _is_global(ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF))
    return _is_global(address)


def _isatap(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    is_one = int(address) >> 32 & 0xFFFFFFFF in ISATAP
    return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)] if is_one else []


def _is_global(address: Address) -> bool:
    is_special = any(
        address.version == network.version and address in network for network in NOT_PUBLIC
    )
    return address.is_global and not address.is_multicast and not is_special
