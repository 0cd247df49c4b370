"""E-mail through the SMTP server of HALFSTEP_SMTP_URL; its URL and password are never shown."""

import smtplib
import ssl
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from urllib.parse import unquote, urlsplit

from db.errors import Invalid
from db.settings import Settings

SECONDS = 15.0
SUBJECT_CHARACTERS = 150


@dataclass(frozen=True)
class SmtpServer:
    """The SMTP server of HALFSTEP_SMTP_URL."""

    host: str
    port: int
    user: str
    password: str
    is_tls: bool  # implicit TLS; else STARTTLS if available


def smtp_server(settings: Settings) -> SmtpServer | None:
    """Parse HALFSTEP_SMTP_URL; None if it is empty. Raises Invalid, without the password."""
    text = settings.smtp_url.get_secret_value()
    if not text:
        return None
    try:
        parts = urlsplit(text)
        is_tls = parts.scheme == "smtps"
        port = parts.port or (465 if is_tls else 587)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("smtp", "smtps"):
        raise Invalid({"HALFSTEP_SMTP_URL": "allowed: smtp:// or smtps://user:password@host:port"})
    return SmtpServer(
        host, port, unquote(parts.username or ""), unquote(parts.password or ""), is_tls
    )


def send(settings: Settings, to: str, text: str, link: str) -> str:
    """Send a message and return the server's response. Raises OSError, Invalid.

    A password is sent only over TLS.
    """
    server = smtp_server(settings)
    if server is None:
        raise Invalid({"HALFSTEP_SMTP_URL": "not set: this server cannot send e-mail"})
    context = ssl.create_default_context()
    client: smtplib.SMTP
    if server.is_tls:
        client = smtplib.SMTP_SSL(server.host, server.port, timeout=SECONDS, context=context)
    else:
        client = smtplib.SMTP(server.host, server.port, timeout=SECONDS)
    with client:
        client.ehlo_or_helo_if_needed()
        if not server.is_tls and client.has_extn("starttls"):
            client.starttls(context=context)
        elif not server.is_tls and server.password:
            raise smtplib.SMTPNotSupportedError(
                "the mail server offers no TLS, which is required to send a password"
            )
        if server.user:
            client.login(server.user, server.password)
        sender = settings.smtp_from or f"halfstep@{server.host}"
        client.send_message(_message(sender, to, text, link), sender, [to])
    return "250 accepted by the mail server"


def _message(sender: str, to: str, text: str, link: str) -> EmailMessage:
    message = EmailMessage()
    message["From"], message["To"] = sender, to
    line = "".join(c if c.isprintable() else " " for c in text)
    message["Subject"] = f"[Halfstep] {line[:SUBJECT_CHARACTERS]}"
    message["Date"], message["Message-ID"] = formatdate(), make_msgid(domain="halfstep.invalid")
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"{text}\n\n{link}\n\nYour rules: {link.split('/runs/')[0]}/alerts\n")
    return message
