"""Destinations of alerts: no addresses of the server's own network, unless a setting allows it.

A name is resolved once, all its addresses are checked, and the connection uses a checked address,
so a name that resolves differently a moment later has no effect.
"""

import asyncio
import ipaddress
import socket
from urllib.parse import SplitResult, urlsplit

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Addresses outside the public Internet that `ipaddress` of some supported Python counts as global:
#: Azure's metadata service, and the rest of IANA's special-purpose registries (RFC 6890 and its
#: updates), also what may be reached there, such as relays: no receiver of alerts has one.
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            *("168.63.129.16/32", "192.0.0.0/24", "192.31.196.0/24", "192.52.193.0/24"),
            *("192.88.99.0/24", "192.175.48.0/24"),
            *("2001::/23", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
        ),
    )
)
#: Global unicast (RFC 4291). Outside it are IPv4-mapped, IPv4-compatible, translated (SIIT) and
#: NAT64 addresses, which a network translates to whatever it decides; 2001::/23 has Teredo's and
#: 2002::/16 is 6to4.
UNICAST = ipaddress.IPv6Network("2000::/3")
#: The upper half of an ISATAP interface identifier, in front of the IPv4 address (RFC 5214).
ISATAP = (0x00005EFE, 0x02005EFE)


#: Timeout of a host name's lookup when a channel is created.
RESOLVE_SECONDS = 5.0


class Forbidden(Exception):
    """An address within the server's own network."""


async def resolve(host: str, port: int, *, private: bool) -> str:
    """Return the address to connect to. private: the server's own network is allowed.

    Raises Forbidden, and OSError if the name does not resolve.
    """
    loop = asyncio.get_running_loop()
    rows = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(row[4][0]).partition("%")[0] for row in rows]
    if not private:
        for address in addresses:
            if not is_public(address):
                resolved = f"{host} is {address}," if host != address else f"{host} is"
                raise Forbidden(f"{resolved} within the server's own network")
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
            await resolve(parts.hostname or "", port_of(parts), private=private)
    except Forbidden as error:
        allowed = (
            "a public address, or any if the server is started with "
            "HALFSTEP_ALERTS_ALLOW_PRIVATE_ADDRESSES=yes"
        )
        return f"{error}; allowed: {allowed}"
    except (OSError, ValueError, TimeoutError):
        return ""
    return ""


def is_public(text: str) -> bool:
    """Return whether an address is on the public Internet, and so is an ISATAP one within it."""
    address = ipaddress.ip_address(text)
    is_inside = address.version == 6 and address not in UNICAST
    return not is_inside and all(map(_is_global, (address, *_isatap(address))))


def _isatap(address: Address) -> list[Address]:
    is_one = int(address) >> 32 & 0xFFFFFFFF in ISATAP
    return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)] if is_one else []


def _is_global(address: Address) -> bool:
    is_special = any(address in network for network in NOT_PUBLIC)
    return address.is_global and not address.is_multicast and not is_special
