"""Sends the content of a run's folder that a server does not have yet.

The server's position is authoritative, and is queried again after every error. `uploaded.json`
lists the files that are uploaded; without it they are offered again.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.api_client import credentials
from halfstep.api_client.credentials import Unreadable
from halfstep.api_client.errors import ApiError
from halfstep.clock import clock
from halfstep.sidecar.process import LOCK as SIDECAR_LOCK
from halfstep.telemetry import refuge
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.event_fields import NAME_CHARACTERS
from halfstep.telemetry.events import (
    MOST_TAGS,
    MOST_WORDS,
    PATH_CHARACTERS,
    Artifact,
    File,
    FileEvent,
    LogPart,
    SavedArtifact,
)
from halfstep.telemetry.folder_lock import FolderLock
from halfstep.telemetry.ingest import (
    PIECE_BYTES,
    FileOffset,
    Ingest,
    Recorded,
    SpoolOffset,
    Writer,
)
from halfstep.telemetry.refuge import spool_of
from halfstep.telemetry.run_folder import LAST_STEP, lives, read_outcome, read_run, write_json
from halfstep.telemetry.spool import WINDOW_BYTES, file_events, lost_bytes

REMEMBERED = "uploaded.json"
#: How long the end of an attempt waits for its sidecar, which child processes may keep alive.
SIDECAR_SECONDS = 10.0
#: Response codes after which no more of an attempt is sent: a newer one has replaced it, or a user
#: ended it.
ENDED = "ended"
WANTED_NO_MORE = ("stale_attempt", ENDED)
#: Response code of a file that has no room in its project.
OVER_QUOTA = "over_quota"
#: Status codes that do not concern the content sent: token, timeouts and load.
PASSING = (0, 401, 403, 408, 409, 425, 429)

Say = Callable[[str], None]


class RunSending:
    """All attempts of a run, oldest first: a newer one on the server fences earlier ones."""

    def __init__(
        self,
        folder: Path,
        ingest: Ingest,
        say: Say,
        *,
        tell: Say | None = None,
        with_checkpoints: bool = False,
        remembers: bool = True,
        sidecar_seconds: float = SIDECAR_SECONDS,
    ) -> None:
        """Send nothing yet.

        say: called with messages for users.  tell: with those that are no problem, if others are.
        with_checkpoints: also those without `upload`.
        remembers: write into the folder which files are sent.
        sidecar_seconds: how long the end of an attempt waits for that of its sidecar.
        """
        self.folder, self._ingest, self._say, self._tell = folder, ingest, say, tell or say
        self._with_checkpoints, self._remembers = with_checkpoints, remembers
        self._sidecar_seconds = sidecar_seconds
        self._sendings: dict[int, AttemptSending] = {}
        self._damaged: dict[int, str] = {}

    def send(self) -> None:
        """Send the current content. Raises ApiError; call it again to continue."""
        run = read_run(self.folder)
        for attempt in run.attempts:
            number = attempt.attempt
            if number not in self._sendings:
                self._sendings[number] = AttemptSending(
                    AttemptFiles(self.folder, number),
                    partial(describe, self.folder, number),
                    partial(lives, attempt),
                    self._ingest,
                    self._say,
                    tell=self._tell,
                    is_last=attempt is run.attempts[-1],
                    with_checkpoints=self._with_checkpoints,
                    remembers=self._remembers,
                    sidecar_seconds=self._sidecar_seconds,
                )
            try:
                self._sendings[number].send()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if attempt is run.attempts[-1]:
                    raise
                self._damaged[number] = f"attempt {number} is damaged and was not sent: {error}"
                self._say(f"{self.folder}: {self._damaged[number]}")

    @property
    def problems(self) -> list[str]:
        """Data that could not be sent, one line each."""
        lost = {number: sending.lost_bytes for number, sending in self._sendings.items()}
        return [
            *self._damaged.values(),
            *(
                f"{size:,} damaged bytes in the spool of attempt {number} are lost"
                for number, size in lost.items()
                if size
            ),
        ]

    def use_stored_token(self) -> None:
        """Continue with the token that `halfstep login` has stored for this server, if any."""
        with suppress(Unreadable):
            stored = credentials.read()
            if stored and stored.url == self._ingest.server.url:
                self._ingest.use(stored)

    @property
    def page(self) -> str | None:
        """The URL of the run's page, if the server has returned it."""
        if recorded := self._recorded:
            return self._ingest.server.url + recorded.page
        return None

    def is_sent(self, attempt: int) -> bool:
        """Return whether the server had everything of this attempt at the last `send`."""
        return self._sendings[attempt].is_sent

    def is_over(self, attempt: int) -> bool:
        """Return whether nothing more of this attempt will be sent."""
        return self._sendings[attempt].is_over

    def was_ended(self, attempt: int) -> bool:
        """Return whether the server has ended this attempt, and rejects more of it."""
        return self._sendings[attempt].was_ended

    @property
    def _recorded(self) -> Recorded | None:
        recorded = [sending.recorded for sending in self._sendings.values() if sending.recorded]
        return recorded[-1] if recorded else None


