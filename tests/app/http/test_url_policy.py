"""Addresses to which alerts may be sent: the public Internet."""

from ipaddress import IPv4Address, IPv6Address, ip_network

from app.http.url_policy import is_public
from tests.marks import looped

#: IANA's IPv4 and IPv6 Special-Purpose Address Registries, whole.
SPECIAL = [
    *("0.0.0.0/8", "0.0.0.0/32", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.0.0/29", "192.0.0.8/32", "192.0.0.9/32"),
    *("192.0.0.10/32", "192.0.0.170/32", "192.0.0.171/32", "192.0.2.0/24", "192.31.196.0/24"),
    *("192.52.193.0/24", "192.88.99.0/24", "192.88.99.2/32", "192.168.0.0/16", "192.175.48.0/24"),
    *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4", "255.255.255.255/32"),
    *("::1/128", "::/128", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64"),
    *("100:0:0:1::/64", "2001::/23", "2001::/32", "2001:1::1/128", "2001:1::2/128"),
    *("2001:1::3/128", "2001:2::/48", "2001:3::/32", "2001:4:112::/48", "2001:10::/28"),
    *("2001:20::/28", "2001:30::/28", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48"),
    *("3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10"),
]
#: Others that are not of the public Internet: multicast, site-local, not assigned, Azure's.
OTHERS = [
    *("224.0.0.0/4", "168.63.129.16/32", "ff00::/8", "fec0::/10", "::/96", "::ffff:0:0:0/96"),
    *("400::/6", "800::/5", "1000::/4", "4000::/2", "8000::/1"),
]
#: Within the server's own network, or outside the public Internet.
PRIVATE = ["127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "100.100.100.200", "0.0.0.0"]
PUBLIC = ["8.8.8.8", "1.1.1.1"]


def _embedding(text: str) -> list[str]:
    """Return IPv6 addresses that contain an IPv4 address, one for each way of embedding."""
    number = int(IPv4Address(text))
    return [
        str(IPv6Address(value))
        for value in (
            number,  # IPv4-compatible
            0xFFFF << 32 | number,  # IPv4-mapped
            0xFFFF << 48 | number,  # SIIT
            0x64FF9B << 96 | number,  # NAT64
            0x64FF9B0001 << 80 | number,  # NAT64 of a local prefix
            0x2002 << 112 | number << 80,  # 6to4
            0x20010000 << 96 | number << 64,  # Teredo, its server
            0x20010000 << 96 | number ^ 0xFFFFFFFF,  # Teredo, its client
        )
    ]


@looped("text", [*SPECIAL, *OTHERS])
def test_a_special_range_is_not_public(text: str) -> None:
    """The first, a middle and the last address of each special range are not public."""
    network = ip_network(text)
    for address in (network[0], network[network.num_addresses // 2], network[-1]):
        assert not is_public(str(address)), address


@looped("text", [*PRIVATE, *PUBLIC])
def test_an_address_within_another_is_not_public(text: str) -> None:
    """An IPv6 address with an embedded IPv4 address is not public, since networks may route it."""
    for address in _embedding(text):
        assert not is_public(address), address


@looped("text", PRIVATE)
@looped("prefix", ["2606:4700::5efe", "2606:4700::200:5efe"])
def test_an_isatap_address_is_as_public_as_the_one_within(prefix: str, text: str) -> None:
    """An ISATAP address is as public as the embedded address, to which RFC 5214 routes the
    packet.
    """
    assert not is_public(f"{prefix}:{text}")
    assert is_public(f"{prefix}:8.8.8.8")


@looped(
    "address",
    [
        *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0"),
        *("126.255.255.255", "128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255"),
        *("172.32.0.0", "192.0.1.1", "192.0.3.0", "192.167.255.255", "192.169.0.0"),
        *("198.17.255.255", "198.20.0.0", "203.0.112.255", "203.0.114.0", "223.255.255.255"),
        *("168.63.129.15", "168.63.129.17"),
        *("2001:200::1", "2001:4860:4860::8888", "2001:db7:ffff::1", "2001:db9::1", "2003::1"),
        *("2606:4700::1111", "2620:4f:7fff::1", "2620:4f:8001::1", "2a00:1450::1", "3ffe::1"),
    ],
)
def test_addresses_beside_special_ranges_are_public(address: str) -> None:
    """Addresses next to a special range are public."""
    assert is_public(address)
