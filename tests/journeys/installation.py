"""A running installation: `halfstep up` with data folder and database, and an admin's client."""

import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from urllib.parse import urlsplit

import httpx2

from halfstep import Client
from tests.site import answers, halfstep, until, up


@dataclass
class Installation:
    """A data folder with its database, with or without a server."""

    data: Path
    database_url: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HALFSTEP_DATA": str(self.data),
            "HALFSTEP_DATABASE_URL": self.database_url,
            "HALFSTEP_ALLOW_COMMANDS": "yes",
            "HALFSTEP_ALERTS_ALLOW_PRIVATE_ADDRESSES": "yes",
        }

    def command(self, *words: str, **environment: str) -> CompletedProcess[str]:
        """Run `halfstep WORDS` on this installation."""
        return halfstep(*words, **self.environment, **environment)

    @contextmanager
    def running(self) -> Iterator["Admin"]:
        """Start server and worker, sign in by the printed link, and stop them at the end."""
        with up(signal.SIGTERM, **self.environment) as (_process, link):
            base = link.split("/?")[0]
            until(lambda: answers(base))
            admin = Admin.sign_in(link)
            with closing(admin.browser), closing(admin.client):
                yield admin


@dataclass
class Admin:
    """An admin's browser and client for a running server."""

    browser: httpx2.Client
    client: Client
    token: str

    @classmethod
    def sign_in(cls, link: str) -> "Admin":
        """Sign in by a link, and make an API token."""
        parts = urlsplit(link)
        base = f"{parts.scheme}://{parts.netloc}"
        browser = httpx2.Client(base_url=base, follow_redirects=True, timeout=60)
        browser.post("/", data={"token": parts.query.partition("=")[2]}, headers={"Origin": base})
        page = browser.get("/account").text
        csrf = page.partition('name="csrf-token" content="')[2].partition('"')[0]
        browser.headers["X-CSRF-Token"] = csrf
        made = browser.post("/account/tokens", data={"name": "journey", "days": "30"}).text
        token = re.findall(r"hs_[\w-]{43}", made)[0]
        return cls(browser, Client(base, token), token)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a script on the same machine."""
        return {
            "HALFSTEP_URL": str(self.browser.base_url).rstrip("/"),
            "HALFSTEP_TOKEN": self.token,
        }


def until_some(read: Callable[[], Iterable[Any]]) -> list[Any]:
    """Return the result of `read` once it is not empty."""
    rows: list[Any] = []
    until(lambda: bool(rows or rows.extend(read()) or rows))
    return rows
