"""Client calls about presets, notes, reports, checks, views and retention rules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from halfstep.api_client.errors import ApiError
from halfstep.api_client.run_calls import RunCalls
from halfstep.session.nesting import merge
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from halfstep.api_client.response_types import (
        CheckContent,
        CheckRow,
        PresetRow,
        ReportContent,
        ReportRow,
        Rule,
        RulePreview,
        RunSummary,
        SavedView,
    )


class SavedCalls(RunCalls):
    """The part of `halfstep.Client` for presets, notes, reports, checks, views and retention."""

    def presets(self, *, name: str | None = None, project: str | None = None) -> "list[PresetRow]":
        """Return the presets of projects that you may submit to, by name, 500 at most."""
        query = {"name": name, "project": project}
        given = {field: value for field, value in query.items() if value is not None}
        return self._get("/api/v1/presets", given)

    def save_preset(
        self,
        name: str,
        recipe: str,
        config: Mapping[str, Any] | None = None,
        *,
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "PresetRow":
        """Save the arguments of a submission; replaces the project's preset of that name.

        further: project, priority, preemptible, nodes and devices_per_node. Raises ApiError, as
        `submit` does.
        """
        preset = {"name": name, "recipe": recipe, "config": dict(config or {})}
        return self._post("/api/v1/presets", preset | {"tags": ", ".join(tags), **further})

    def delete_preset(self, preset_id: int) -> None:
        """Delete a preset."""
        self._delete(f"/api/v1/presets/{preset_id}")

    def reports(self, *, project: str | None = None) -> "Iterator[ReportRow]":
        """Yield the reports of visible projects, newest first."""
        query = {"limit": 1000} | ({} if project is None else {"project": project})
        return self._pages("/api/v1/reports", "reports", query)

    def report(self, report_id: int) -> "ReportContent":
        """Return a report with its Markdown."""
        return self._get(f"/api/v1/reports/{report_id}")

    def create_report(self, title: str, text: str = "", *, project: str = "") -> "ReportContent":
        """Create a report: Markdown with blocks `panel` and `runs`, see docs/how-to/reports.md."""
        body = {"title": title, "text": text, "project": project}
        return self._post("/api/v1/reports", body)

    def checks(self, *, project: str | None = None) -> "list[CheckRow]":
        """Return the uploaded reports of `halfstep check`, newest first, 1,000 at most."""
        query = {"limit": 1000} | ({} if project is None else {"project": project})
        return self._get("/api/v1/checks", query)["checks"]

    def check(self, check_id: int) -> "CheckContent":
        """Return an uploaded report of `halfstep check`, with its sources."""
        return self._get(f"/api/v1/checks/{check_id}")

    def upload_check(
        self, report: JsonObject, sources: Mapping[str, str] | None = None, *, project: str = ""
    ) -> "CheckRow":
        """Upload a report, as `halfstep check --json` prints it. sources: texts by file."""
        body = {"report": report, "sources": dict(sources or {}), "project": project}
        return self._post("/api/v1/checks", body)

    def delete_check(self, check_id: int) -> None:
        """Delete an uploaded report of `halfstep check`."""
        self._delete(f"/api/v1/checks/{check_id}")

    def submit_preset(
        self,
        preset: str,
        config: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        **further: Any,
    ) -> "RunSummary":
        """Queue a run from a preset, in the preset's project.

        preset: its name.  config: values that differ.  project: of the preset, if several projects
        have one of that name.  further: arguments of `submit` that replace the preset's. Raises
        ApiError, also if no preset or more than one matches.
        """
        matches = self.presets(name=preset, project=project)
        if len(matches) != 1:
            of = ", ".join(repr(match["project"]) for match in matches[:10])
            text = f"it exists in {of}; set `project`" if matches else "there is none"
            raise ApiError(409 if matches else 404, f"preset is {preset!r}; {text}")
        [saved] = matches
        fields = ("project", "tags", "priority", "preemptible", "nodes", "devices_per_node")
        placement = {field: cast("JsonObject", saved)[field] for field in fields} | further
        return self.submit(saved["recipe"], merge(saved["config"], config or {}), **placement)

    def note(self, *run_ids: int, project: str | None = None) -> str:
        """Return the note on a project, or on these runs side by side, in Markdown."""
        return str(self._get("/api/v1/notes", _subject(run_ids, project))["note"])

    def write_note(
        self, note: str, *run_ids: int, project: str | None = None, seen: str | None = None
    ) -> str:
        """Replace the note on a project, or on these runs side by side.

        An empty note deletes it.  seen: the note when you last read it; if it has changed since,
        nothing is saved and ApiError is raised (409).
        """
        body = _subject(run_ids, project) | {"note": note, "seen": seen}
        return str(self._put("/api/v1/notes", body)["note"])

    def retention(self) -> "list[Rule]":
        """Return the retention rules for data of ended runs; `scope` has their projects."""
        return self._get("/api/v1/retention")

    def preview_retention(
        self,
        *,
        project: str | None = None,
        checkpoint_days: float | None = None,
        log_days: float | None = None,
    ) -> "RulePreview":
        """Return a preview of the deletions by a rule.

        project: of the runs; None: all projects without a rule of their own.
        """
        days = {"checkpoint_days": checkpoint_days, "log_days": log_days}
        given = {field: value for field, value in days.items() if value is not None}
        return self._get("/api/v1/retention/preview", _scope(project) | given)

    def set_retention(
        self,
        *,
        project: str | None = None,
        checkpoint_days: float | None = None,
        log_days: float | None = None,
    ) -> "Rule":
        """Set a retention rule, replacing any existing one.

        Within the hour it permanently deletes what `preview_retention` returns.
        """
        days = {"checkpoint_days": checkpoint_days, "log_days": log_days}
        return self._put("/api/v1/retention", _scope(project) | days)

    def end_retention(self, *, project: str | None = None) -> None:
        """Delete a retention rule; it deletes nothing from then on."""
        self._delete("/api/v1/retention", _scope(project))

    def views(self) -> "list[SavedView]":
        """Return your saved views of the list of runs, by name."""
        return self._get("/api/v1/views")

    def save_view(
        self,
        name: str,
        filter: str = "",  # noqa: A002 - as the API calls it
        *,
        sort: str = "-id",
        columns: Sequence[str] = (),
        group: str = "",
    ) -> "SavedView":
        """Save a view of the list of runs; replaces your view of the same name.

        filter, sort: as for `runs`.  columns: shown on the page; empty: the default ones.  group:
        what runs are grouped by.
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
    raise ValueError("a note belongs to a project or to runs; give only one of them")


def _scope(project: str | None) -> JsonObject:
    return {"scope": "all" if project is None else f"in:{project}"}
