"""Security headers of every response, and the host names that the server accepts."""

import pytest
from starlette.testclient import TestClient

from tests.marks import looped


@pytest.mark.parametrize("path", ["/sign-in", "/healthz", "/nowhere", "/api/v1/runs"])
def test_every_answer_permits_only_this_server(stranger: TestClient, path: str) -> None:
    """Every response, also an error, forbids scripts, frames and forms of other sites."""
    headers = stranger.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert policy.count("unsafe-inline") == 1  # attributes, which Plotly sets
    assert "style-src-attr 'unsafe-inline'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == "no-store" or path == "/healthz"


@looped("path", ["/runs", "/sign-in", "/api/v1/runs", "/healthz", "/nowhere"])
def test_head_is_answered_as_get_is(browser: TestClient, path: str) -> None:
    """HEAD has the status and media type of GET, and no body."""
    head, answer = browser.head(path), browser.get(path)
    assert (head.status_code, head.content) == (answer.status_code, b"")
    assert head.headers["content-type"] == answer.headers["content-type"]


def test_the_import_map_has_a_fresh_nonce(stranger: TestClient) -> None:
    """The only inline script has the nonce of its response."""
    answers = [stranger.get("/sign-in") for _ in range(2)]
    nonces = [a.text.partition('type="importmap" nonce="')[2].partition('"')[0] for a in answers]
    assert nonces[0] != nonces[1]
    for answer, nonce in zip(answers, nonces, strict=True):
        assert f"'nonce-{nonce}'" in answer.headers["content-security-policy"]


@looped(
    "host, status",
    [
        ("localhost:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        ("evil.example", 400),
        ("127.0.0.1.evil.example", 400),
        ("", 400),
        ("[", 400),
    ],
)
def test_only_names_of_ours_are_answered(stranger: TestClient, host: str, status: int) -> None:
    """A foreign host name that resolves to this machine is rejected; a numeric address is
    accepted.
    """
    assert stranger.get("/sign-in", headers={"host": host}).status_code == status


@looped("says_its_size", [True, False])
@looped(
    "path, kind",
    [
        ("/sign-in", "application/x-www-form-urlencoded"),
        ("/sign-in", "multipart/form-data; boundary=b"),
        ("/runs", "multipart/form-data; boundary=b"),
        ("/api/v1/runs", "application/json"),
    ],
)
def test_a_body_that_is_too_large_is_rejected_unread(
    stranger: TestClient, path: str, kind: str, says_its_size: bool
) -> None:
    """Bodies above 1 MiB get 413 before they are parsed."""
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    pieces = [part, *[b"x" * 1024] * 1024]
    content = b"".join(pieces) if says_its_size else iter(pieces)
    answer = stranger.post(path, content=content, headers={"content-type": kind})
    assert answer.status_code == 413
    assert "at most 1,048,576 bytes" in answer.text
