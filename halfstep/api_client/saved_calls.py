"""Client calls about presets, notes, views and retention rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfstep.api_client.errors import ApiError
from halfstep.session.nesting import merged


class ShelfCalls:
    """The part of `halfstep.Client` that is about what people keep beside their runs."""

    _get: Callable[..., Any]
    _post: Callable[..., dict[str, Any]]
    _put: Callable[..., dict[str, Any]]
    _delete: Callable[..., None]
    submit: Callable[..., dict[str, Any]]

    def presets(
        self, *, name: str | None = None, project: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the presets of projects that you may submit to, by name, 500 at most."""
        query = {"name": name, "project": project}
        told = {field: each for field, each in query.items() if each is not None}
        return list(self._get("/api/v1/presets", told))

    def save_preset(
        self,
        name: str,
        recipe: str,
        config: Mapping[str, Any] | None = None,
        *,
        tags: Sequence[str] = (),
        **further: Any,
    ) -> dict[str, Any]:
        """Save what a run would be submitted with, in place of the project's preset of that name.

        further: project, priority, nodes and devices_per_node. Raises ApiError, as `submit` does.
        """
        wanted = {"name": name, "recipe": recipe, "config": dict(config or {})}
        return self._post("/api/v1/presets", wanted | {"tags": ", ".join(tags), **further})

    def delete_preset(self, preset_id: int) -> None:
        """Delete a preset."""
        self._delete(f"/api/v1/presets/{preset_id}")

    def submit_preset(
        self,
        preset: str,
        config: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        **further: Any,
    ) -> dict[str, Any]:
        """Queue a run of a preset, into its project.

        preset: its name.  config: what is to be otherwise.  project: whose preset, where several
        have one of that name.  further: as of `submit`, in place of what the preset has.
        Raises ApiError, also if there is no such preset, or more than one.
        """
        found = self.presets(name=preset, project=project)
        if len(found) != 1:
            of = ", ".join(repr(each["project"]) for each in found[:10])
            text = f"the projects {of} have one each: tell which" if found else "there is none"
            raise ApiError(409 if found else 404, f"preset is {preset!r}; {text}")
        [kept] = found
        fields = ("project", "tags", "priority", "nodes", "devices_per_node")
        place = {field: kept[field] for field in fields} | further
        return self.submit(kept["recipe"], merged(kept["config"], config or {}), **place)

    def note(self, *run_ids: int, project: str | None = None) -> str:
        """Return the note on a project, or on these runs side by side, in Markdown."""
        return str(self._get("/api/v1/notes", _subject(run_ids, project))["note"])

    def write_note(
        self, note: str, *run_ids: int, project: str | None = None, seen: str | None = None
    ) -> str:
        """Put a text in the place of the note on a project, or on these runs side by side.

        An empty one takes it away.  seen: what it was when you read it; if somebody has changed it
        since, ApiError is raised (409), and nothing is saved.
        """
        wanted = _subject(run_ids, project) | {"note": note, "seen": seen}
        return str(self._put("/api/v1/notes", wanted)["note"])

    def retention(self) -> list[dict[str, Any]]:
        """Return the rules by which what of ended runs is deleted; `scope` says whose."""
        return list(self._get("/api/v1/retention"))

    def preview_retention(
        self,
        *,
        project: str | None = None,
        checkpoint_days: float | None = None,
        log_days: float | None = None,
    ) -> dict[str, Any]:
        """Return what a rule would delete now. project: whose runs; None: of every project that has
        no rule of its own.
        """
        days = {"checkpoint_days": checkpoint_days, "log_days": log_days}
        told = {field: each for field, each in days.items() if each is not None}
        return dict(self._get("/api/v1/retention/preview", _scope(project) | told))

    def set_retention(
        self,
        *,
        project: str | None = None,
        checkpoint_days: float | None = None,
        log_days: float | None = None,
    ) -> dict[str, Any]:
        """Set a rule in place of the one before: within the hour it deletes, for good, what
        `preview_retention` tells.
        """
        days = {"checkpoint_days": checkpoint_days, "log_days": log_days}
        return self._put("/api/v1/retention", _scope(project) | days)

    def end_retention(self, *, project: str | None = None) -> None:
        """Let nothing more be deleted by a rule."""
        self._delete("/api/v1/retention", _scope(project))

    def views(self) -> list[dict[str, Any]]:
        """Return your saved views of the list of runs, by name."""
        return list(self._get("/api/v1/views"))

    def save_view(
        self,
        name: str,
        filter: str = "",  # noqa: A002 - as the API calls it
        *,
        sort: str = "-id",
        columns: Sequence[str] = (),
        group: str = "",
    ) -> dict[str, Any]:
        """Save a view, in place of your own of the same name: what `runs` takes, the columns that
        the page shows (the usual, if none is told), and what runs are grouped by.
        """
        view = {"name": name, "filter": filter, "sort": sort, "group": group}
        return self._post("/api/v1/views", view | {"columns": ",".join(columns)})

    def delete_view(self, view_id: int) -> None:
        """Delete one of your saved views."""
        self._delete(f"/api/v1/views/{view_id}")


def _subject(run_ids: Sequence[int], project: str | None) -> dict[str, str]:
    if project is not None and not run_ids:
        return {"project": project}
    if run_ids and project is None:
        return {"runs": ",".join(map(str, run_ids))}
    raise ValueError("a note is on a project or on runs, and on one of the two")


def _scope(project: str | None) -> dict[str, Any]:
    return {"scope": "all" if project is None else f"in:{project}"}
