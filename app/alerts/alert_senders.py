"""Make one attempt at a delivery: a signed POST, a POST as Slack's incoming webhooks take it, mail.

Whoever is behind an address has fifteen seconds, whatever it does, and is read no further than a
page shows. A redirect is an answer like another, and is not followed.
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
from app.http.url_policy import Forbidden, port_of, resolved
from db.alerts.channels import EMAIL, SLACK, Reach
from db.alerts.deliveries import ANSWER_CHARACTERS, Outcome
from db.errors import Invalid
from db.settings import Settings

# At its level "info" it tells whole URLs.
logging.getLogger("httpx2").setLevel(logging.WARNING)

SECONDS = 15.0
#: Of an answer; what a page shows of it is less.
ANSWER_BYTES = 4 * ANSWER_CHARACTERS


async def deliver(settings: Settings, reach: Reach, delivery_id: int, body: str) -> Outcome:
    """Try to deliver; whatever goes wrong is the outcome, without a word of the secret."""
    try:
        async with asyncio.timeout(SECONDS):
            if reach.kind == EMAIL:
                said = json.loads(body)
                answer = await asyncio.to_thread(
                    smtp.send, settings, reach.address, said["text"], _link(said)
                )
                return Outcome(True, answer)
            return await _post(settings, reach, delivery_id, body)
    except TimeoutError:
        return Outcome(False, f"no answer within {SECONDS:g} seconds")
    except Forbidden as error:
        text = f"not sent: {error}; see HALFSTEP_ALERTS_ALLOW_PRIVATE_ADDRESSES"
        return Outcome(False, text, is_final=True)
    except smtplib.SMTPResponseException as error:
        text = error.smtp_error if isinstance(error.smtp_error, str) else repr(error.smtp_error)
        return Outcome(False, f"the mail server answered {error.smtp_code} {text}")
    except Invalid as error:
        return Outcome(False, f"not sent: {error}")
    except (OSError, httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
        return Outcome(False, _hushed(str(error) or type(error).__name__, reach.address))


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """Sign what a webhook is sent, with when: so an old message cannot be sent again."""
    signed = timestamp.encode() + b"." + body
    return f"sha256={hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()}"


async def _post(settings: Settings, reach: Reach, delivery_id: int, body: str) -> Outcome:
    parts = urlsplit(reach.address)
    host = parts.hostname or ""
    address = await resolved(host, port_of(parts), private=settings.alerts_allow_private_addresses)
    content = _slack(body) if reach.kind == SLACK else body.encode()
    headers = {"Host": parts.netloc, "Content-Type": "application/json"}
    headers |= {"User-Agent": "Halfstep", "X-Halfstep-Delivery": str(delivery_id)}
    if reach.secret:
        timestamp = str(int(time.time()))
        headers["X-Halfstep-Timestamp"] = timestamp
        headers["X-Halfstep-Signature"] = signature(reach.secret, timestamp, content)
    # To the address that was judged, by the name that the certificate is to have.
    url = httpx2.URL(reach.address).copy_with(host=address)
    named = {"sni_hostname": host} if parts.scheme == "https" else {}
    options: Any = {"trust_env": False, "follow_redirects": False, "timeout": SECONDS}
    client = httpx2.AsyncClient(verify=_trusted(), **options)
    async with (
        client,
        client.stream("POST", url, content=content, headers=headers, extensions=named) as answer,
    ):
        text = b""
        async for piece in answer.aiter_raw():
            text += piece
            if len(text) >= ANSWER_BYTES:
                break
    words = text[:ANSWER_BYTES].decode(errors="replace").strip()
    printed = "".join(each if each.isprintable() else " " for each in words)
    outcome = _hushed(f"{answer.status_code} {printed}".strip(), reach.address)
    return Outcome(answer.is_success, outcome[:ANSWER_CHARACTERS])


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()  # SSL_CERT_FILE names others than the system's


def _hushed(text: str, address: str) -> str:
    """Take the address out of a text, and its path, which some servers repeat: of Slack's the path
    is the secret.
    """
    path = urlsplit(address).path
    text = text.replace(address, "the address")
    return text.replace(path, "/…") if len(path) > 1 else text


def _slack(body: str) -> bytes:
    """Say it as Slack's incoming webhooks, and those that follow them, take it."""
    said = json.loads(body)
    text = said["text"]
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return json.dumps({"text": f"{text}\n<{_link(said)}>"}).encode()


def _link(said: dict[str, Any]) -> str:
    return str(said["run"]["url"] if "run" in said else said["url"])
