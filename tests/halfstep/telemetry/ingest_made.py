"""An in-memory ingest server that follows the protocol and fails on request."""

import gzip
import hashlib
import json
import re
import threading
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from halfstep import protocol
from halfstep.api_client.credentials import Credentials
from halfstep.telemetry.spool import FILE_HEADER, FRAME_HEADER

PIECE_BYTES, LARGEST_PIECE = 4 * 2**20, 32 * 2**20
OUTCOME = {"status", "step", "error", "exit_code", "lost_bytes"}


class Problem(Exception):
    """An error response of the server."""

    def __init__(self, status: int, code: str, **members: Any) -> None:
        super().__init__(code)
        self.status, self.body = status, {"code": code, "detail": f"It is {code}.", **members}


@dataclass
class Attempt:
    """The received parts of an attempt."""

    spool: dict[int, bytes] = field(default_factory=dict)  # whole frames, by sequence
    files: dict[str, bytes] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    outcome: dict[str, Any] | None = None

    @cached_property
    def sidecar(self) -> "Attempt":
        """The received spool of the attempt's sidecar."""
        return Attempt()

    @property
    def spooled(self) -> bytes:
        return b"".join(self.spool.values())

    @property
    def place(self) -> dict[str, int]:
        sequence = max(self.spool, default=0)
        return {"sequence": sequence, "offset": len(self.spool.get(sequence, b""))}


@dataclass
class Run:
    """A run and its attempts."""

    number: int
    described: dict[str, Any]
    attempts: dict[int, Attempt] = field(default_factory=dict)
    is_ended: bool = False  # by a person
    configs: list[Any] = field(default_factory=list)  # sent at each beginning


