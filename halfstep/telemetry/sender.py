"""Sends the content of a run's folder that a server does not have yet.

Only the server knows its position, and is queried again after every error. Besides the spool,
`uploaded.json` lists what is uploaded; without it that is offered again, or kept.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from halfstep.api_client import credentials
from halfstep.api_client.credentials import Unreadable
from halfstep.api_client.errors import ApiError
from halfstep.telemetry.attempt_files import AttemptFiles
from halfstep.telemetry.events import MOST_WORDS, NAME_CHARACTERS, PATH_CHARACTERS, TEXT_CHARACTERS
from halfstep.telemetry.ingest import PIECE_BYTES, FileOffset, Ingest, Recorded, SpoolOffset
from halfstep.telemetry.run_folder import lives, read_outcome, read_run, write_json
from halfstep.telemetry.spool import WINDOW_BYTES, Event, file_events, lost_bytes, spool_of

REMEMBERED = "uploaded.json"
MOST_TAGS = 50
#: Answers that end the sending of an attempt: a later one has taken over, or a person ended it.
WANTED_NO_MORE = ("stale_attempt", "ended")
#: Answers that are not about what was sent: the token, time and load.
PASSING = (0, 401, 403, 408, 409, 425, 429)

Say = Callable[[str], None]


class RunSending:
    """All attempts of a run, oldest first: a later one on the server fences those before it."""

    def __init__(
        self, folder: Path, ingest: Ingest, say: Say, *, with_checkpoints: bool = False
    ) -> None:
        """say: told sentences for people.  with_checkpoints: also those without `upload`."""
        self.folder, self._ingest, self._say = folder, ingest, say
        self._with_checkpoints = with_checkpoints
        self._sendings: dict[int, AttemptSending] = {}
        self._damaged: dict[int, str] = {}

    def send(self) -> None:
        """Send the current content. Raises ApiError; call it again to continue."""
        run = read_run(self.folder)
        for attempt in run["attempts"]:
            number = attempt["attempt"]
            if number not in self._sendings:
                self._sendings[number] = AttemptSending(
                    AttemptFiles(self.folder, number),
                    _described(run, attempt),
                    partial(lives, attempt),
                    self._ingest,
                    self._say,
                    is_last=attempt is run["attempts"][-1],
                    with_checkpoints=self._with_checkpoints,
                )
            try:
                self._sendings[number].describe(_described(run, attempt))
                self._sendings[number].send()
            except (OSError, ValueError, KeyError, TypeError) as error:
                if attempt is run["attempts"][-1]:
                    raise
                self._damaged[number] = f"attempt {number} is damaged, and not sent: {error}"
                self._say(f"{self.folder}: {self._damaged[number]}")

    @property
    def problems(self) -> list[str]:
        """What could not be sent, a line each."""
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
        """Go on with what `halfstep login` has stored for this server since, if anything."""
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

    @property
    def _recorded(self) -> Recorded | None:
        told = [each.recorded for each in self._sendings.values() if each.recorded]
        return told[-1] if told else None


class AttemptSending:
    """One attempt."""

    def __init__(
        self,
        files: AttemptFiles,
        described: Mapping[str, Any],
        lives: Callable[[], bool],
        ingest: Ingest,
        say: Say,
        *,
        is_last: bool,
        with_checkpoints: bool,
    ) -> None:
        """lives: returns whether the process that writes the attempt lives on this machine."""
        self.recorded: Recorded | None = None
        self.is_sent = False
        self.lost_bytes = 0  # of its spool, known once it is over
        self._files, self._described, self._ingest, self._say = files, described, ingest, say
        self._lives = lives
        self._is_last, self._with_checkpoints = is_last, with_checkpoints
        self._is_over = False  # it has ended, and the server knows; or wants no more of it
        self._place = SpoolOffset(0, 0)
        self._fruitless: tuple[SpoolOffset, int] | None = None  # a piece without one whole frame
        self._told_files = SpoolOffset(0, 0)  # those named before have gone

    def describe(self, described: Mapping[str, Any]) -> None:
        """Have the run's description sent anew if it has changed: a script may configure late."""
        if described != self._described:
            self._described, self.recorded = described, None

    def send(self) -> None:
        """Send the current content."""
        if self._is_over:
            return
        self.is_sent = False
        try:
            self._send()
        except ApiError as error:
            if error.code not in WANTED_NO_MORE:
                self.recorded = None  # ask anew where the server is
                raise
            self._is_over = True
            self.is_sent = self._files.attempt in self._remembered().get("sent", ())
            if self._is_last:
                kept = f"attempt {self._files.attempt} stays in {self._files.folder}"
                self._say(f"{error} {kept}, and nothing more of it is sent")

    def _send(self) -> None:
        recorded = self.recorded or self._open()
        # Read before the spool: once it is there, nothing more is spooled.
        outcome = read_outcome(self._files, lives=self._lives())
        while self._send_piece(recorded):
            pass
        self._send_files(recorded)
        if outcome is not None:
            error = outcome["error"] and outcome["error"][-TEXT_CHARACTERS:]  # what was raised
            spool = spool_of(self._files.spool, self._files.attempt)
            self.lost_bytes = sum(lost_bytes(path) for _, path in spool)
            self._ingest.end(recorded, {**outcome, "error": error, "lost_bytes": self.lost_bytes})
            self._is_over = True
        self.is_sent = True
        if self._is_over or not self._is_last:
            self._remember(recorded)

    def _open(self) -> Recorded:
        recorded = self._ingest.open(self._described)
        self.recorded, self._place, self._fruitless = recorded, recorded.place, None
        remembered = self._remembered()
        if not self._with_checkpoints and remembered.get("run") == recorded.run:
            told = SpoolOffset(*remembered["files"].get(str(recorded.attempt), (0, 0)))
            self._told_files = min(told, self._place)  # a server that was set back wants them again
        return recorded

    # ---- The spool -----------------------------------------------------------------------------

    def _send_piece(self, recorded: Recorded) -> bool:
        """Send the next bytes of the spool; return whether there may be more."""
        # List before reading: a file that has a successor here gets no more frames.
        for sequence, path in spool_of(self._files.spool, self._files.attempt):
            if sequence < self._place.sequence:
                continue
            here = self._place if sequence == self._place.sequence else SpoolOffset(sequence, 0)
            data = _read(path, here.offset)
            if not data or self._fruitless == (here, len(data)):
                continue
            told = self._ingest.put_spool(recorded, here, data)
            if told == here and len(data) == PIECE_BYTES:  # one large frame, or much is damaged
                told = self._ingest.put_spool(
                    recorded, here, _read(path, here.offset, WINDOW_BYTES)
                )
            if told != here:
                self._place = told
                return True
            if len(data) == PIECE_BYTES:
                self._say(
                    f"{path} is damaged from byte {here.offset:,} on: no whole frame follows "
                    f"within {WINDOW_BYTES:,} bytes; what is there is lost"
                )
            self._fruitless = here, len(data)  # the last frame is cut short, or being written
        return False

    # ---- Files ---------------------------------------------------------------------------------

    def _send_files(self, recorded: Recorded) -> None:
        """Send the files that the server's recorded events name."""
        before = self._told_files
        try:
            for event, place in self._naming_files():
                for file in self._wanted(event):
                    self._send_file(recorded, file)
                self._told_files = place
        finally:
            if self._told_files != before:
                self._remember(recorded)

    def _naming_files(self) -> Iterator[tuple[Event, SpoolOffset]]:
        """Yield the events that name files, each with the place behind it."""
        for sequence, path in spool_of(self._files.spool, self._files.attempt):
            start = self._told_files.offset if sequence == self._told_files.sequence else 0
            if self._told_files.sequence <= sequence <= self._place.sequence:
                is_partial = sequence == self._place.sequence
                for event, offset in file_events(path, start):
                    if is_partial and offset > self._place.offset:
                        break
                    yield event, SpoolOffset(sequence, offset)

    def _wanted(self, event: Event) -> list[Event]:
        if event["event"] == "artifact":
            return [event]
        return event["files"] if event.get("upload") or self._with_checkpoints else []

    def _send_file(self, recorded: Recorded, file: Event) -> None:
        """Send a file that is there, and is still the one that was named."""
        path = self._files.folder / file["path"]
        size = path.stat().st_size if path.is_file() else None
        if size != file["size_bytes"]:
            now = "is gone" if size is None else f"has {size:,} bytes, not {file['size_bytes']:,}"
            self._say(f"{path} {now}, and is not sent")
            return
        place = FileOffset(0, is_stored=False)
        try:
            while not place.is_stored:
                data = _read(path, place.offset)
                told = self._ingest.put_file(recorded, file, place.offset, data)
                if told == place:
                    raise ApiError(422, f"the server stays at byte {place.offset:,}")
                place = told
        except ApiError as error:
            if error.status in PASSING or error.status >= 500:
                raise
            self._say(f"{path} is not taken: {error}")

    # ---- What the folder says ------------------------------------------------------------------

    def _remembered(self) -> dict[str, Any]:
        try:
            found = dict(json.loads((self._files.folder / REMEMBERED).read_text()))
        except (OSError, ValueError):
            return {}
        return found if found.get("url") == self._ingest.server.url else {}

    def _remember(self, recorded: Recorded) -> None:
        known = self._remembered()
        if known.get("run") != recorded.run:
            known = {"url": self._ingest.server.url, "run": recorded.run, "files": {}, "sent": []}
        known["files"][str(recorded.attempt)] = list(self._told_files)
        if self.is_sent:
            known["sent"] = sorted({*known["sent"], recorded.attempt})
        with suppress(OSError):  # a full disk: the files are offered again some day
            write_json(self._files.folder / REMEMBERED, known)


def _described(run: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server is told of an attempt, as much of it as a run may have."""
    return {
        "id": run["id"],
        "attempt": attempt["attempt"],
        "name": run["name"][:NAME_CHARACTERS],
        "project": run["project"] and run["project"][:NAME_CHARACTERS],
        "config": run["config"],
        "tags": [str(tag)[:NAME_CHARACTERS] for tag in run["tags"][:MOST_TAGS]],
        "started": run["started"],
        "host": attempt["host"][:NAME_CHARACTERS],
        "versions": attempt["versions"],
        "command": [_text(word) for word in attempt.get("command", [])[:MOST_WORDS]],
        "folder": _text(attempt.get("folder", "")),
    }


def _text(text: str) -> str:
    """Return what a script was started with as it may be sent: a path need not be UTF-8."""
    return text.encode(errors="backslashreplace").decode()[:PATH_CHARACTERS]


def _read(path: Path, offset: int, most: int = PIECE_BYTES) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(most)
