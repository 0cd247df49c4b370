"""Paths that need no session or token."""

PUBLIC = {
    *("/", "/sign-in", "/healthz", "/readyz", "/static/{name}"),
    "/metrics",  # has a token of its own, see tests/app/http/test_monitoring_metrics.py
    *("/sign-in/sso", "/sign-in/sso/answer"),  # see tests/app/auth/test_sso.py
    "/shared",  # opens read-only links, see tests/app/compare/test_shared_links.py
}