class IngestServer:
    """An ingest server that fails each request by the next of its faults, until none is left."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.protocol: int | None = protocol.PROTOCOL
        self.tokens = {"token"}
        self.creates_projects = False
        self.faults: list[str] = []  # "422", "500", "cut", "cut after", "stall", "page"
        self.requests: list[str] = []
        self.has_stalled, self.let_go = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._serve(0)

    def _serve(self, port: int) -> None:
        handler = type("Handler", (_Handler,), {"site": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=[0.02], daemon=True).start()

    @property
    def server(self) -> Credentials:
        return Credentials(self.url, "token")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self.stop()

    def stop(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()

    def restart(self) -> None:
        """Listen again at the same address."""
        self._serve(self._http.server_port)

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> dict[str, Any]:
        """Respond to a request."""
        if (method, path) == ("POST", "/api/v1/ingest"):
            return self._open(json.loads(body))
        found = re.fullmatch(r"/api/v1/ingest/(\d+)/(\d+)/(\d+|end|sidecar/\d+|files/.+)", path)
        assert found, path
        number, attempt_number, what = int(found[1]), int(found[2]), found[3]
        [run] = [run for run in self.runs.values() if run.number == number] or [None]
        if run is None or attempt_number not in run.attempts:
            raise Problem(404, "not_found")
        self._hold(run, attempt_number)
        attempt = run.attempts[attempt_number]
        if what == "end":
            attempt.outcome = json.loads(body)
            assert attempt.outcome is not None
            assert attempt.outcome.keys() == OUTCOME
            return {}
        if what.startswith("files/"):
            return self._put_file(attempt, unquote(what.removeprefix("files/")), query, body)
        if what.startswith("sidecar/"):
            attempt, what = attempt.sidecar, what.removeprefix("sidecar/")
        return self._put_spool(attempt, int(what), int(query["offset"]), body)

    def _open(self, described: dict[str, Any]) -> dict[str, Any]:
        names = "id attempt name project config tags started host versions command folder"
        assert described.keys() == {*names.split()}
        run = self.runs.setdefault(described["id"], Run(len(self.runs) + 7, described))
        run.configs.append(described["config"])
        number = described["attempt"]
        self._hold(run, number)
        attempt = run.attempts.setdefault(number, Attempt())
        begun = {"run": run.number, "attempt": number, "page": f"/runs/{run.number}"}
        sidecar = {f"sidecar_{name}": value for name, value in attempt.sidecar.place.items()}
        if self.creates_projects:
            begun["created_project"] = described["project"]
        return begun | attempt.place | sidecar

    def _hold(self, run: Run, attempt: int) -> None:
        if run.is_ended:
            raise Problem(409, "ended")
        if attempt < max(run.attempts, default=0):
            raise Problem(409, "stale_attempt")

    def _put_spool(
        self, attempt: Attempt, sequence: int, offset: int, body: bytes
    ) -> dict[str, Any]:
        data = gzip.decompress(body)
        assert 0 < len(data) <= LARGEST_PIECE
        at = attempt.place
        if sequence != at["sequence"] and not (sequence > at["sequence"] and offset == 0):
            raise Problem(409, "offset", **at)
        if sequence == at["sequence"] and offset != at["offset"]:
            raise Problem(409, "offset", **at)
        before = attempt.spool.get(sequence, b"")
        attempt.spool[sequence] = before + data[: _whole(data, has_header=offset == 0)]
        return attempt.place

    def _put_file(
        self, attempt: Attempt, path: str, query: dict[str, str], body: bytes
    ) -> dict[str, Any]:
        assert len(body) <= PIECE_BYTES
        assert json.dumps(path).encode() in attempt.spooled + attempt.sidecar.spooled, (
            "not named yet"
        )
        offset, size = int(query["offset"]), int(query["size"])
        had = attempt.files.setdefault(path, b"")
        if path in attempt.stored:
            return {"offset": size, "stored": True}
        if offset != len(had):
            raise Problem(409, "offset", offset=len(had))
        attempt.files[path] = data = had + body
        if len(data) == size:
            if hashlib.sha256(data).hexdigest() != query["sha256"]:
                del attempt.files[path]
                raise Problem(422, "invalid")
            attempt.stored.add(path)
        return {"offset": len(data), "stored": path in attempt.stored}

    def handle(self, request: "_Handler", method: str) -> None:
        """Respond, or fail by the next fault."""
        address = urlsplit(request.path)
        length = int(request.headers.get("content-length", 0))
        body = request.rfile.read(length)
        with self._lock:
            self.requests.append(f"{method} {address.path}")
            failure_kind = self.faults.pop(0) if self.faults else ""
        if failure_kind == "stall":
            self.has_stalled.set()
            self.let_go.wait()
        if failure_kind in ("stall", "cut"):
            request.close_connection = True
            return
        if failure_kind in ("500", "page"):
            request.reply(
                int(failure_kind) if failure_kind == "500" else 200, b"<html>", "text/html"
            )
            return
        if failure_kind == "422":
            request.reply(422, b'{"detail": "It is refused."}', "application/problem+json")
            return
        with self._lock:
            status, said = self._answer(request, method, address.path, address.query, body)
        if failure_kind == "cut after":
            request.close_connection = True
            return
        kind = "application/json" if status == 200 else "application/problem+json"
        request.reply(status, json.dumps(said).encode(), kind)

    def _answer(
        self, request: "_Handler", method: str, path: str, query: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        token = str(request.headers["authorization"]).removeprefix("Bearer ")
        try:
            if token not in self.tokens:
                raise Problem(401, "unauthorized")
            return 200, self.answer(method, path, dict(parse_qsl(query)), body)
        except Problem as problem:
            return problem.status, problem.body


class _Handler(BaseHTTPRequestHandler):
    """A request handler that forwards requests to the test's server."""

    protocol_version = "HTTP/1.1"
    site: IngestServer

    def do_GET(self) -> None:
        """Respond with the protocol version, as a server does in each response."""
        self.reply(405, b"{}", "application/problem+json")

    def do_POST(self) -> None:
        self.site.handle(self, "POST")

    def do_PUT(self) -> None:
        self.site.handle(self, "PUT")

    def reply(self, status: int, body: bytes, kind: str) -> None:
        """Send a response."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.site.protocol is not None:
            self.send_header(protocol.HEADER, str(self.site.protocol))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _whole(data: bytes, *, has_header: bool) -> int:
    """Return the end of the last complete frame."""
    end = FILE_HEADER.size if has_header else 0
    if len(data) < end:
        return 0
    while len(data) >= end + FRAME_HEADER.size:
        length, kind, checksum = FRAME_HEADER.unpack_from(data, end)
        start = end + FRAME_HEADER.size
        payload = data[start : start + length]
        if len(payload) < length or checksum != zlib.crc32(payload, zlib.crc32(bytes([kind]))):
            break
        end += FRAME_HEADER.size + length
    return end
