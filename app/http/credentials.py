"""Credentials of requests: bearer tokens of scripts, session cookies of browsers."""

from urllib.parse import urlsplit

from fastapi import Request

from db.settings import Settings


def bearer_token(request: Request) -> str | None:
    """Return the bearer token; None for a browser."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def secret_of(request: Request) -> str:
    """Return the token or the secret of the session that a request would authenticate by."""
    token = bearer_token(request)
    return request.cookies.get(cookie_of(request), "") if token is None else token


def cookie_of(request: Request) -> str:
    """Return the name of the session cookie; over TLS with a prefix that other hosts cannot set.

    A page on plain HTTP, or on another name of the same domain, cannot set a `__Host-` cookie. That
    name is for cookies of the whole host, so below a path prefix it is `__Secure-`, which plain
    HTTP cannot set.
    """
    settings = request.app.state.settings
    name = cookie_name(settings)
    if not is_secure(request):
        return name
    return f"__Secure-{name}" if settings.path_prefix else f"__Host-{name}"


def is_secure(request: Request) -> bool:
    """Return whether the request came over TLS, perhaps terminated by a trusted proxy."""
    return request.url.scheme == "https"


def cookie_name(settings: Settings) -> str:
    """Return the name of the cookie, with the port: browsers share cookies between ports of a host.

    The port is that of the public address, which all servers behind it have in common.
    """
    public = urlsplit(settings.public_url)
    usual = 443 if public.scheme == "https" else 80
    return f"halfstep-{(public.port or usual) if settings.public_url else settings.port}"
