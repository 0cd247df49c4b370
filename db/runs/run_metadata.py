"""User-editable metadata of a run: name, tags and note."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET
from sqlalchemy.orm import Session

from db.errors import Changed, Invalid
from db.names import clean
from db.runs import runs
from db.tables import Run, User
from halfstep.telemetry.events import Described

#: Length limits in characters; for tags, of all tags with separators.
LENGTHS = {"name": 100, "tags": 200, "note": 20_000}


def edit(
    session: Session,
    run_id: int,
    user: User,
    changes: Mapping[str, Any],
    seen: Mapping[str, Any] | None = None,
) -> Run:
    """Change the fields in `changes` (name, tags, note) of a run; the others stay.

    seen: the values that the author edited. Raises Invalid, or Changed if one of them has since
    been changed to another value.
    """
    run = runs.get(session, run_id, lock=True)
    new = {field: _check(field, value) for field, value in changes.items()}
    errors = {field: text for field, (_value, text) in new.items() if text}
    if errors:
        raise Invalid(errors)
    before = {field: _check(field, value)[0] for field, value in (seen or {}).items()}
    for field, (value, _error) in new.items():
        now = getattr(run, field)
        if field in before and now not in (before[field], value):
            raise Changed(
                f"The {field} of run {run_id} has changed in the meantime. Nothing was saved."
            )
    _write(session, run, user.name, {field: value for field, (value, _error) in new.items()})
    return run


def add_tag(session: Session, run_id: int, user: User, tag: str) -> Run:
    """Add a tag to a run, unless it has the tag. Raises Invalid."""
    return _retag(session, run_id, user, tag, add=True)


def remove_tag(session: Session, run_id: int, user: User, tag: str) -> Run:
    """Remove a tag from a run, if it has the tag. Raises Invalid."""
    return _retag(session, run_id, user, tag, add=False)


def check_note(text: str) -> tuple[str, str]:
    """Return a note as it is stored, and an error message or an empty string."""
    return _check("note", text)


def tags_of(run: Run) -> list[str]:
    """Return the list of a run's tags."""
    return split_tags(run.tags)


def split_tags(tags: str) -> list[str]:
    """Split comma-separated tags into a list."""
    return _parts(tags.split(","))


def describe(session: Session, run: Run, described: Described) -> None:
    """Store what a script reports of its run; what a user has changed meanwhile stays."""
    before = described.before
    values = {}
    for field, new, old in (
        ("name", described.name, before.name),
        ("note", described.note, before.note),
    ):
        if new is not UNSET and getattr(run, field) in ("", _shorten(field, old)):
            values[field] = _shorten(field, new)
    if described.tags is not UNSET:
        kept = [tag for tag in tags_of(run) if tag not in before.tags]
        values["tags"] = _shorten("tags", [*kept, *described.tags])
    if values.get("name") == "":
        del values["name"]
    _write(session, run, "its script", values)
    if described.step_metrics is not UNSET:
        run.step_metrics = described.step_metrics


def _shorten(field: str, value: str | Sequence[str]) -> str:
    """Return a value of a script as it is stored: as much of it as is allowed."""
    if isinstance(value, str):
        return _check(field, value)[0][: LENGTHS[field]].rstrip()
    tags = [tag.replace(",", " ") for tag in value]
    while len(", ".join(tags)) > LENGTHS[field]:
        tags.pop()
    return _check(field, tags)[0]


def _retag(session: Session, run_id: int, user: User, tag: str, *, add: bool) -> Run:
    if not tag.strip():
        raise Invalid({"tag": "it is empty; allowed: text without a comma"})
    run = runs.get(session, run_id, lock=True)
    others = [other for other in tags_of(run) if other != tag.strip()]
    if add == (len(others) == len(tags_of(run))):
        text, error = _check("tags", [*others, tag] if add else others)
        if error:
            raise Invalid({"tag": error})
        _write(session, run, user.name, {"tags": text})
    return run


def _check(field: str, value: str | Sequence[str]) -> tuple[str, str]:
    """Return a value as it is stored, and an error message or an empty string."""
    if isinstance(value, str):
        text = value.replace("\r\n", "\n").rstrip() if field == "note" else clean(value)
    else:
        text = ", ".join(_parts([clean(tag) for tag in value]))
        if wrong := next((tag for tag in value if "," in tag), None):
            return text, f"{wrong[:100]!r} has a comma; allowed: texts without"
    if field == "name" and not text:
        return text, f"it is empty; allowed: 1 to {LENGTHS['name']} characters"
    if len(text) > LENGTHS[field]:
        return text, f"{len(text):,} characters; allowed: at most {LENGTHS[field]:,}"
    return text, ""


def _parts(tags: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(str.strip, tags))))


def _write(session: Session, run: Run, editor: str, values: Mapping[str, str]) -> None:
    changed = {field: value for field, value in values.items() if getattr(run, field) != value}
    old_name = run.name
    for field, value in changed.items():
        setattr(run, field, value)
    if "name" in changed:
        runs.remark(session, run, f"renamed by {editor}, from {old_name}")
    elif changed:
        run.revision += 1
