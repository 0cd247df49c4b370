"""Single sign-on: OpenID Connect's authorization code flow, with PKCE, state and nonce.

Authlib speaks the protocol. The state between the two requests is encrypted in a cookie, so that
only the browser that began a sign-in can finish it.
"""

import hmac
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from authlib.common.security import generate_token
from authlib.integrations.base_client import BaseApp, OAuth2Mixin, OpenIDMixin
from authlib.integrations.httpx_client import OAuth2Client
from authlib.oidc.discovery import get_well_known_url

from db.access import oidc_role_mapping
from db.access import secrets as encryption
from db.access.oidc_role_mapping import ANY_GROUP
from db.errors import HalfstepError, Invalid
from db.settings import Settings
from halfstep.api_client.tls import DeferredContext

logger = logging.getLogger(__name__)

#: Time limit for the sign-in at the provider.
MINUTES = 10
#: Lifetime of the cached endpoints and keys of the provider.
KNOWN_SECONDS = 600.0
#: Signatures that are accepted, whatever the provider announces: with public keys only.
ALGORITHMS = ["RS256", "RS512", "PS256", "ES256", "EdDSA"]
LEEWAY_SECONDS = 60
ANSWER_BYTES = 1 << 20
#: What is used of the provider's metadata; Authlib would take settings of its client from the rest.
METADATA = (
    *("issuer", "authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint"),
    "_loaded_at",  # Authlib's own
)


class SsoFailed(HalfstepError):
    """The sign-in at the provider failed. Try again; the server's log has the provider's error."""


@dataclass(frozen=True)
class Claims:
    """Claims about a user signed in by the provider."""

    subject: str  # issuer and id, which never change
    name: str
    groups: frozenset[str]


class _Client(OAuth2Client):  # type: ignore[misc] # Authlib has no types
    """HTTP client for short responses."""

    def request(self, method: str, url: str, **options: object) -> object:
        response = super().request(method, url, **options)
        if len(response.content) > ANSWER_BYTES:
            raise ValueError(f"{url} answered {len(response.content):,} bytes")
        return response


class _Application(OAuth2Mixin, OpenIDMixin, BaseApp):  # type: ignore[misc]
    """This server as a client of the provider."""

    # Certificates are loaded once, at the first sign-in, not by each request.
    client_cls = staticmethod(partial(_Client, verify=DeferredContext()))


class Provider:
    """OIDC provider of these settings; thread-safe. Raises Invalid for invalid roles."""

    def __init__(self, settings: Settings) -> None:
        try:
            oidc_role_mapping.parse(settings.oidc_roles)
        except ValueError as error:
            raise Invalid({"HALFSTEP_OIDC_ROLES": str(error)}) from error
        self._settings = settings
        self._known: tuple[float, _Application] | None = None

    def begin(self, target: str) -> tuple[str, str]:
        """Return the URL to redirect the browser to, and the cookie to set.

        target: local path after the sign-in.  Raises SsoFailed.
        """
        with self._failing():
            begun = {"nonce": generate_token(), "target": target, "time": time.time()}
            begun |= self._discover().create_authorization_url(
                f"{self._settings.address}/sign-in/sso/answer", nonce=begun["nonce"]
            )
        return begun.pop("url"), encryption.encrypt(self._settings.secrets_key, json.dumps(begun))

    def finish(self, cookie: str, state: str, code: str) -> tuple[Claims, str]:
        """Return the user's claims and the target path. Raises SsoFailed."""
        begun = self._begun(cookie)
        if not hmac.compare_digest(state.encode(), begun["state"].encode()):
            raise SsoFailed("This response belongs to a sign-in in another browser.")
        with self._failing():
            application = self._discover()
            token = application.fetch_access_token(
                f"{self._settings.address}/sign-in/sso/answer",
                code=code,
                code_verifier=begun["code_verifier"],
            )
            claims = application.parse_id_token(
                token, begun["nonce"], self._claims_options(application), leeway=LEEWAY_SECONDS
            )
            has_more = "userinfo_endpoint" in application.server_metadata
            if self._settings.oidc_groups_claim not in claims and has_more:
                more = application.userinfo(token=token)
                if more.get("sub") == claims["sub"]:
                    claims = {**more, **claims}
            return self._claims(claims), str(begun["target"])

    def _begun(self, cookie: str) -> dict[str, Any]:
        try:
            text = encryption.decrypt(self._settings.secrets_key, cookie)
            begun: dict[str, Any] = json.loads(text)
        except (encryption.Unreadable, ValueError) as error:
            raise SsoFailed("This browser has not started a sign-in.") from error
        if time.time() - begun["time"] > MINUTES * 60:
            raise SsoFailed(f"The sign-in took more than {MINUTES} minutes. Start again.")
        return begun

    def _claims_options(self, application: _Application) -> dict[str, dict[str, object]]:
        """Return the values that claims of an identity token must have, besides Authlib's rules."""
        client_id = self._settings.oidc_client_id
        return {
            "iss": {"essential": True, "value": application.server_metadata["issuer"]},
            "aud": {"essential": True, "value": client_id},
            "azp": {"value": client_id},
            "sub": {"essential": True},
        }

    def _claims(self, claims: dict[str, object]) -> Claims:
        name = next(
            (claims[key] for key in ("preferred_username", "email", "name") if claims.get(key)),
            claims["sub"],
        )
        groups = claims.get(self._settings.oidc_groups_claim) or []
        groups = groups if isinstance(groups, list) else [groups]
        subject = f"{claims['iss']} {claims['sub']}"
        return Claims(subject, str(name), frozenset({ANY_GROUP, *map(str, groups)}))

    def _discover(self) -> _Application:
        if self._known is not None and time.monotonic() - self._known[0] < KNOWN_SECONDS:
            return self._known[1]
        issuer = self._settings.oidc_issuer.rstrip("/")
        application = _Application(
            framework=None,
            client_id=self._settings.oidc_client_id,
            client_secret=self._settings.oidc_client_secret.get_secret_value(),
            server_metadata_url=get_well_known_url(issuer, external=True),
            client_kwargs={
                "scope": self._settings.oidc_scopes,
                "code_challenge_method": "S256",
                "timeout": 10.0,
            },
        )
        about = application.load_server_metadata()
        if str(about["issuer"]).rstrip("/") != issuer:
            raise ValueError(f"its issuer is {about['issuer']!r:.200}")
        application.server_metadata = {name: about[name] for name in METADATA if name in about}
        application.server_metadata["id_token_signing_alg_values_supported"] = ALGORITHMS
        self._known = (time.monotonic(), application)
        return application

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Convert errors to SsoFailed, and log them."""
        try:
            yield
        except Exception as error:  # a provider may answer anything, at each step of the protocol
            self._known = None  # its keys may have changed
            logger.warning("sign-in at %s failed: %.500r", self._settings.oidc_issuer, error)
            raise SsoFailed from error
