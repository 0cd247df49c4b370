"""How a watched run reaches a server: four requests, each of which may be repeated.

    POST /api/v1/ingest                                          an attempt begins, or goes on
    PUT  /api/v1/ingest/{run}/{attempt}/{sequence}?offset=       bytes of a file of its spool
    PUT  /api/v1/ingest/{run}/{attempt}/files/{path}?offset=     bytes of a checkpoint or artifact
    POST /api/v1/ingest/{run}/{attempt}/end                      how it ended

A server that is elsewhere than we believed answers 409 "offset" and where it is, which is as good
an answer as any: what these methods return is where to go on from.
"""

import gzip
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeAlias
from urllib.parse import quote

import httpx2

from halfstep.api_client.credentials import Credentials
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import content, naming, spoken
from halfstep.telemetry.spool import plain

PIECE_BYTES = 4 * 2**20  # which the server takes at once
PATIENCE_SECONDS = 15.0  # with a connection on which nothing moves
FASTEST = 1  # of gzip's levels: the training has a use for this processor too


class SpoolOffset(NamedTuple):
    """In the spool of an attempt: where the next byte goes."""

    sequence: int
    offset: int


class Recorded(NamedTuple):
    """What the server has of an attempt. page: its address there, without the server's own."""

    run: int
    attempt: int
    place: SpoolOffset
    page: str


class FileOffset(NamedTuple):
    """In a file: where the next byte goes, and whether all have come and are the right ones."""

    offset: int
    is_stored: bool


Query: TypeAlias = Mapping[str, str | int]


class Ingest:
    """A connection to a server that takes watched runs. A context manager, which closes it.

    Its methods raise ApiError: of status 0 if the server does not answer, of code "stale_attempt"
    or "ended" if it wants no more of this attempt.
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
        """Go on with another token."""
        self.server = server
        self._http.headers["Authorization"] = f"Bearer {server.token}"
        self._http.event_hooks = naming(server.origin)

    def open(self, described: Mapping[str, Any]) -> Recorded:
        """Say which attempt of which run is to come. described: as the server's API has it."""
        with spoken():
            told = self._send("POST", "/api/v1/ingest", json=plain(described))
            place = SpoolOffset(told["sequence"], told["offset"])
            return Recorded(told["run"], told["attempt"], place, told["page"])

    def put_spool(self, recorded: Recorded, place: SpoolOffset, data: bytes) -> SpoolOffset:
        """Send bytes of a file of the spool; return the end of the last frame that is recorded."""
        with spoken():
            told = self._put(
                f"{_address(recorded)}/{place.sequence}",
                {"offset": place.offset},
                gzip.compress(data, FASTEST),
                {"Content-Encoding": "gzip"},
            )
            return SpoolOffset(told["sequence"], told["offset"])

    def put_file(
        self, recorded: Recorded, file: Mapping[str, Any], offset: int, data: bytes
    ) -> FileOffset:
        """Send bytes of a file. file: path, size_bytes and sha256, as an event names it."""
        query = {"offset": offset, "size": file["size_bytes"], "sha256": file["sha256"]}
        with spoken():
            told = self._put(f"{_address(recorded)}/files/{quote(file['path'])}", query, data, {})
            return FileOffset(told["offset"], bool(told.get("stored", False)))

    def end(self, recorded: Recorded, outcome: Mapping[str, Any]) -> None:
        """Say how the attempt ended. outcome: as its file in the run's folder has it."""
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
        told: Mapping[str, Any] = content(self._http.request(method, address, **request))
        return told


def _address(recorded: Recorded) -> str:
    return f"/api/v1/ingest/{recorded.run}/{recorded.attempt}"
