"""Single sign-on: OpenID Connect's authorization code flow, with PKCE, state and nonce.

The state between the two requests is encrypted in a cookie, so that only the browser that began a
sign-in can finish it.
"""

import base64
import hashlib
import hmac
import json
import logging
import secrets
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx2
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from db.access import oidc_role_mapping
from db.access import secrets as encryption
from db.access.oidc_role_mapping import ANY_GROUP
from db.errors import HalfstepError, Invalid
from db.settings import Settings

logger = logging.getLogger(__name__)

#: Time limit for the sign-in at the provider.
MINUTES = 10
#: Lifetime of the cached endpoints and keys of the provider.
KNOWN_SECONDS = 600.0
ALGORITHMS = ["RS256", "RS512", "PS256", "ES256", "EdDSA"]
LEEWAY_SECONDS = 60
ANSWER_BYTES = 1 << 20


class SsoFailed(HalfstepError):
    """The sign-in at the provider failed. Try again; the server's log has the provider's error."""


@dataclass(frozen=True)
class Claims:
    """Claims about a user signed in by the provider."""

    subject: str  # issuer and id, which never change
    name: str
    groups: frozenset[str]


class Provider:
    """OIDC provider of these settings; thread-safe. Raises Invalid for invalid roles."""

    def __init__(self, settings: Settings) -> None:
        try:
            oidc_role_mapping.parsed(settings.oidc_roles)
        except ValueError as error:
            raise Invalid({"HALFSTEP_OIDC_ROLES": str(error)}) from error
        self._settings = settings
        self._known: tuple[float, dict[str, Any], KeySet] | None = None

    def begin(self, target: str) -> tuple[str, str]:
        """Return the URL to redirect the browser to, and the cookie to set.

        target: local path after the sign-in.  Raises SsoFailed.
        """
        about, _keys = self._discovered()
        begun = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
        digest = hashlib.sha256(begun["verifier"].encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": self._redirect_uri,
            "scope": self._settings.oidc_scopes,
            "state": begun["state"],
            "nonce": begun["nonce"],
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        content = json.dumps({**begun, "target": target, "time": time.time()})
        cookie = encryption.encrypt(self._settings.secrets_key, content)
        address = about["authorization_endpoint"]
        return f"{address}{'&' if '?' in address else '?'}{urlencode(query)}", cookie

    def finish(self, cookie: str, state: str, code: str) -> tuple[Claims, str]:
        """Return the user's claims and the target path. Raises SsoFailed."""
        begun = self._begun(cookie)
        if not hmac.compare_digest(state.encode(), begun["state"].encode()):
            raise SsoFailed("This response belongs to a sign-in of another browser.")
        about, _keys = self._discovered()
        answer = self._request(
            "POST",
            about["token_endpoint"],
            data={
                "grant_type": "authorization_code",
                "code": code,
                "redirect_uri": self._redirect_uri,
                "code_verifier": begun["verifier"],
                "client_id": self._settings.oidc_client_id,
            },
            auth=(
                self._settings.oidc_client_id,
                self._settings.oidc_client_secret.get_secret_value(),
            ),
        )
        claims = self._checked(str(answer.get("id_token", "")), begun["nonce"])
        if self._settings.oidc_groups_claim not in claims and "userinfo_endpoint" in about:
            bearer = {"Authorization": f"Bearer {answer.get('access_token', '')}"}
            more = self._request("GET", about["userinfo_endpoint"], headers=bearer)
            if more.get("sub") == claims["sub"]:
                claims = {**more, **claims}
        return self._claims(claims), str(begun["target"])

    @property
    def _redirect_uri(self) -> str:
        return f"{self._settings.address}/sign-in/sso/answer"

    def _begun(self, cookie: str) -> dict[str, Any]:
        try:
            text = encryption.decrypt(self._settings.secrets_key, cookie)
            begun: dict[str, Any] = json.loads(text)
        except (encryption.Unreadable, ValueError) as error:
            raise SsoFailed("This browser has not started a sign-in.") from error
        if time.time() - begun["time"] > MINUTES * 60:
            raise SsoFailed(f"The sign-in took more than {MINUTES} minutes. Start again.")
        return begun

    def _checked(self, id_token: str, nonce: str) -> dict[str, Any]:
        """Verify an identity token's signature, issuer, audience and expiry; return its claims."""
        about, keys = self._discovered()
        audience = self._settings.oidc_client_id
        rules = jwt.JWTClaimsRegistry(
            leeway=LEEWAY_SECONDS,
            iss={"essential": True, "value": about["issuer"]},
            aud={"essential": True, "value": audience},
            exp={"essential": True},
            sub={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            claims = jwt.decode(id_token, keys, algorithms=ALGORITHMS).claims
            rules.validate(claims)
        except (JoseError, ValueError) as error:
            self._known = None  # its keys may have changed
            logger.warning("the provider's token was rejected: %s", error)
            raise SsoFailed from error
        is_for_others = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if is_for_others and claims.get("azp") != audience:
            raise SsoFailed
        return claims

    def _claims(self, claims: dict[str, Any]) -> Claims:
        name = next(
            (claims[key] for key in ("preferred_username", "email", "name") if claims.get(key)),
            claims["sub"],
        )
        groups = claims.get(self._settings.oidc_groups_claim) or []
        groups = groups if isinstance(groups, list) else [groups]
        subject = f"{claims['iss']} {claims['sub']}"
        return Claims(subject, str(name), frozenset({ANY_GROUP, *map(str, groups)}))

    def _discovered(self) -> tuple[dict[str, Any], KeySet]:
        if self._known is not None and time.monotonic() - self._known[0] < KNOWN_SECONDS:
            return self._known[1], self._known[2]
        issuer = self._settings.oidc_issuer.rstrip("/")
        about = self._request("GET", f"{issuer}/.well-known/openid-configuration")
        if str(about.get("issuer", "")).rstrip("/") != issuer:
            logger.warning("the provider's issuer is %.200r, not %r", about.get("issuer"), issuer)
            raise SsoFailed
        try:
            keys = KeySet.import_key_set(self._request("GET", about["jwks_uri"]))  # type: ignore[arg-type]
        except (JoseError, KeyError, ValueError) as error:
            raise SsoFailed from error
        self._known = (time.monotonic(), about, keys)
        return about, keys

    def _request(self, method: str, address: str, **options: Any) -> dict[str, Any]:
        """Send a request to the provider. Raises SsoFailed, and logs the provider's error."""
        try:
            answer = httpx2.request(method, address, timeout=10.0, **options)
            if answer.status_code != 200 or len(answer.content) > ANSWER_BYTES:
                logger.warning("%s answered %d: %.500s", address, answer.status_code, answer.text)
                raise SsoFailed
            content = answer.json()
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            logger.warning("%s did not answer: %s", address, error)
            raise SsoFailed from error
        if not isinstance(content, dict):
            raise SsoFailed
        return content
