"""Shared helpers of the tests of shared links."""

from starlette.testclient import TestClient


def open_link(stranger: TestClient, secret: str) -> str:
    """Open a read-only link as its page's script does; return where it redirects."""
    answer = stranger.post("/shared", data={"secret": secret})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]
