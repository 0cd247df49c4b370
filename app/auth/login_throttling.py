"""Keys under which wrong passwords are counted: the address, and the name per address.

Nobody can keep another out by guessing at a name, as a right password from an address that did not
guess is let in.
"""

import ipaddress

from starlette.requests import Request

from db.names import key_of


def client_of(request: Request, name: str) -> dict[str, str]:
    """Return by what the tries of this client for this user are counted."""
    address = network_of(request.client.host if request.client else "")
    return {"address": address, "name": f"{address} {key_of(name[:64])}"}


def network_of(address: str) -> str:
    """Return an address as it is counted: of IPv6 the /64, all of which one machine has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
