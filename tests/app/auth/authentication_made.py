"""Parts of the tests of authentication that other tests use, too."""

#: The last one answers with another address, and that one asks.
PUBLIC = {"/", "/sign-in", "/healthz", "/readyz", "/static/{name}"}
