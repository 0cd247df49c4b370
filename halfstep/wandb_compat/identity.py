"""Names, labels and addresses of a run, as W&B calls them."""

from collections.abc import Iterable, Mapping

from halfstep.session.watch_session import Watch
from halfstep.telemetry.attempt_messages import RunFile


class Identity:
    """Names, labels and addresses of a run; name, notes and tags can be set."""

    def __init__(
        self, watch: Watch, described: RunFile | None, labels: Mapping[str, str | None]
    ) -> None:
        """described: content of run.json, None if nothing is recorded. labels: W&B's own."""
        self._watch = watch
        self._name: str = (described and described.name) or labels["name"] or "run"
        self.id: str = (described.id if described else "disabled")[:8]
        self.project: str = (described and described.project) or ""
        self.entity, self.group, self.job_type = (
            labels[name] or "" for name in ("entity", "group", "job_type")
        )
        self._notes: str = labels["notes"] or ""
        self._tags: tuple[str, ...] = tuple(described.tags if described else ())

    @property
    def name(self) -> str:
        """Name of the run; setting it renames the run."""
        return self._name

    @name.setter
    def name(self, name: object) -> None:
        self._name = str(name)
        self._watch.describe(name=self._name)

    @property
    def notes(self) -> str:
        """Note of the run, which can be set."""
        return self._notes

    @notes.setter
    def notes(self, notes: object) -> None:
        self._notes = str(notes or "")
        self._watch.describe(note=self._notes)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the run, which can be set."""
        return self._tags

    @tags.setter
    def tags(self, tags: Iterable[object] | None) -> None:
        self._tags = (tags,) if isinstance(tags, str) else tuple(map(str, tags or ()))
        self._watch.describe(tags=self._tags)

    @property
    def dir(self) -> str:
        """Folder of the run."""
        return str(self._watch.folder or ".")

    @property
    def path(self) -> str:
        """Entity, project and id, joined by slashes."""
        return "/".join([*filter(None, [self.entity, self.project]), self.id])

    @property
    def url(self) -> str | None:
        """URL of the run's page; None offline, or if the server did not respond at once."""
        return self._watch.page

    def get_url(self) -> str | None:
        """Return `url`."""
        return self.url
