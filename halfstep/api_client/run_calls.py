"""Client calls about runs."""

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from halfstep.api_client.connection import page_size
from halfstep.api_client.errors import ApiError
from halfstep.api_client.file_calls import FileCalls
from halfstep.api_client.polling import AWAY_SECONDS, ENDED, POLL_SECONDS, patiently
from halfstep.api_client.series_calls import SeriesCalls
from halfstep.cli import command_line, command_sources
from halfstep.session.nesting import merge
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from halfstep.api_client.response_types import (
        AcceptedRequest,
        BulkResult,
        DeletedRun,
        FullEnvironment,
        ListedRun,
        LogLine,
        RunDetail,
        RunList,
        RunSummary,
    )

LOG_LINES_A_PAGE = 5000  # the server's limit
GZIP = 16 + zlib.MAX_WBITS  # zlib's code for the gzip format


class RunCalls(FileCalls, SeriesCalls):
    """The part of `halfstep.Client` for runs."""

    def runs(
        self,
        filter: str = "",  # noqa: A002 - as the API calls it
        *,
        sort: str = "-id",
        limit: int | None = None,
        values: Sequence[str] = (),
    ) -> "Iterator[ListedRun]":
        """Yield runs, newest first by default.

        filter: conditions that all must hold, as on the runs page: "sweep status:failed
        val/accuracy>0.9".  sort: a column, setting or metric, such as loss; "-loss": descending.
        limit: most runs; None: all.  values: names of settings and metrics to include under
        "values" of each run.
        """
        query: JsonObject = {"filter": filter, "sort": sort, "values": ",".join(values)}
        query |= {"limit": page_size(limit)}
        rows = self._pages("/api/v1/runs", "runs", query, cursor="before")
        return islice(rows, limit)

    def run_page(
        self,
        filter: str = "",  # noqa: A002 - as the API calls it
        *,
        sort: str = "-id",
        limit: int = 50,
        values: Sequence[str] = (),
    ) -> "RunList":
        """Return a page of runs with the total number of matches.

        "runs": as from `runs`; "total": number of matches; "notes": names in filter and sort that
        no setting or metric has. Fetches several of the server's pages if necessary.
        """
        query: JsonObject = {"filter": filter, "sort": sort, "values": ",".join(values)}
        query["limit"] = page_size(limit)
        page = self._get("/api/v1/runs", query)
        while page["next"] is not None and len(page["runs"]) < limit:
            query |= {"before": page["next"], "limit": page_size(limit - len(page["runs"]))}
            further = self._get("/api/v1/runs", query)
            page["runs"] += further["runs"]
            page["next"] = further["next"]
        return page

    def run(self, run_id: int) -> "RunDetail":
        """Return one run, with its configuration and history."""
        return cast("RunDetail", RunWithPlot(self, self._get(f"/api/v1/runs/{run_id}")))

    def environment(self, run_id: int) -> "FullEnvironment":
        """Return a run's environment: machine, packages, command, folder, source and git."""
        return self._get(f"/api/v1/runs/{run_id}/environment")

    def submit(
        self,
        recipe: str,
        config: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "RunSummary":
        """Queue a run. Settings missing from config have the recipe's defaults.

        further: priority, preemptible, nodes, devices_per_node, after_id, parent_id, parent_step
        and compared_with.
        Raises ApiError, whose errors name each wrong field, its value and the allowed values.
        """
        body = {"recipe": recipe, "config": dict(config or {}), "name": name}
        return self._post("/api/v1/runs", body | {"tags": ", ".join(tags), **further})

    def submit_command(
        self,
        line: str,
        parameters: Mapping[str, str | int | float | bool] | None = None,
        *,
        folder: str = "",
        git: str = "",
        commit: str = "",
        venv: str = "",
        variables: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        schema: Mapping[str, Mapping[str, Any]] | None = None,
        patch: str = "",
        name: str = "",
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "RunSummary":
        """Queue a command line for a worker that offers commands.

        parameters: a value for each placeholder, such as {lr}.  folder: on the worker, or within
        the git repository if git is set.  git: a repository; commit: a hash in it.  venv: a
        virtual environment on the worker.  variables: environment variables.  secrets: names of
        secrets that the server stores.  schema: by placeholder, the JSON Schema keywords type,
        minimum, maximum, enum, default.  patch: changes to apply to the commit, by git diff.
        further: priority, devices_per_node and after_id. Raises ApiError, as `submit` does.
        """
        command = command_of(line, folder, git, commit, venv, variables, secrets, schema)
        command |= {"patch": patch} if patch else {}
        body = {"command": command, "config": dict(parameters or {}), "name": name}
        return self._post("/api/v1/runs", body | {"tags": ", ".join(tags), **further})

    def fork(
        self,
        run_id: int,
        config: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        name: str = "",
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "RunSummary":
        """Queue a run that starts from another run's checkpoint, with the same configuration.

        config: settings to change.  step: the checkpoint's; by default the newest.
        """
        parent = self.run(run_id)
        if step is None:
            steps = [f["step"] for f in self.checkpoints(run_id) if f["kind"] == "checkpoint"]
            if not steps:
                raise ApiError(404, f"run {run_id} has no checkpoint to start from")
            step = max(steps)
        changed = merge(parent["config"], config or {})
        further |= {"parent_id": run_id, "parent_step": step}
        return self.submit(parent["recipe"], changed, name=name, tags=tags, **further)

    def continue_run(self, run_id: int) -> "RunSummary":
        """Queue the remaining steps of a cancelled or failed run, from its last checkpoint."""
        return self._post(f"/api/v1/runs/{run_id}/continuation")

    def wait(
        self,
        run_id: int,
        *,
        patience: float = AWAY_SECONDS,
        on_outage: Callable[[str], None] = lambda text: None,
    ) -> "RunDetail":
        """Return the run once it has ended, with any status. patience, on_outage: see `follow`."""
        # maxlen=1: days of training yield many states.
        [run] = deque(self.follow(run_id, patience=patience, on_outage=on_outage), maxlen=1)
        return run

    def follow(
        self,
        run_id: int,
        *,
        patience: float = AWAY_SECONDS,
        on_outage: Callable[[str], None] = lambda text: None,
    ) -> "Iterator[RunDetail]":
        """Yield the run now and after each change, until it has ended.

        patience: seconds for which an unavailable server, such as one that restarts, is retried
        before ApiError is raised.  on_outage: called with a message once per outage.
        """
        run: RunDetail | None = None
        while run is None or run["status"] not in ENDED:
            if run:
                time.sleep(POLL_SECONDS)
            before, run = run, patiently(lambda: self.run(run_id), patience, on_outage)
            if run != before:
                yield run

    def log(self, run_id: int, *, last: int | None = None) -> "list[LogLine]":
        """Return the lines of a run's log, oldest first. last: only the last ones, up to 5,000."""
        if last is not None:
            return list(self._get(f"/api/v1/runs/{run_id}/log", {"limit": last})["log"])
        pages: list[list[LogLine]] = []
        query: JsonObject | None = {"limit": LOG_LINES_A_PAGE}
        while query is not None:
            page = self._get(f"/api/v1/runs/{run_id}/log", query)
            pages.append(page["log"])
            is_last = page["next"] is None
            query = None if is_last else {"limit": LOG_LINES_A_PAGE, "before": page["next"]}
        return [line for page in reversed(pages) for line in page]

    def log_text(self, run_id: int) -> Iterator[bytes]:
        """Yield a run's whole output in pieces; for a run in training only its complete parts.

        Raises ApiError, with status 404 if the run has no log file.
        """
        with self._stream(f"/runs/{run_id}/log/download") as answer:
            yield from _gunzip(answer.iter_raw())

    def pause(self, run_id: int) -> "RunSummary":
        """Pause a run, with a checkpoint."""
        return self._post(f"/api/v1/runs/{run_id}/pause")

    def resume(self, run_id: int) -> "RunSummary":
        """Queue a paused run again."""
        return self._post(f"/api/v1/runs/{run_id}/resumption")

    def cancel(self, run_id: int) -> "RunSummary":
        """Cancel a run; one in training writes a checkpoint first."""
        return self._post(f"/api/v1/runs/{run_id}/cancellation")

    def set_scale(self, run_id: int, scale: float) -> "AcceptedRequest":
        """Request another loss scale for a running fp16 run, from its next step on."""
        return self._post(f"/api/v1/runs/{run_id}/scale", {"scale": scale})

    def edit(
        self,
        run_id: int,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        note: str | None = None,
    ) -> "RunDetail":
        """Change a run's name, tags or note, which is Markdown; None leaves a field unchanged."""
        body = {"name": name, "tags": None if tags is None else list(tags), "note": note}
        return self._patch(f"/api/v1/runs/{run_id}", body)

    def delete(self, *run_ids: int) -> "BulkResult":
        """Move ended runs to the trash; return those `done`, and those `refused`."""
        return self.bulk("delete", run_ids)

    def restore(self, *run_ids: int) -> "BulkResult":
        """Restore runs from the trash; returns the same as `delete`."""
        return self.bulk("restore", run_ids)

    def move(self, *run_ids: int, project: str) -> "BulkResult":
        """Move runs to another project; returns the same as `delete`."""
        return self.bulk("move", run_ids, project=project)

    def bulk(
        self, action: str, run_ids: Sequence[int], *, tag: str = "", project: str | None = None
    ) -> "BulkResult":
        """Apply an action to up to 200 runs; a run that refuses does not stop the others.

        action: add_tag or remove_tag, with a tag; cancel, delete, restore; move, with a project; or
        erase, which permanently deletes runs in the trash.
        """
        body = {"action": action, "runs": list(run_ids), "tag": tag, "project": project}
        return self._post("/api/v1/runs/bulk", body)

    def trash(self) -> "list[DeletedRun]":
        """Return the deleted runs that can be restored, newest first."""
        return list(self._pages("/api/v1/trash", "runs"))


class RunWithPlot(dict[str, Any]):
    """A run as the API returns it, that can be plotted."""

    def __init__(self, client: RunCalls, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._client = client

    def plot(self, *names: str, points: int = 2000) -> "Figure":
        """Return a plotly figure, as `Client.plot` does."""
        return self._client.plot(self["id"], *names, points=points)


def command_of(
    line: str,
    folder: str,
    git: str,
    commit: str,
    venv: str,
    variables: Mapping[str, str] | None,
    secrets: Sequence[str],
    schema: Mapping[str, Mapping[str, Any]] | None,
) -> JsonObject:
    """Return the command of a request."""
    try:
        words = command_line.words(line)
    except ValueError:  # the server says why
        words = []
    return {
        "line": line,
        "sources": {} if git else command_sources.sources_of(words, folder),
        "folder": folder,
        "git": git,
        "commit": commit,
        "venv": venv,
        "variables": dict(variables or {}),
        "secrets": list(secrets),
        "parameters": {name: dict(rules) for name, rules in (schema or {}).items()},
    }


def _gunzip(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress concatenated gzip files."""
    decompressor = zlib.decompressobj(GZIP)
    for piece in pieces:
        rest = piece
        while rest:
            yield decompressor.decompress(rest)
            rest = decompressor.unused_data
            if decompressor.eof:
                decompressor = zlib.decompressobj(GZIP)
