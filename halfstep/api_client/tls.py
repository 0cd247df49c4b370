"""TLS of the API client, set up at the first https connection."""

import ssl
from typing import Any

import httpx2


class DeferredContext(ssl.SSLContext):
    """The HTTP client's default TLS context, which loads the certificates when it is used.

    That takes 60 ms, which a command or a script for a server without TLS saves. A redirect to
    https, such as to a bucket, is verified like any other connection.
    """

    def __new__(cls) -> "DeferredContext":
        """Return a context that verifies, even if it were used itself."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Wrap a socket by the default context."""
        return self._context().wrap_socket(*arguments, **options)

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """Wrap buffers, for TLS to a server behind a proxy with TLS, by the default context."""
        return self._context().wrap_bio(*arguments, **options)

    def _context(self) -> ssl.SSLContext:
        if not hasattr(self, "_made"):
            self._made = httpx2.create_ssl_context()
        return self._made
