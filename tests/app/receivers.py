"""Receivers of alerts: an HTTP server and an SMTP server that record requests."""

import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """A receiver that records requests, with the status, headers and body of its response."""

    port: int = 0
    got: list[Any] = field(default_factory=list)
    answer: tuple[int, dict[str, str], bytes] = (200, {}, b"ok")
    silent: threading.Event | None = None  # until it is set there is no answer

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/hook/secret-path"


@contextmanager
def http_receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """An HTTP server that receives webhooks."""
    result = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            result.got.append((dict(self.headers), body))
            if result.silent is not None:
                result.silent.wait()
            status, headers, answer = result.answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        result.port = server.server_address[1]
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        yield from _serving(server, result)


@contextmanager
def smtp_receiver() -> Iterator[Receiver]:
    """A mail server that accepts any message: got has pairs of recipients and text."""
    result = Receiver()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            to: list[str] = []
            self.wfile.write(b"220 here\r\n")
            while line := self.rfile.readline().decode().strip():
                word = line.upper()
                if word.startswith("RCPT TO:"):
                    to.append(line[8:].strip("<> "))
                if result.answer[0] != 200 and word.startswith("RCPT"):
                    self.wfile.write(b"550 no such user\r\n")
                elif word == "DATA":
                    self.wfile.write(b"354 go on\r\n")
                    text = b""
                    while not text.endswith(b"\r\n.\r\n"):
                        text += self.rfile.readline()
                    result.got.append((to, text.decode()))
                    self.wfile.write(b"250 ok\r\n")
                elif word == "QUIT":
                    self.wfile.write(b"221 bye\r\n")
                    return
                else:
                    self.wfile.write(b"250 ok\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        result.port = server.server_address[1]
        yield from _serving(server, result)


def _serving(server: socketserver.BaseServer, receiver: Receiver) -> Iterator[Receiver]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
