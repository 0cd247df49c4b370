"""Deliveries: requests to receivers, handling of their responses, and rejected addresses."""

import asyncio
import email
import hashlib
import hmac
import json
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from email import policy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import select, update
from starlette.testclient import TestClient

from app.alerts import alert_senders
from app.alerts.alert_delivery import AlertDelivery
from app.alerts.alert_senders import deliver
from app.http import url_policy
from db.access import accounts, secrets
from db.alerts import alert_evaluation, channels, deliveries, rules
from db.alerts.channels import ChannelAddress
from db.alerts.deliveries import PAUSES, Outcome
from db.database import Database
from db.errors import Conflict, Invalid, NotFound
from db.settings import Settings
from db.tables import Channel, Delivery, Run, User
from tests.app.receivers import Receiver, http_receiver, smtp_receiver

BODY = json.dumps({"event": "test", "text": "A <b> & c", "url": "http://here/alerts"})


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def inside(tmp_path: Path) -> Settings:
    """Settings of an operator who allows alerts to be sent to this machine."""
    return Settings(data=tmp_path, alerts_allow_private_addresses=True)


def sent(settings: Settings, kind: str, address: str, secret: str = "") -> Outcome:
    return asyncio.run(deliver(settings, ChannelAddress(kind, address, secret), 7, BODY))


def test_a_webhook_is_signed(inside: Settings, hook: Receiver) -> None:
    """A webhook's signature covers time and body of the request, and the response is recorded."""
    assert sent(inside, "webhook", hook.url, "s3cret") == Outcome(True, "200 ok")
    [(headers, body)] = hook.got
    assert body == BODY.encode()
    signed = f"{headers['X-Halfstep-Timestamp']}.{BODY}".encode()
    expected = hmac.new(b"s3cret", signed, hashlib.sha256).hexdigest()
    assert headers["X-Halfstep-Signature"] == f"sha256={expected}"
    assert headers["X-Halfstep-Delivery"] == "7"
    assert headers["Host"] == f"localhost:{hook.port}"


def test_slack_gets_its_own_words(inside: Settings, hook: Receiver) -> None:
    """A Slack message is text with its three special characters escaped, and a link."""
    sent(inside, "slack", hook.url)
    [(headers, body)] = hook.got
    said = json.loads(body)
    assert said == {"text": "A &lt;b&gt; &amp; c\n<http://here/alerts>"}
    assert "X-Halfstep-Signature" not in headers


def test_answers_are_short_and_hold_no_address(inside: Settings, hook: Receiver) -> None:
    """A webhook's redirect is not followed; the shown part of a response is short and printable."""
    hook.answer = (302, {"Location": hook.url}, b"")
    assert sent(inside, "slack", hook.url) == Outcome(False, "302")
    assert len(hook.got) == 1
    hook.answer = (404, {}, b"Cannot POST /hook/secret-path\n" + b"\x00x" * 100_000)
    outcome = sent(inside, "slack", hook.url)
    assert not outcome.is_delivered
    assert outcome.answer.startswith("404 Cannot POST /…")
    assert outcome.answer.isprintable()
    assert len(outcome.answer) == deliveries.ANSWER_CHARACTERS