class AttemptSending:
    """Sender of one attempt."""

    def __init__(
        self,
        files: AttemptFiles,
        describe: Callable[[], Mapping[str, object]],
        lives: Callable[[], bool],
        ingest: Ingest,
        say: Say,
        *,
        tell: Say,
        is_last: bool,
        with_checkpoints: bool,
        remembers: bool,
        sidecar_seconds: float,
    ) -> None:
        """describe: returns the present description of the run.

        lives: returns whether the process that writes the attempt is alive on this machine.
        """
        self.recorded: Recorded | None = None
        self.is_sent = False
        self.lost_bytes = 0  # damaged bytes of its spool, known once the attempt is over
        self._files, self._ingest, self._describe = files, ingest, describe
        self._described: Mapping[str, object] = {}
        self._say, self._tell = say, tell
        self._lives = lives
        self._is_last, self._remembers = is_last, remembers
        self._with_checkpoints = with_checkpoints
        self._is_described = False
        self.is_over = False  # it has ended and the server has its outcome, or rejects more data
        self.was_ended = False  # by the server, which rejects more data
        self._sidecar_seconds = sidecar_seconds
        self._sidecar_deadline = math.inf  # time, by halfstep.clock, to wait for the sidecar's end
        self._spools = (
            SpoolSending(files.spool, files.attempt, "training", ingest, say),
            SpoolSending(files.sidecar, files.attempt, "sidecar", ingest, say),
        )

    def send(self) -> None:
        """Send the current content."""
        if self.is_over:
            return
        self.is_sent = False
        try:
            self._send()
        except ApiError as error:
            if error.code not in WANTED_NO_MORE:
                self.recorded = None  # query the server's position again
                raise
            self.is_over, self.was_ended = True, error.code == ENDED
            self.is_sent = self._files.attempt in self._read_uploaded().get("sent", ())
            if self._is_last:
                rest = f"attempt {self._files.attempt} stays in {self._files.folder}"
                self._say(f"{error} {rest}, and no more of it is sent")

    def _send(self) -> None:
        # Read first: once the outcome exists, no more data is spooled, and no setting is changed.
        outcome = read_outcome(self._files, lives=self._lives())
        described = self._describe()
        if described != self._described:  # e.g. by a late `configure`
            self._described, self.recorded = described, None
        recorded = self.recorded or self._open()
        has_sidecar_ended = self._has_sidecar_ended()
        for spool in self._spools:
            while spool.send_piece(recorded):
                pass
            self._send_files(recorded, spool)
        self._send_description(recorded)
        if outcome is not None and self._sidecar_deadline == math.inf:
            self._sidecar_deadline = clock() + self._sidecar_seconds
        if outcome is not None and (has_sidecar_ended or clock() >= self._sidecar_deadline):
            self.lost_bytes = self._count_lost(outcome.spool_bytes)
            self._ingest.end(recorded, outcome, self.lost_bytes)
            self.is_over = True
        self.is_sent = self.is_over or outcome is None
        if self.is_over or not self._is_last:
            self._write_uploaded(recorded)

    def _send_description(self, recorded: Recorded) -> None:
        """Send git state, packages and source, once they are there."""
        path = refuge.within(self._files.folder, self._files.description.name)
        if self._is_described or not path.exists():
            return
        try:
            self._ingest.describe(recorded, json.loads(path.read_text()))
        except ApiError as error:
            if error.status in PASSING or error.status >= 500:
                raise
            if error.status not in (404, 405):  # of servers of earlier versions
                self._say(f"the git state of {self._files.folder} is rejected: {error}")
        except ValueError as error:
            self._say(f"{path} is damaged and is not sent: {error}")
        self._is_described = True

    def _count_lost(self, written_bytes: int) -> int:
        """Return how many bytes of the spool are damaged, or missing of those written."""
        spool = [path for _, path in spool_of(self._files.spool, self._files.attempt)]
        if not spool and (self._files.folder / LAST_STEP).exists():
            return 0  # deleted by `halfstep upload --delete`
        missing = max(written_bytes - sum(path.stat().st_size for path in spool), 0)
        return missing + sum(lost_bytes(path, is_truncated=missing > 0) for path in spool)

    def _has_sidecar_ended(self) -> bool:
        """Return whether the sidecar, if there was one, writes nothing more."""
        return not FolderLock(self._files.folder / SIDECAR_LOCK).is_held()

    def _open(self) -> Recorded:
        recorded = self._ingest.open(self._described)
        self.recorded = recorded
        if recorded.created_project:
            self._tell(f"created the project {recorded.created_project}")
        remembered = self._read_uploaded()
        is_same = not self._with_checkpoints and remembered.get("run") == recorded.run
        for spool in self._spools:
            sent_to = remembered.get(spool.files_key, {}).get(str(recorded.attempt), (0, 0))
            spool.begin(recorded, SpoolOffset(*sent_to) if is_same else None)
        return recorded

    # ---- Files ---------------------------------------------------------------------------------

    def _send_files(self, recorded: Recorded, spool: "SpoolSending") -> None:
        """Send the files that the server's recorded events name."""
        before = spool.files_sent_to
        try:
            for event, place in spool.naming_files():
                for file in self._files_of(event):
                    self._send_file(recorded, file)
                spool.files_sent_to = place
        finally:
            if spool.files_sent_to != before:
                self._write_uploaded(recorded)

    def _files_of(self, event: FileEvent) -> Sequence[File]:
        if isinstance(event, Artifact | LogPart):
            return [event]
        if isinstance(event, SavedArtifact):
            return list({file.path: file for file in event.files}.values())
        return event.files if event.upload is True or self._with_checkpoints else []

    def _send_file(self, recorded: Recorded, file: File) -> None:
        """Send a file if it still exists with the size that the event has."""
        path = refuge.within(self._files.folder, file.path)
        size = path.stat().st_size if path.is_file() else None
        if size != file.size_bytes:
            now = "is gone" if size is None else f"has {size:,} bytes, not {file.size_bytes:,}"
            self._say(f"{path} {now}, and is not sent")
            return
        place = FileOffset(0, is_stored=False)
        try:
            while not place.is_stored:
                data = _read(path, place.offset)
                following = self._ingest.put_file(recorded, file, place.offset, data)
                if following == place:
                    raise ApiError(422, f"the server does not get past byte {place.offset:,}")
                place = following
        except ApiError as error:
            if error.code == OVER_QUOTA:
                later = f"`halfstep upload {self._files.folder} --checkpoints` sends it later"
                self._say(f"{path} is rejected: {error}; {later}")
                return
            if error.status in PASSING or error.status >= 500:
                raise
            self._say(f"{path} is rejected: {error}")

    # ---- uploaded.json -------------------------------------------------------------------------

    def _read_uploaded(self) -> dict[str, Any]:
        try:
            content = dict(json.loads((self._files.folder / REMEMBERED).read_text()))
        except (OSError, ValueError):
            return {}
        return content if content.get("url") == self._ingest.server.url else {}

    def _write_uploaded(self, recorded: Recorded) -> None:
        if not self._remembers:
            return
        known = self._read_uploaded()
        if known.get("run") != recorded.run:
            known = {"url": self._ingest.server.url, "run": recorded.run, "sent": []}
        for spool in self._spools:
            sent_to = known.setdefault(spool.files_key, {})
            sent_to[str(recorded.attempt)] = list(spool.files_sent_to)
        if self.is_sent:
            known["sent"] = sorted({*known["sent"], recorded.attempt})
        with suppress(OSError):  # a full disk: the files are offered again later
            write_json(self._files.folder / REMEMBERED, known)


