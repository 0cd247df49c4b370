"""HTTP client that uploads a watched run: six requests, each of which may be repeated.

    POST /api/v1/ingest                                          start or continue an attempt
    PUT  /api/v1/ingest/{run}/{attempt}/{sequence}?offset=       bytes of a file of its spool
    PUT  /api/v1/ingest/{run}/{attempt}/sidecar/{sequence}?offset=  of its sidecar's spool
    PUT  /api/v1/ingest/{run}/{attempt}/files/{path}?offset=     bytes of a checkpoint or artifact
    POST /api/v1/ingest/{run}/{attempt}/source                   git state, packages and source
    POST /api/v1/ingest/{run}/{attempt}/end                      outcome of the attempt

A server that expects another offset responds with 409 "offset" and the offset that it expects.
The methods return that offset like one of a successful request: the next upload starts there.
"""

import gzip
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from msgspec import Struct

from halfstep import protocol
from halfstep.api_client.credentials import Credentials, is_local
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import content, error_of, naming, spoken
from halfstep.api_client.tls import DeferredContext
from halfstep.telemetry.attempt_messages import WatchedOutcome
from halfstep.telemetry.event_fields import TEXT_CHARACTERS
from halfstep.telemetry.events import File
from halfstep.telemetry.plain_json import plain
from halfstep.telemetry.validation import explain

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
    created_project: str | None  # the run's project, if it is new


class FileOffset(NamedTuple):
    """Offset of the next byte of a file."""

    offset: int
    is_stored: bool  # it is complete and its checksum matches


class Response(Struct, frozen=True, kw_only=True):
    """Base class of the server's responses; unknown fields are ignored."""


R = TypeVar("R", bound=Response)


class Begun(Response, frozen=True, kw_only=True):
    """Response to a started or continued attempt."""

    run: int  # id
    attempt: int
    # Where to continue the spool of the training, and that of its sidecar.
    sequence: int
    offset: int
    sidecar_sequence: int
    sidecar_offset: int
    page: str  # path of the run's page, without the host
    created_project: str | None = None  # absent from servers of earlier versions


class SpoolEnd(Response, frozen=True, kw_only=True):
    """Response to bytes of a spool: the end of the recorded frames, or the expected position."""

    sequence: int
    offset: int


class FileEnd(Response, frozen=True, kw_only=True):
    """Response to bytes of a file."""

    offset: int  # of the next byte
    stored: bool = False  # complete, with the right checksum; absent if another offset is expected


class Acknowledged(Response, frozen=True, kw_only=True):
    """Response to the source or the end of an attempt; none of its fields is needed."""


Query: TypeAlias = Mapping[str, str | int]


class Ingest:
    """Connection to a server's ingest API. A context manager, which closes it.

    The methods raise ApiError: status 0 if the server does not respond, code "stale_attempt" or
    "ended" if it accepts no more data of this attempt.
    """

    def __init__(self, server: Credentials, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.server = server
        self._is_checked = False
        self._http = httpx2.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"},
            timeout=patience_seconds,
            verify=DeferredContext(),
            event_hooks=naming(server.origin),
            trust_env=not is_local(server.url),  # a proxy cannot reach this machine's addresses
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
        """Start or continue an attempt. described: the request body of the server's API.

        A server that is too old for this client is not asked: it would begin a run that never ends.
        """
        with spoken():
            self._check_server()
            begun = self._send("POST", "/api/v1/ingest", Begun, json=plain(described))
            places: dict[Writer, SpoolOffset] = {
                "training": SpoolOffset(begun.sequence, begun.offset),
                "sidecar": SpoolOffset(begun.sidecar_sequence, begun.sidecar_offset),
            }
            return Recorded(begun.run, begun.attempt, places, begun.page, begun.created_project)

    def _check_server(self) -> None:
        """Raise ApiError if the server is too old for this client."""
        if self._is_checked:
            return
        answer = self._http.get("/api/v1/ingest")  # 405, from each version
        if answer.status_code >= 500:
            raise error_of(answer)
        if protocol.is_older(answer.headers.get(protocol.HEADER)):
            raise ApiError(426, protocol.OLDER_SERVER, problem={"code": "older_server"})
        self._is_checked = True

    def put_spool(
        self, recorded: Recorded, writer: Writer, place: SpoolOffset, data: bytes
    ) -> SpoolOffset:
        """Send bytes of a spool file; return the end of the last recorded frame."""
        spool = _address(recorded) + ("/sidecar" if writer == "sidecar" else "")
        with spoken():
            end = self._put(
                f"{spool}/{place.sequence}",
                SpoolEnd,
                {"offset": place.offset},
                gzip.compress(data, FASTEST),
                {"Content-Encoding": "gzip"},
            )
            return SpoolOffset(end.sequence, end.offset)

    def put_file(self, recorded: Recorded, file: File, offset: int, data: bytes) -> FileOffset:
        """Send bytes of a file that an event names."""
        query: Query = {"offset": offset, "size": file.size_bytes, "sha256": file.sha256}
        with spoken():
            address = f"{_address(recorded)}/files/{quote(file.path)}"
            end = self._put(address, FileEnd, query, data, {})
            return FileOffset(end.offset, end.stored)

    def describe(self, recorded: Recorded, state: Mapping[str, Any]) -> None:
        """Send git state, packages and source of the attempt."""
        with spoken():
            address = f"{_address(recorded)}/source"
            self._send("POST", address, Acknowledged, json=plain(state))

    def end(self, recorded: Recorded, outcome: WatchedOutcome, lost_bytes: int = 0) -> None:
        """Send the outcome of the attempt. lost_bytes: damaged bytes of its spool."""
        ended = {
            "status": outcome.status,
            "step": outcome.step,
            "error": outcome.error and outcome.error[-TEXT_CHARACTERS:],  # a traceback
            "exit_code": outcome.exit_code,
            "lost_bytes": lost_bytes,
        }
        if outcome.preemption:
            ended["preemption"] = outcome.preemption
        with spoken():
            self._send("POST", f"{_address(recorded)}/end", Acknowledged, json=plain(ended))

    def _put(
        self, address: str, kind: type[R], query: Query, data: bytes, headers: Mapping[str, str]
    ) -> R:
        try:
            return self._send("PUT", address, kind, params=query, content=data, headers=headers)
        except ApiError as error:
            if error.code != "offset":
                raise
            return _response(error.problem, kind)

    def _send(self, method: str, address: str, kind: type[R], **request: Any) -> R:
        return _response(content(self._http.request(method, address, **request)), kind)


def _response(body: object, kind: type[R]) -> R:
    """Return a response as its class. Raises ApiError if it is none of this API."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise ApiError(
            0, f"the response is not from a Halfstep server: {explain(error, body, kind)}"
        ) from error


def _address(recorded: Recorded) -> str:
    return f"/api/v1/ingest/{recorded.run}/{recorded.attempt}"