def test_a_receiver_that_says_nothing_is_left(
    inside: Settings, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery has a timeout for the whole exchange, and a refused connection is a result too."""
    monkeypatch.setattr(alert_senders, "SECONDS", 0.05)
    hook.silent = threading.Event()
    assert "no response within" in sent(inside, "slack", hook.url).answer
    hook.silent.set()
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    outcome = sent(inside, "slack", url)
    assert (outcome.is_delivered, outcome.is_final) == (False, False)
    assert outcome.answer


def test_nothing_goes_into_ones_own_network(
    tmp_path: Path, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A channel into the server's own network is refused, by name or by number in any notation."""
    outside = Settings(data=tmp_path)
    for host in ("localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]"):
        outcome = sent(outside, "slack", f"http://{host}:{hook.port}/")
        assert "within the server's own network" in outcome.answer
        assert f"{host} is {host}" not in outcome.answer
        assert outcome.is_final
    known = socket.getaddrinfo

    def resolve(host: str, port: int, *rest: Any, **more: Any) -> Any:
        found = known("127.0.0.1", port, *rest, **more)
        public = [(*each[:4], ("8.8.8.8", port)) for each in found]
        return public + found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert sent(outside, "slack", "http://mixed.example/").is_final
    assert hook.got == []


#: Hosts of the server's own network.
OWN = ["localhost", "127.0.0.1", "2130706433", "0x7f.1", "[::1]", "169.254.169.254"]
OWN += ["[64:ff9b::7f00:1]", "[::ffff:0:127.0.0.1]", "internal.example"]


def test_a_channel_into_ones_own_network_is_not_made(
    browser: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating a channel into the server's network gets 422; an unresolved name is checked
    later.
    """
    known = socket.getaddrinfo

    def lookup(name: str, port: int, *rest: Any, **more: Any) -> Any:
        if name == "nowhere.example":
            raise socket.gaierror
        return known("10.1.2.3" if name == "internal.example" else name, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    settings.data.mkdir(exist_ok=True)  # of the key that encrypts addresses
    for host in OWN:
        wanted = {"kind": "webhook", "name": "hook", "address": f"http://{host}:8080/x"}
        answer = browser.post("/api/v1/alerts/channels", json=wanted)
        assert answer.status_code == 422, host
        assert "within the server's own network" in answer.json()["errors"]["address"]
        assert browser.post("/alerts/channels", data=wanted).status_code == 422, host
    assert browser.get("/api/v1/alerts/channels").json() == []
    wanted["address"] = "https://nowhere.example/x"
    assert browser.post("/api/v1/alerts/channels", json=wanted).status_code == 201


@pytest.mark.slow
def test_no_name_is_looked_up_for_a_stranger(
    stranger: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host names are resolved neither without a sign-in nor for an unknown token."""
    monkeypatch.setattr(url_policy, "resolve", None)  # raises, were it called
    wanted = {"kind": "webhook", "name": "hook", "address": "http://internal.example"}
    for headers in ({}, {"Authorization": "Bearer hs_unknown"}):
        answer = stranger.post("/api/v1/alerts/channels", json=wanted, headers=headers)
        assert answer.status_code == 401
        assert stranger.post("/alerts/channels", data=wanted, headers=headers).status_code in (
            303,
            401,
        )


def test_mail_goes_to_a_domain_and_no_number(browser: TestClient) -> None:
    """A mail domain may be no IPv4 address, which a mail server would resolve and connect to."""
    for address in ("me@10.0.0.12", "me@127.0.0.1", "me@[127.0.0.1]"):
        wanted = {"kind": "email", "name": "mail", "address": address}
        assert browser.post("/api/v1/alerts/channels", json=wanted).status_code == 422, address


def test_the_connection_goes_to_the_address_that_was_judged(
    inside: Settings, hook: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver's name is resolved once, and sent in the request to the checked address."""
    known, asked = socket.getaddrinfo, []

    def resolve(host: Any, port: int, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        return known("127.0.0.1" if host == "hook.example" else host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    outcome = sent(inside, "slack", f"http://hook.example:{hook.port}/")
    assert outcome.is_delivered
    assert asked.count("hook.example") == 1
    assert hook.got[0][0]["Host"] == f"hook.example:{hook.port}"


def test_mail(inside: Settings) -> None:
    """A mail goes to one person, with a subject of one line and a link."""
    with smtp_receiver() as server:
        url = SecretStr(f"smtp://127.0.0.1:{server.port}")
        settings = inside.model_copy(update={"smtp_url": url, "smtp_from": "hs@here.example"})
        body = json.dumps({"text": "Run é,\nfailed", "run": {"url": "http://here/runs/1"}})
        target = ChannelAddress("email", "ada@x.example")
        assert asyncio.run(deliver(settings, target, 1, body)).is_delivered
        [(to, text)] = server.got
        message = email.message_from_string(text, policy=policy.default)
        assert to == ["ada@x.example"]
        assert message["subject"] == "[Halfstep] Run é, failed"
        assert message["from"] == "hs@here.example"
        assert "http://here/runs/1" in message.get_content()
        server.answer = (550, {}, b"")
        assert "550" in asyncio.run(deliver(settings, target, 1, body)).answer


def test_no_password_leaves_without_tls(inside: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """Mail without TLS is refused by the name of the setting, and no response or log has the
    password.
    """
    with smtp_receiver() as server, caplog.at_level(logging.DEBUG):
        for url, answer in (
            (f"smtp://u:hush@127.0.0.1:{server.port}", "no TLS"),
            (f"smtps://u:hush@127.0.0.1:{server.port}", ""),
            ("smpt://u:hush@127.0.0.1", "HALFSTEP_SMTP_URL: allowed: smtp://"),
            ("", "HALFSTEP_SMTP_URL: not set"),
        ):
            settings = inside.model_copy(update={"smtp_url": SecretStr(url)})
            outcome = sent(settings, "email", "ada@x.example")
            assert not outcome.is_delivered
            assert answer in outcome.answer
            assert "hush" not in outcome.answer + caplog.text + repr(settings)
        assert server.got == []


@pytest.mark.slow
def test_channels_are_checked_and_keep_their_secrets(
    database: Database, ada: User, tmp_path: Path
) -> None:
    """A channel's row has no readable URL; a rejected secret value is not repeated."""
    key = tmp_path / "key"
    with database.writing() as session:
        for kind, address, message in (
            ("fax", "x", "kind: 'fax' is not valid; allowed: webhook, slack, email"),
            ("email", "a@b.example, c@d.example", "address: 'a@b.example, c@d.example' is not"),
            ("email", "a@b.example\nBcc: x@y.example", "address"),
            ("webhook", "ftp://h/hush", "address: its scheme is 'ftp'; allowed: https"),
            ("webhook", "", "address: it is empty; allowed: https"),
            ("webhook", "h/hush", "address: it has no scheme; allowed: https"),
            ("webhook", "https:///hush", "it has no host"),
            ("slack", "https://u:hush@h/", "it contains a user name"),
            ("slack", "https://h:99999/hush", "it is not a URL"),
            ("slack", "https://h/" + "hush" * 1000, "it has 4,010 characters of at most 2,000"),
        ):
            with pytest.raises(Invalid, match=message) as refused:
                channels.make(session, key, ada, kind=kind, name="n", address=address)
            assert "hush" not in str(refused.value)
        url = "https://hooks.example/services/hush"
        row, secret = channels.make(session, key, ada, kind="webhook", name="", address=url)
        assert row.name == row.target == "hooks.example"
        assert "hush" not in row.ciphertext + row.target
        assert secret not in row.ciphertext
        assert channels.decrypt_address(key, row) == ChannelAddress("webhook", url, secret)
        bob = accounts.make_user(session, "bob")
        for act in (channels.delete, channels.mine):
            with pytest.raises(NotFound):
                act(session, bob, row.id)
        (tmp_path / "key").write_bytes(secrets.Fernet.generate_key())
        with pytest.raises(secrets.Unreadable):
            channels.decrypt_address(key, row)


def test_an_alert_goes_all_the_way_once(
    database: Database, running: Run, ada: User, inside: Settings, hook: Receiver
) -> None:
    """A run's loss raises an alert that reaches its receiver; of two servers only one
    delivers it.
    """
    with database.writing() as session:
        what = {"kind": "webhook", "name": "n", "address": hook.url}
        channels.make(session, inside.secrets_key, ada, **what)
        rules.make(session, ada, condition="loss_above", scope="all", value=1.0)
        session.execute(update(Run).values(loss=2.0))
    alerts = [
        partial(alert_evaluation.evaluate, database, alert_evaluation.Seen(), "") for _ in range(2)
    ]
    deliverers = [AlertDelivery(inside, database, threading.Event()).deliver_due for _ in range(2)]
    for works in (alerts, deliverers):
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    [(_headers, body)] = hook.got
    assert json.loads(body)["text"] == "Run 1, digits-fp16, has the loss at 2, above 1."
    with database.reading() as session:
        [row] = session.scalars(select(Delivery))
        assert (row.is_delivered, row.attempts, row.answer) == (True, 1, "200 ok")
        assert row.body == body.decode()


def test_attempts_are_bounded_with_growing_pauses(
    database: Database, ada: User, inside: Settings, hook: Receiver
) -> None:
    """Each failure postpones the delivery for longer; the last one fails it, and a test
    shows why.
    """
    hook.answer = (500, {}, b"broken")
    with database.writing() as session:
        what = {"kind": "slack", "name": "n", "address": hook.url}
        channel, _secret = channels.make(session, inside.secrets_key, ada, **what)
        deliveries.test(session, ada, channel.id, "http://here")
    server, pauses = AlertDelivery(inside, database, threading.Event()), []
    for _ in range(len(PAUSES) + 2):
        server.deliver_due()
        with database.writing() as session:
            [row] = session.scalars(select(Delivery))
            if row.ended_at is None:
                assert row.tried_at is not None
                pauses.append(round(row.due_at - row.tried_at, -1))
                row.due_at = 0.0
    assert pauses == list(PAUSES)
    assert (row.attempts, row.answer, row.is_delivered) == (len(PAUSES) + 1, "500 broken", False)
    assert len(hook.got) == len(PAUSES) + 1


def test_a_request_without_a_response_is_repeated(
    database: Database, ada: User, inside: Settings, hook: Receiver
) -> None:
    """A delivery without a response is repeated; a late response of the first is ignored."""
    with database.writing() as session:
        what = {"kind": "slack", "name": "n", "address": hook.url}
        channel, _secret = channels.make(session, inside.secrets_key, ada, **what)
        deliveries.test(session, ada, channel.id, "http://here")
    with database.writing() as session:
        [(row, _channel, _is_visible)] = deliveries.take(session)
        assert deliveries.take(session) == []
    server = AlertDelivery(inside, database, threading.Event())
    server.deliver_due()
    assert hook.got == []
    with database.writing() as session:
        session.execute(update(Delivery).values(due_at=0.0))
    server.deliver_due()
    with database.writing() as session:
        deliveries.note(session, row.id, 1, Outcome(False, "late"))
        session.execute(update(Channel).values(is_on=False))
    with database.reading() as session:
        [row] = session.scalars(select(Delivery))
        assert (row.is_delivered, row.attempts) == (True, 2)
    with database.writing() as session:
        for _ in range(deliveries.MOST_TESTS):
            deliveries.test(session, ada, channel.id, "http://here")
        with pytest.raises(Conflict, match="5 tests are already in progress"):
            deliveries.test(session, ada, channel.id, "http://here")
        channels.delete(session, ada, channel.id)
        assert session.scalars(select(Delivery)).all() == []


def test_a_failing_sender_does_not_stop_others(
    database: Database,
    ada: User,
    inside: Settings,
    hook: Receiver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A channel that cannot be decrypted reports it, and the next alert is delivered."""
    with database.writing() as session:
        for name in "ab":
            what = {"kind": "slack", "name": name, "address": hook.url}
            channel, _secret = channels.make(session, inside.secrets_key, ada, **what)
            deliveries.test(session, ada, channel.id, "http://here")
        channel.ciphertext = "x"
    AlertDelivery(inside, database, threading.Event()).deliver_due()
    with database.reading() as session:
        rows = session.scalars(select(Delivery).order_by(Delivery.id)).all()
    assert [row.is_delivered for row in rows] == [True, False]
    assert "cannot decrypt" in rows[1].answer
    assert "secret-path" not in caplog.text


def test_a_certificate_must_have_the_name(
    inside: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TLS certificates must match the name in the URL, not the connected address."""
    certificate = made_certificate(tmp_path, "hook.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    known = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _host, *rest, **more: known("127.0.0.1", *rest, **more)
    )
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(alert_senders, "_create_ssl_context", lambda: trusting)
    with http_receiver(context) as hook:
        assert sent(inside, "slack", f"https://hook.example:{hook.port}/").is_delivered
        outcome = sent(inside, "slack", f"https://other.example:{hook.port}/")
        assert "certificate" in outcome.answer.lower()
        assert len(hook.got) == 1


def made_certificate(folder: Path, name: str) -> Path:
    """Make a self-signed certificate with this name, and its key."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder(who, who, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(datetime.now(UTC) - timedelta(days=1))
    made = made.not_valid_after(datetime.now(UTC) + timedelta(days=1))
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    signed = made.add_extension(names, critical=False).sign(key, hashes.SHA256())
    path = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path
