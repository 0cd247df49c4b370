"""Identity tokens that a provider never issued, or issued for others, sign no one in."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey
from pydantic import SecretStr
from starlette.testclient import TestClient

from db.access import people, projects
from db.database import Database
from db.errors import NotFound
from db.settings import Settings
from db.tables import User
from tests.marks import extended

RSA, OTHER = RSAKey.generate_key(2048), RSAKey.generate_key(2048)
KEYS = {"rsa": RSA, "ec": ECKey.generate_key("P-256"), "okp": OKPKey.generate_key("Ed25519")}
ACCESS_TOKEN = "access"

Claims = dict[str, Any]


class Forger:
    """A provider on this machine that returns the token of a test."""

    def __init__(self) -> None:
        self.token: object = ""
        self.userinfo: Claims = {}
        self.about: Claims = {}
        self.keys: Claims = {"keys": [{**_public(key), "kid": kid} for kid, key in KEYS.items()]}
        forger = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.removeprefix("/")
                pages = {"keys": forger.keys, "userinfo": forger.userinfo}
                self._answer(pages.get(path, forger.metadata))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                bearer = {"access_token": ACCESS_TOKEN, "token_type": "Bearer"}
                self._answer({**bearer, "id_token": forger.token})

            def _answer(self, content: object) -> None:
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def metadata(self) -> Claims:
        """Return metadata that announce every algorithm and the given client authentication."""
        names = {"authorization_endpoint": "authorize", "token_endpoint": "token"}
        names |= {"jwks_uri": "keys", "userinfo_endpoint": "userinfo"}
        return {
            "issuer": self.address,
            **{name: f"{self.address}/{path}" for name, path in names.items()},
            "id_token_signing_alg_values_supported": ["none", "HS256", *ALGORITHMS],
            "base_url": "http://127.0.0.1:9",
            **self.about,
        }


ALGORITHMS = {"RS256": "rsa", "RS512": "rsa", "PS256": "rsa", "ES256": "ec", "EdDSA": "okp"}


def _public(key: Any) -> Claims:
    return dict(key.as_dict(private=False))


@pytest.fixture
def forger() -> Iterator[Forger]:
    """A provider with keys known to the test."""
    forger = Forger()
    thread = Thread(target=forger.server.serve_forever, args=[0.01])
    thread.start()
    yield forger
    forger.server.shutdown()
    thread.join()
    forger.server.server_close()


@pytest.fixture
def settings(settings: Settings, forger: Forger) -> Settings:
    """Settings of a server that uses this provider."""
    settings.data.mkdir(parents=True)
    provider = {
        "oidc_issuer": forger.address,
        "oidc_client_id": "halfstep",
        "oidc_client_secret": SecretStr("hush"),
        "oidc_roles": "ml=maintainer, *=viewer",
        "public_url": "http://localhost",
    }
    return settings.model_copy(update=provider)


class Attempt(NamedTuple):
    """A sign-in that the browser has started."""

    claims: Claims
    back: str

    def sign_token(self, header: Claims | None = None, key: Any = RSA, **changes: Any) -> str:
        """Return a token with changed claims; None removes one."""
        claims = {k: v for k, v in {**self.claims, **changes}.items() if v is not None}
        header = {"alg": "RS256", "kid": "rsa", **(header or {})}
        known = jws.JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
        return jws.serialize_compact(header, json.dumps(claims), key, registry=known)

    def sign_by_hand(
        self, header: Claims, sign: Callable[[bytes], bytes] = lambda _text: b""
    ) -> str:
        """Return a token whose signature is made by hand."""
        text = b".".join(map(_encode, (json.dumps(header), json.dumps(self.claims))))
        return b".".join((text, _encode(sign(text)))).decode()


def _encode(part: str | bytes) -> bytes:
    content = part.encode() if isinstance(part, str) else part
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def _begin(client: TestClient, forger: Forger) -> Attempt:
    answer = client.get("/sign-in/sso", follow_redirects=False)
    sent = parse_qs(urlsplit(answer.headers["location"]).query)
    moment = int(time.time())
    claims = {
        "iss": forger.address,
        "sub": "1",
        "aud": "halfstep",
        "exp": moment + 300,
        "iat": moment,
        "nonce": sent["nonce"][0],
        "preferred_username": "Carol",
    }
    return Attempt(claims, f"/sign-in/sso/answer?code=x&state={sent['state'][0]}")


def _status(client: TestClient, attempt: Attempt) -> int:
    return client.get(attempt.back, follow_redirects=False).status_code


def _hmac(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda text: hmac.digest(secret, text, hashlib.sha256)


def _genuine(text: bytes) -> bytes:
    signature: bytes = RSA.get_op_key("sign").sign(text, PKCS1v15(), SHA256())
    return signature


HS256 = {"alg": "HS256", "kid": "rsa"}
NOW = int(time.time())
FORGERIES: dict[str, Callable[[Attempt], object]] = {
    "no token": lambda _: None,
    "a list": lambda _: ["x"],
    "not a JWT": lambda _: "x.y.z",
    "alg none": lambda one: one.sign_by_hand({"alg": "none", "kid": "rsa"}),
    "alg none without kid": lambda one: one.sign_by_hand({"alg": "none"}),
    "alg None": lambda one: one.sign_by_hand({"alg": "None", "kid": "rsa"}),
    "no alg": lambda one: one.sign_by_hand({"kid": "rsa"}),
    "no signature": lambda one: one.sign_token().rpartition(".")[0] + ".",
    "HMAC with the public key": lambda one: one.sign_by_hand(
        HS256, _hmac(RSA.as_pem(private=False))
    ),
    "HMAC with the public key as DER": lambda one: one.sign_by_hand(
        HS256, _hmac(RSA.as_der(private=False))
    ),
    "HMAC with the client's secret": lambda one: one.sign_by_hand(HS256, _hmac(b"hush")),
    "HMAC with nothing": lambda one: one.sign_by_hand(HS256, _hmac(b"")),
    "another key": lambda one: one.sign_token(key=OTHER),
    "a key of the token's own": lambda one: one.sign_token({"jwk": _public(OTHER)}, key=OTHER),
    "an unknown kid": lambda one: one.sign_token({"kid": "new"}, key=OTHER),
    "a kid of another type": lambda one: one.sign_token({"kid": "ec"}),
    "no kid of several keys": lambda one: one.sign_token({"kid": ""}),
    "an unknown critical header": lambda one: one.sign_by_hand(
        {"alg": "RS256", "kid": "rsa", "crit": ["x"], "x": 1}, _genuine
    ),
    "another issuer": lambda one: one.sign_token(iss="http://localhost:9"),
    "no issuer": lambda one: one.sign_token(iss=None),
    "a list of issuers": lambda one: one.sign_token(iss=[one.claims["iss"], "x"]),
    "another audience": lambda one: one.sign_token(aud="other"),
    "other audiences": lambda one: one.sign_token(aud=["other", "more"]),
    "no audience": lambda one: one.sign_token(aud=None),
    "an empty audience": lambda one: one.sign_token(aud=[]),
    "several audiences without azp": lambda one: one.sign_token(aud=["halfstep", "other"]),
    "several audiences, azp another": lambda one: one.sign_token(
        aud=["halfstep", "other"], azp="other"
    ),
    "azp another": lambda one: one.sign_token(azp="other"),
    "azp another, aud a list": lambda one: one.sign_token(aud=["halfstep"], azp="other"),
    "azp a list": lambda one: one.sign_token(azp=["halfstep", "other"]),
    "azp empty": lambda one: one.sign_token(azp=""),
    "another nonce": lambda one: one.sign_token(nonce="other"),
    "no nonce": lambda one: one.sign_token(nonce=None),
    "an empty nonce": lambda one: one.sign_token(nonce=""),
    "another nonce, nonce_supported false": lambda one: one.sign_token(
        nonce="other", nonce_supported=False
    ),
    "expired": lambda one: one.sign_token(exp=NOW - 120),
    "no expiry": lambda one: one.sign_token(exp=None),
    "an expiry as text": lambda one: one.sign_token(exp=str(NOW + 300)),
    "an expiry that is no number": lambda one: one.sign_token(exp=float("nan")),
    "not valid yet": lambda one: one.sign_token(nbf=NOW + 3600),
    "no subject": lambda one: one.sign_token(sub=None),
    "an empty subject": lambda one: one.sign_token(sub=""),
    "the hash of another access token": lambda one: one.sign_token(
        at_hash="AAAAAAAAAAAAAAAAAAAAAA"
    ),
}


def test_forged_tokens_sign_no_one_in(
    stranger: TestClient, database: Database, ada: User, forger: Forger
) -> None:
    """Each forged token is refused, no account is created, and the next genuine one is accepted."""
    wrong = {}
    for name, forge in FORGERIES.items():
        attempt = _begin(stranger, forger)
        forger.token = forge(attempt)
        statuses = (_status(stranger, attempt), stranger.get("/runs").status_code)
        if statuses != (401, 303):
            wrong[name] = statuses
    assert wrong == {}
    with database.reading() as session, pytest.raises(NotFound):
        people.named(session, "carol")
    attempt = _begin(stranger, forger)
    forger.token = attempt.sign_token()
    assert _status(stranger, attempt) == 303


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")  # providers still use the name
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_signatures_of_each_allowed_algorithm_are_accepted(
    stranger: TestClient, ada: User, forger: Forger, algorithm: str
) -> None:
    """A signature is accepted if it was made with the key that the token's kid names."""
    attempt, kid = _begin(stranger, forger), ALGORITHMS[algorithm]
    audience = ["halfstep", "other"]
    forger.token = attempt.sign_token(
        {"alg": algorithm, "kid": kid}, KEYS[kid], aud=audience, azp="halfstep"
    )
    assert _status(stranger, attempt) == 303


