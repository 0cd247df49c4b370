"""Command-line messages for a server of another version."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from halfstep import protocol
from tests.site import type_command

WORKER = {"id": 1, "name": "w1", "host": "h", "alive": False, "devices": [], "drained_at": None}


class Handler(BaseHTTPRequestHandler):
    """A server that returns a worker as an earlier version described it."""

    protocol_number: int | None = None

    def do_GET(self) -> None:
        body = json.dumps({"workers": [WORKER], "total": 1, "next": None}).encode()
        is_known = self.path.startswith("/api/v1/workers")
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", "application/json")
        if self.protocol_number is not None:
            self.send_header(protocol.HEADER, str(self.protocol_number))
        self.end_headers()
        self.wfile.write(body if is_known else b'{"detail": "Not Found"}')

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Handler]]:
    """Yield the handler of a server that the environment names."""
    handler = type("Handler", (Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        Thread(target=http.serve_forever, args=[0.02], daemon=True).start()
        monkeypatch.setenv("HALFSTEP_URL", f"http://127.0.0.1:{http.server_port}")
        monkeypatch.setenv("HALFSTEP_TOKEN", "token")
        yield handler
        http.shutdown()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["workers"], "halfstep: the response has no 'stopped_at'. The server is older"),
        (["report", "list"], "api/v1/reports is not an address of a Halfstep server"),
    ],
)
def test_what_an_older_server_lacks_is_one_sentence(
    server: type[Handler], words: list[str], problem: str
) -> None:
    """The message about a server without a feature is one sentence that names what to update."""
    ended = str(type_command(*words))
    assert problem in ended
    assert protocol.OLDER_SERVER in ended


def test_a_wrong_response_of_this_version_is_a_traceback(server: type[Handler]) -> None:
    """A wrong response from a server of the same version is an internal error with a traceback."""
    server.protocol_number = protocol.PROTOCOL
    with pytest.raises(KeyError):
        type_command("workers")
    assert protocol.OLDER_SERVER not in str(type_command("report", "list"))
