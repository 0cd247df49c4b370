"""One attempt of a delivery: a signed POST, a POST to Slack's incoming webhooks, or an e-mail.

An attempt has a timeout of fifteen seconds, and reads only the part of the response that pages
show. Redirects are not followed.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import smtplib
import ssl
import time
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx2

from app.alerts import smtp
from app.http.url_policy import Forbidden, port_of, resolve
from db.alerts.channels import EMAIL, SLACK, ChannelAddress
from db.alerts.deliveries import ANSWER_CHARACTERS, Outcome
from db.errors import Invalid
from db.settings import Settings
from halfstep.number_formats import duration

# At level INFO it logs whole URLs.
logging.getLogger("httpx2").setLevel(logging.WARNING)

SECONDS = 15.0
#: Bytes read of a response; a page shows fewer.
ANSWER_BYTES = 4 * ANSWER_CHARACTERS


async def deliver(
    settings: Settings, target: ChannelAddress, delivery_id: int, body: str
) -> Outcome:
    """Attempt a delivery; errors are part of the outcome, without secrets."""
    try:
        async with asyncio.timeout(SECONDS):
            if target.kind == EMAIL:
                content = json.loads(body)
                answer = await asyncio.to_thread(
                    smtp.send, settings, target.address, content["text"], _link(content)
                )
                return Outcome(True, answer)
            return await _post(settings, target, delivery_id, body)
    except TimeoutError:
        return Outcome(False, f"no response within {duration(SECONDS)}")
    except Forbidden as error:
        text = f"not sent: {error}; see HALFSTEP_ALERTS_ALLOW_PRIVATE_ADDRESSES"
        return Outcome(False, text, is_final=True)
    except smtplib.SMTPResponseException as error:
        text = error.smtp_error if isinstance(error.smtp_error, str) else repr(error.smtp_error)
        return Outcome(False, f"the mail server answered {error.smtp_code} {text}")
    except Invalid as error:
        return Outcome(False, f"not sent: {error}")
    except (OSError, httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
        return Outcome(False, _mask(str(error) or type(error).__name__, target.address))


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Sign the body of a webhook with its time, to prevent replays of old messages."""
    signed = timestamp.encode() + b"." + body
    return f"sha256={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


async def _post(settings: Settings, target: ChannelAddress, delivery_id: int, body: str) -> Outcome:
    parts = urlsplit(target.address)
    host = parts.hostname or ""
    address = await resolve(host, port_of(parts), private=settings.alerts_allow_private_addresses)
    content = _slack(body) if target.kind == SLACK else body.encode()
    headers = {"Host": parts.netloc, "Content-Type": "application/json"}
    headers |= {"User-Agent": "Halfstep", "X-Halfstep-Delivery": str(delivery_id)}
    if target.secret:
        timestamp = str(int(time.time()))
        headers["X-Halfstep-Timestamp"] = timestamp
        headers["X-Halfstep-Signature"] = signature(target.secret, timestamp, content)
    # To the checked IP address, with the host name for the certificate.
    url = httpx2.URL(target.address).copy_with(host=address)
    named = {"sni_hostname": host} if parts.scheme == "https" else {}
    options: Any = {"trust_env": False, "follow_redirects": False, "timeout": SECONDS}
    client = httpx2.AsyncClient(verify=_create_ssl_context(), **options)
    async with (
        client,
        client.stream("POST", url, content=content, headers=headers, extensions=named) as answer,
    ):
        text = b""
        async for piece in answer.aiter_raw():
            text += piece
            if len(text) >= ANSWER_BYTES:
                break
    decoded = text[:ANSWER_BYTES].decode(errors="replace").strip()
    printable = "".join(c if c.isprintable() else " " for c in decoded)
    outcome = _mask(f"{answer.status_code} {printable}".strip(), target.address)
    return Outcome(answer.is_success, outcome[:ANSWER_CHARACTERS])


@cache
def _create_ssl_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # SSL_CERT_FILE overrides the system's certificates


def _mask(text: str, address: str) -> str:
    """Remove the address from a text, and its path, which is the secret of a Slack webhook."""
    path = urlsplit(address).path
    text = text.replace(address, "the address")
    return text.replace(path, "/…") if len(path) > 1 else text


def _slack(body: str) -> bytes:
    """Convert the payload to the format of Slack's incoming webhooks."""
    content = json.loads(body)
    text = content["text"]
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return json.dumps({"text": f"{text}\n<{_link(content)}>"}).encode()


def _link(content: dict[str, Any]) -> str:
    return str(content["run"]["url"] if "run" in content else content["url"])
