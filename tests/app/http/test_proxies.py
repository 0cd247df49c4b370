"""Proxies: whose headers about addresses and TLS are trusted. One of the proxies is a real
nginx.
"""

import html
import re
from pathlib import Path

import httpx2
import pytest
from sqlalchemy import select

from app.http.credentials import cookie_name
from db.access import accounts
from db.access.login_attempts import FREE_ATTEMPTS
from db.database import Database
from db.errors import Invalid
from db.settings import Settings
from db.tables import AuditEvent, User
from tests.app.conftest import serving
from tests.app.http.proxies_made import NGINX, nginx
from tests.marks import extended
from tests.site import free_port

pytestmark = pytest.mark.slow

PASSWORD = "a long secret"
CLIENT = "127.0.0.2"  # of loopback, and not the proxy's


@pytest.fixture
def ada_signs_in(database: Database, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Ada a password, of which one wrong guess is allowed."""
    monkeypatch.setitem(FREE_ATTEMPTS, "name", 1)
    with database.writing() as session:
        accounts.set_password(session, session.get_one(User, ada.id), PASSWORD)


def _client(address: str, **options: bool) -> httpx2.Client:
    transport = httpx2.HTTPTransport(local_address=CLIENT, **options)
    return httpx2.Client(base_url=address, transport=transport, timeout=60)


def _tries(client: httpx2.Client, password: str, forwarded: str = "", count: int = 1) -> list[int]:
    headers = {"Origin": str(client.base_url).rstrip("/")}
    if forwarded:
        headers["X-Forwarded-For"] = forwarded
    form = {"name": "ada", "password": password}
    return [client.post("/sign-in", data=form, headers=headers).status_code for _ in range(count)]


@pytest.mark.parametrize("text", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.0/33"])
def test_a_proxy_is_an_address_or_a_network(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A trusted proxy is an address or a network; other values are rejected at the start."""
    monkeypatch.setenv("HALFSTEP_TRUSTED_PROXIES", f"127.0.0.1, {text}")
    with pytest.raises(Invalid, match=r"HALFSTEP_TRUSTED_PROXIES.*allowed: addresses or networks"):
        Settings.read()


def test_only_a_trusted_proxy_is_believed(
    settings: Settings, database: Database, ada_signs_in: None
) -> None:
    """X-Forwarded-* of other clients neither avoids throttling nor makes a cookie secure; behind a
    trusted proxy one client's failed sign-ins do not lock out others.
    """
    free = FREE_ATTEMPTS["name"]
    with serving(settings, database) as (_server, address), _client(address) as client:
        guesses = [_tries(client, "wrong", f"192.0.2.{n}")[0] for n in range(free + 1)]
        assert guesses == [401] * free + [429]
        assert (
            "strict-transport"
            not in client.get("/sign-in", headers={"X-Forwarded-Proto": "https"}).headers
        )
    behind = settings.model_copy(update={"trusted_proxies": f"10.0.0.0/8, {CLIENT}"})
    with serving(behind, database) as (_server, address), _client(address) as client:
        forged = "8.8.8.8, 192.0.2.1, 10.1.2.3"  # the last two by our proxies
        assert _tries(client, "wrong", forged, free + 1) == [401] * free + [429]
        assert _tries(client, PASSWORD, "192.0.2.1") == [429]
        assert _tries(client, PASSWORD, "192.0.2.1, 192.0.2.2") == [303]


@pytest.mark.skipif(NGINX is None, reason="nginx is missing: apt-get install nginx-light")
def test_a_real_nginx_ends_tls(
    tmp_path: Path, settings: Settings, database: Database, ada_signs_in: None
) -> None:
    """With the documented nginx configuration the cookie is secure and bound to the host, HSTS is
    sent, the client's real address is used even if it forges one, and streams are not buffered.
    """
    behind = settings.model_copy(update={"trusted_proxies": "127.0.0.1"})
    with (
        serving(behind, database) as (_server, upstream),
        nginx(tmp_path / "nginx", free_port(), upstream) as address,
        _client(address, verify=False) as client,
    ):
        free = FREE_ATTEMPTS["name"]
        guesses = [_tries(client, "wrong", f"192.0.2.{n}")[0] for n in range(free + 1)]
        assert guesses == [401] * free + [429]
        with httpx2.Client(base_url=address, verify=False, timeout=60) as other:
            form, origin = {"name": "ada", "password": PASSWORD}, {"Origin": address}
            answer = other.post("/sign-in", data=form, headers=origin)
            cookie = answer.headers["set-cookie"]
            assert cookie.startswith(f"__Host-{cookie_name(settings)}=")
            assert "; Secure" in cookie
            assert "Domain" not in cookie
            assert answer.headers["strict-transport-security"].startswith("max-age=")
            page = other.get("/account").text
            token = page.partition('name="csrf-token" content="')[2].partition('"')[0]
            made = other.post("/account/tokens", data={"name": "t", "csrf_token": token}).text
            made_token = re.findall(r"hs_[\w-]{43}", made)[0]
        bearer = {"Authorization": f"Bearer {made_token}", "X-Forwarded-For": "192.0.2.9"}
        assert client.delete("/api/v1/tokens/999", headers=bearer).status_code == 204
        with client.stream("GET", "/api/v1/runs/live", headers=bearer) as stream:
            assert next(stream.iter_lines()) != ""
    with database.reading() as session:
        assert (
            session.scalars(select(AuditEvent.address).order_by(AuditEvent.id.desc())).first()
            == CLIENT
        )


@pytest.mark.skipif(NGINX is None, reason="nginx is missing: apt-get install nginx-light")
@pytest.mark.parametrize(
    "strips", [True, *extended([False])], ids=["strips the path", "passes the path"]
)
def test_a_real_nginx_serves_below_a_path(
    tmp_path: Path, settings: Settings, database: Database, ada_signs_in: None, strips: bool
) -> None:
    """Behind nginx each page, script, redirect and cookie stays below the path."""
    port = free_port()
    address = f"https://127.0.0.1:{port}/halfstep"
    behind = settings.model_copy(
        update={"trusted_proxies": "127.0.0.1", "public_url": address, "host_names": ""}
    )
    with serving(behind, database) as (_server, upstream):
        upstream += "/" if strips else ""
        with (
            nginx(tmp_path / "nginx", port, upstream, block=1) as host,
            httpx2.Client(base_url=address, verify=False, timeout=60) as browser,
        ):
            form, origin = {"name": "ada", "password": PASSWORD}, {"Origin": host}
            answer = browser.post("/sign-in", data=form, headers=origin)
            assert answer.headers["location"].startswith("/halfstep/")
            cookie = answer.headers["set-cookie"]
            assert cookie.startswith(f"__Secure-{cookie_name(behind)}=")
            assert "; path=/halfstep/;" in cookie.lower()
            pages = crawl(browser, "/runs")
            assert {"/halfstep/runs", "/halfstep/account", "/halfstep/help/watch"} <= pages
            with browser.stream("GET", "/api/v1/runs/live") as stream:
                assert next(stream.iter_lines()) != ""
            assert browser.get(f"{host}/runs").status_code == 404  # nginx's own


def crawl(browser: httpx2.Client, start: str) -> set[str]:
    """Follow all links from a page; each address of this server is below the prefix and answers."""
    host = f"{browser.base_url.scheme}://{browser.base_url.netloc.decode()}"
    known, new = set[str](), {f"{browser.base_url.path.rstrip('/')}{start}"}
    while new:
        path = new.pop()
        known.add(path)
        answer = browser.get(f"{host}{path}", follow_redirects=True)
        assert answer.status_code == 200, path
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        links = re.findall(r'(?:href|src|action|data-api|data-preview)="(/[^"#]*)', answer.text)
        links += re.findall(r': ?"(/[^"]*\.js)"', answer.text)  # the import map's
        outside = [link for link in links if not link.startswith("/halfstep/")]
        assert outside == [], path
        followed = re.findall(r'(?:href|src)="(/[^"#]*)', answer.text)
        new |= {html.unescape(link) for link in followed} - known
        assert len(known) < 500
    return known
