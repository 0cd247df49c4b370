"""HTTP client that uploads a watched run: five requests, each of which may be repeated.

    POST /api/v1/ingest                                          start or continue an attempt
    PUT  /api/v1/ingest/{run}/{attempt}/{sequence}?offset=       bytes of a file of its spool
    PUT  /api/v1/ingest/{run}/{attempt}/sidecar/{sequence}?offset=  of its sidecar's spool
    PUT  /api/v1/ingest/{run}/{attempt}/files/{path}?offset=     bytes of a checkpoint or artifact
    POST /api/v1/ingest/{run}/{attempt}/end                      outcome of the attempt

A server that expects another offset responds with 409 "offset" and the offset that it expects.
The methods return that offset like one of a successful request: the next upload starts there.
"""

import gzip
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias
from urllib.parse import quote

import httpx2

from halfstep.api_client.credentials import Credentials
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import content, naming, spoken
from halfstep.telemetry.events import File
from halfstep.telemetry.plain_json import plain

PIECE_BYTES = 4 * 2**20  # most that the server accepts in one request
PATIENCE_SECONDS = 15.0  # timeout of a connection without traffic
FASTEST = 1  # gzip level: leaves CPU time to the training


class SpoolOffset(NamedTuple):
    """Position of the next byte in an attempt's spool: file number and offset in that file."""

    sequence: int
    offset: int


#: The process that writes a spool of an attempt.
Writer: TypeAlias = Literal["training", "sidecar"]


class Recorded(NamedTuple):
    """State of an attempt on the server."""

    run: int
    attempt: int
    places: Mapping[Writer, SpoolOffset]  # end of the recorded part of each spool
    page: str  # path of the run's page, without the host


class FileOffset(NamedTuple):
    """Offset of the next byte of a file."""

    offset: int
    is_stored: bool  # it is complete and its checksum matches


Query: TypeAlias = Mapping[str, str | int]


class Ingest:
    """Connection to a server's ingest API. A context manager, which closes it.

    The methods raise ApiError: status 0 if the server does not respond, code "stale_attempt" or
    "ended" if it accepts no more data of this attempt.
    """

    def __init__(self, server: Credentials, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.server = server
        self._http = httpx2.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"},
            timeout=patience_seconds,
            event_hooks=naming(server.origin),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def use(self, server: Credentials) -> None:
        """Use another token for later requests."""
        self.server = server
        self._http.headers["Authorization"] = f"Bearer {server.token}"
        self._http.event_hooks = naming(server.origin)

    def open(self, described: Mapping[str, Any]) -> Recorded:
        """Start or continue an attempt. described: the request body of the server's API."""
        with spoken():
            response = self._send("POST", "/api/v1/ingest", json=plain(described))
            places: dict[Writer, SpoolOffset] = {
                "training": SpoolOffset(response["sequence"], response["offset"]),
                "sidecar": SpoolOffset(response["sidecar_sequence"], response["sidecar_offset"]),
            }
            return Recorded(response["run"], response["attempt"], places, response["page"])

    def put_spool(
        self, recorded: Recorded, writer: Writer, place: SpoolOffset, data: bytes
    ) -> SpoolOffset:
        """Send bytes of a spool file; return the end of the last recorded frame."""
        spool = _address(recorded) + ("/sidecar" if writer == "sidecar" else "")
        with spoken():
            response = self._put(
                f"{spool}/{place.sequence}",
                {"offset": place.offset},
                gzip.compress(data, FASTEST),
                {"Content-Encoding": "gzip"},
            )
            return SpoolOffset(response["sequence"], response["offset"])

    def put_file(self, recorded: Recorded, file: File, offset: int, data: bytes) -> FileOffset:
        """Send bytes of a file that an event names."""
        query: Query = {"offset": offset, "size": file.size_bytes, "sha256": file.sha256}
        with spoken():
            body = self._put(f"{_address(recorded)}/files/{quote(file.path)}", query, data, {})
            return FileOffset(body["offset"], bool(body.get("stored", False)))

    def end(self, recorded: Recorded, outcome: Mapping[str, Any]) -> None:
        """Send the outcome of the attempt. outcome: content of its outcome file."""
        names = ("status", "step", "error", "exit_code", "lost_bytes")
        ended = {name: outcome.get(name) for name in names}
        with spoken():
            self._send("POST", f"{_address(recorded)}/end", json=plain(ended))

    def _put(
        self, address: str, query: Query, data: bytes, headers: Mapping[str, str]
    ) -> Mapping[str, Any]:
        try:
            return self._send("PUT", address, params=query, content=data, headers=headers)
        except ApiError as error:
            if error.code != "offset":
                raise
            return error.problem

    def _send(self, method: str, address: str, **request: Any) -> Mapping[str, Any]:
        body: Mapping[str, Any] = content(self._http.request(method, address, **request))
        return body


def _address(recorded: Recorded) -> str:
    return f"/api/v1/ingest/{recorded.run}/{recorded.attempt}"
