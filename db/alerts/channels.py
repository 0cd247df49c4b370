"""Channels: the addresses to which a user's alerts are delivered.

Addresses are encrypted like secrets: anyone who knows the URL of a webhook can write to it.
"""

import json
import re
import secrets as tokens
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import delete as delete_from
from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from db.access import secrets
from db.errors import Invalid, NotFound
from db.names import first_invisible
from db.tables import Channel, Delivery, User

WEBHOOK, SLACK, EMAIL = KINDS = ("webhook", "slack", "email")
#: Limit per user.
MOST = 20
NAME_CHARACTERS = 100
ADDRESS_CHARACTERS = 2000
#: One plain address: a display name, a list or a line break could inject headers, and a domain
#: that ends in a number is an IPv4 address.
EMAIL_ADDRESS = re.compile(
    r"[^\s@<>,;:\"()\[\]\\]{1,64}@[A-Za-z0-9.-]{1,250}\.(?!\d+\Z)[A-Za-z0-9-]{2,}"
)


@dataclass(frozen=True)
class ChannelAddress:
    """Address of a channel (URL or e-mail) and, for a webhook, its signing secret."""

    kind: str
    address: str
    secret: str = ""


def list_channels(session: Session, user: User) -> list[Channel]:
    """List a user's channels by name."""
    query = select(Channel).where(Channel.user_id == user.id)
    return list(session.scalars(query.order_by(Channel.name, Channel.id).limit(MOST)))


def make(
    session: Session,
    key_file: Path,
    user: User,
    *,
    kind: str,
    name: str,
    address: str,
    forbidden: str = "",
) -> tuple[Channel, str]:
    """Create a channel; return it and a webhook's secret, which is shown only once.

    forbidden: why the address is not allowed for alerts. Raises Invalid.
    """
    name, address = name.strip(), address.strip()
    wrong = _mistakes(kind, name, address)
    if forbidden and kind != EMAIL:
        wrong.setdefault("address", forbidden)
    if wrong:
        raise Invalid(wrong)
    session.execute(select(User.id).where(User.id == user.id).with_for_update(key_share=True))
    count = select(func.count(Channel.id)).where(Channel.user_id == user.id)
    if (session.scalar(count) or 0) >= MOST:
        raise Invalid({"name": f"you have {MOST} channels, the maximum; delete some first"})
    target = address if kind == EMAIL else urlsplit(address).netloc
    name = name or target
    mine_so_called = (Channel.user_id == user.id, Channel.name == name)
    if session.scalar(select(exists().where(*mine_so_called))):
        raise Invalid({"name": f"{name!r} is already one of your channels; use another name"})
    secret = f"hs_webhook_{tokens.token_urlsafe(32)}" if kind == WEBHOOK else ""
    content = json.dumps({"address": address, "secret": secret})
    row = Channel(user_id=user.id, kind=kind, name=name, target=target)
    row.ciphertext = secrets.encrypt(key_file, content)
    session.add(row)
    session.flush()
    return row, secret


def decrypt_address(key_file: Path, channel: Channel) -> ChannelAddress:
    """Return the decrypted address of a channel. Raises secrets.Unreadable."""
    return ChannelAddress(channel.kind, **json.loads(secrets.decrypt(key_file, channel.ciphertext)))


def switch(session: Session, user: User, channel_id: int, *, is_on: bool) -> Channel:
    """Enable or disable a channel. Alerts to a disabled channel are not delivered."""
    row = mine(session, user, channel_id)
    row.is_on = is_on
    return row


def delete(session: Session, user: User, channel_id: int) -> None:
    """Delete a channel with its deliveries. Raises NotFound."""
    row = mine(session, user, channel_id)
    session.execute(delete_from(Delivery).where(Delivery.channel_id == channel_id))
    session.delete(row)
    session.flush()


def mine(session: Session, user: User, channel_id: int) -> Channel:
    """Return one of a user's channels. Raises NotFound."""
    row = session.get(Channel, channel_id, with_for_update=True)
    if row is None or row.user_id != user.id:
        raise NotFound(f"You have no channel {channel_id}.")
    return row


def _mistakes(kind: str, name: str, address: str) -> dict[str, str]:
    wrong = {}
    if kind not in KINDS:
        wrong["kind"] = f"{kind[:100]!r} is not valid; allowed: {', '.join(KINDS)}"
    if len(name) > NAME_CHARACTERS or first_invisible(name) is not None:
        allowed = f"at most {NAME_CHARACTERS} characters, all visible"
        wrong["name"] = f"it has {len(name):,} characters; allowed: {allowed}"
    if kind == EMAIL and not EMAIL_ADDRESS.fullmatch(address):
        wrong["address"] = f"{address[:100]!r} is not valid; allowed: one address, me@example.com"
    elif kind != EMAIL and (mistake := _url_mistake(address)):
        wrong["address"] = f"{mistake}; allowed: https:// or http://, a host, no user"
    return wrong


def _url_mistake(address: str) -> str:
    """Return the error of a URL without the URL, which may be a secret."""
    if not address:
        return "it is empty"
    if len(address) > ADDRESS_CHARACTERS:
        return f"it has {len(address):,} characters of at most {ADDRESS_CHARACTERS:,}"
    if not address.isascii() or not address.isprintable() or " " in address:
        return "it has characters that a URL cannot have"
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises if it is not a port
    except ValueError:
        return "it is not a URL"
    if parts.scheme not in ("http", "https"):
        return f"its scheme is {parts.scheme[:20]!r}" if parts.scheme else "it has no scheme"
    if not parts.hostname:
        return "it has no host"
    return "it contains a user name" if "@" in parts.netloc else ""