def test_a_new_key_of_the_provider_is_used_at_once(
    stranger: TestClient, ada: User, forger: Forger
) -> None:
    """The provider's keys are requested again for a kid that is not among the known ones."""
    attempt = _begin(stranger, forger)
    forger.token = attempt.sign_token()
    assert _status(stranger, attempt) == 303
    forger.keys = {"keys": [{**_public(OTHER), "kid": "new"}]}
    attempt = _begin(stranger, forger)
    forger.token = attempt.sign_token({"kid": "new"}, OTHER)
    assert _status(stranger, attempt) == 303


@pytest.mark.parametrize(
    "about", [{"issuer": "http://localhost:9"}, {"issuer": None}, {"authorization_endpoint": 1}]
)
def test_metadata_of_another_issuer_is_rejected(
    stranger: TestClient, ada: User, forger: Forger, about: Claims
) -> None:
    """Metadata of another issuer is rejected, so its endpoints are not used."""
    forger.about = about
    assert stranger.get("/sign-in/sso", follow_redirects=False).status_code == 502


@pytest.mark.parametrize(("subject", "role"), [("1", "maintainer"), ("2", "viewer"), (None, None)])
def test_groups_come_from_the_userinfo_of_the_same_subject(
    stranger: TestClient,
    database: Database,
    ada: User,
    forger: Forger,
    subject: str | None,
    role: str | None,
) -> None:
    """The userinfo of another subject is ignored."""
    attempt = _begin(stranger, forger)
    forger.token, forger.userinfo = attempt.sign_token(), {"sub": subject, "groups": ["ml"]}
    assert _status(stranger, attempt) == 303
    with database.reading() as session:
        memberships = projects.memberships(session, people.named(session, "carol"))
    assert memberships == {"": role or "viewer"}


@pytest.mark.parametrize(
    "hidden", ["\u200b", "\u202e", *extended(["\u2066", "\u00ad", "\ufeff", "\U000e0061"])]
)
def test_invisible_characters_of_a_name_are_removed(
    stranger: TestClient, database: Database, ada: User, forger: Forger, hidden: str
) -> None:
    """A name that looks like another account's, by invisible characters, is refused."""
    attempt = _begin(stranger, forger)
    forger.token = attempt.sign_token(preferred_username=f"{hidden}a{hidden}da")
    assert _status(stranger, attempt) == 401
    attempt = _begin(stranger, forger)
    forger.token = attempt.sign_token(preferred_username=f"Ca{hidden}rol\t {hidden} Smith{hidden}")
    assert _status(stranger, attempt) == 303
    with database.reading() as session:
        assert people.named(session, "carol smith").name == "Carol Smith"