class SpoolSending:
    """Sender of one spool of an attempt: the training's, or the sidecar's."""

    def __init__(
        self, folder: Path, attempt: int, writer: Writer, ingest: Ingest, say: Say
    ) -> None:
        self.files_key = "files" if writer == "training" else "sidecar_files"  # in uploaded.json
        self.files_sent_to = SpoolOffset(0, 0)  # files named before this are sent
        self._folder, self._attempt, self._writer = folder, attempt, writer
        self._ingest, self._say = ingest, say
        self._place = SpoolOffset(0, 0)
        self._fruitless: tuple[SpoolOffset, int] | None = None  # a piece without one whole frame

    def begin(self, recorded: Recorded, files_sent_to: SpoolOffset | None) -> None:
        """Continue where the server is. files_sent_to: from an earlier process, if known."""
        self._place, self._fruitless = recorded.places[self._writer], None
        if files_sent_to is not None:
            self.files_sent_to = min(files_sent_to, self._place)  # less if the server was reset

    def send_piece(self, recorded: Recorded) -> bool:
        """Send the next bytes of the spool; return whether there may be more."""
        # List before reading: a file that has a successor here gets no more frames.
        for sequence, path in spool_of(self._folder, self._attempt):
            if sequence < self._place.sequence:
                continue
            here = self._place if sequence == self._place.sequence else SpoolOffset(sequence, 0)
            data = _read(path, here.offset)
            if not data or self._fruitless == (here, len(data)):
                continue
            end = self._put(recorded, here, data)
            if end == here and len(data) == PIECE_BYTES:  # one large frame, or much is damaged
                end = self._put(recorded, here, _read(path, here.offset, WINDOW_BYTES))
            if end != here:
                self._place = end
                return True
            if len(data) == PIECE_BYTES:
                self._say(
                    f"{path} is damaged from byte {here.offset:,} on: no whole frame follows "
                    f"within {WINDOW_BYTES:,} bytes; what is there is lost"
                )
            self._fruitless = here, len(data)  # the last frame is cut short, or being written
        return False

    def naming_files(self) -> Iterator[tuple[FileEvent, SpoolOffset]]:
        """Yield the events that name files not sent yet, each with its end offset."""
        for sequence, path in spool_of(self._folder, self._attempt):
            start = self.files_sent_to.offset if sequence == self.files_sent_to.sequence else 0
            if self.files_sent_to.sequence <= sequence <= self._place.sequence:
                is_partial = sequence == self._place.sequence
                for event, offset in file_events(path, start):
                    if is_partial and offset > self._place.offset:
                        break
                    yield event, SpoolOffset(sequence, offset)

    def _put(self, recorded: Recorded, here: SpoolOffset, data: bytes) -> SpoolOffset:
        return self._ingest.put_spool(recorded, self._writer, here, data)


def describe(folder: Path, number: int) -> dict[str, Any]:
    """Return an attempt's description for the server, within the server's limits."""
    run = read_run(folder)
    [attempt] = [entry for entry in run.attempts if entry.attempt == number]
    return {
        "id": run.id,
        "attempt": attempt.attempt,
        "name": run.name[:NAME_CHARACTERS],
        "project": run.project and run.project[:NAME_CHARACTERS],
        "config": run.config,
        "tags": [tag[:NAME_CHARACTERS] for tag in run.tags[:MOST_TAGS]],
        "started": run.started,
        "host": attempt.host[:NAME_CHARACTERS],
        "versions": attempt.versions,
        "command": [_text(word) for word in attempt.command[:MOST_WORDS]],
        "folder": _text(attempt.folder),
    }


def _text(text: str) -> str:
    """Return a command-line argument or path in UTF-8, truncated: a path need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()[:PATH_CHARACTERS]


def _read(path: Path, offset: int, most: int = PIECE_BYTES) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(most)
