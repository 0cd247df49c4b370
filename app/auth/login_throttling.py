"""Keys under which wrong passwords are counted: the address, and the name per address.

No one can lock out a user by guessing: the right password from another address is accepted.
"""

import ipaddress

from starlette.requests import Request

from db.names import key_of


def client_of(request: Request, name: str) -> dict[str, str]:
    """Return the keys under which the attempts of this client for this user are counted."""
    address = network_of(request.client.host if request.client else "")
    return {"address": address, "name": f"{address} {key_of(name[:64])}"}


def network_of(address: str) -> str:
    """Return the counted address: for IPv6 the /64, which belongs to one machine."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(parsed) >> 64 << 64, 64)))
