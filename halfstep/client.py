"""API client of a server, for scripts and notebooks.

    from halfstep import Client

    client = Client("http://127.0.0.1:8000", token)        (or HALFSTEP_URL and HALFSTEP_TOKEN,
                                                            or `halfstep login`)
    run = client.submit("digits", {"training": {"steps": 400}})
    run = client.wait(run["id"])
    client.series(run["id"])["loss"].value
    client.download(run["id"], folder)

Methods return the API's JSON, as described by the server's /api/v1/docs; series are numpy arrays.
"""

import hashlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast
from urllib.parse import quote

import httpx2

from halfstep.api_client import credentials
from halfstep.api_client.agent_calls import AgentCalls
from halfstep.api_client.alert_calls import AlertCalls
from halfstep.api_client.artifact_calls import ArtifactCalls
from halfstep.api_client.errors import ApiError
from halfstep.api_client.responses import (
    check_body,
    content,
    error_of,
    is_away,
    naming,
    spoken,
)
from halfstep.api_client.saved_calls import SavedCalls
from halfstep.api_client.tls import DeferredContext
from halfstep.cli import command_line, command_sources
from halfstep.number_formats import duration
from halfstep.session.nesting import merged
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from halfstep.api_client.response_types import (
        AcceptedRequest,
        AdvisedFinding,
        ArtifactFile,
        BulkResult,
        CheckpointFileRow,
        ComparedSeries,
        DeletedRun,
        Event,
        FullEnvironment,
        ListedRun,
        LogLine,
        Parity,
        PrecisionDiff,
        PrecisionPlan,
        ProjectRow,
        RunComparison,
        RunDetail,
        RunList,
        RunSummary,
        SeriesPage,
        Storage,
        SweepDetail,
        SweepSummary,
        SweepTrial,
        Uploaded,
        WorkerState,
    )
    from halfstep.api_client.series import Series

URL = "http://127.0.0.1:8000"
ENDED = ("finished", "failed", "cancelled")
POLL_SECONDS = 1.0  # poll interval of `follow`
PATIENCE_SECONDS = 30.0  # timeout of a request
AWAY_SECONDS = 300.0  # default time for which an unavailable server is retried
LONGEST_PAUSE_SECONDS = 30.0  # between two of these retries
STORING_SECONDS = 600.0  # timeout of an upload: the server moves gigabytes to a bucket
PIECE_BYTES = 1 << 20
LOG_LINES_A_PAGE = 5000  # the server's limit
GZIP = 16 + zlib.MAX_WBITS  # zlib's code for the gzip format
MOST_RUNS = 200  # the server's limit per page
MOST_POINTS = 5000  # the server's limit per line of a chart


class Client(AgentCalls, AlertCalls, ArtifactCalls, SavedCalls):
    """Connection to one server as one user; as a context manager it closes on exit."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        """Open the connection. Raises ApiError without a token.

        url: by default HALFSTEP_URL, that of `halfstep login`, or this machine.
        token: by default HALFSTEP_TOKEN, or that of `halfstep login`; created on the account page.
        """
        login = credentials.known(url, token, otherwise=URL)
        if login is None:
            advice = "create one on the account page, then run `halfstep login` or set"
            raise ApiError(0, f"no API token: {advice} HALFSTEP_TOKEN")
        self._http = httpx2.Client(
            base_url=login.url,
            headers={"Authorization": f"Bearer {login.token}"},
            timeout=PATIENCE_SECONDS,
            follow_redirects=True,
            verify=DeferredContext(),
            event_hooks=naming(login.origin),
            trust_env=not credentials.is_local(login.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def page_url(self, run_id: int) -> str:
        """Return the address of a run's page."""
        return self.url_of(f"/runs/{run_id}")

    def url_of(self, path: str) -> str:
        """Return the whole address of a path on the server."""
        return f"{str(self._http.base_url).rstrip('/')}{path}"

    def recipes(self) -> list[JsonObject]:
        """Return the recipes, each with the JSON Schema of its configuration."""
        return cast("list[JsonObject]", list(self._get("/api/v1/recipes")))

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
        query |= {"limit": _page_size(limit)}
        rows = self._pages("/api/v1/runs", "runs", query, cursor="before")
        return cast("Iterator[ListedRun]", islice(rows, limit))

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
        query["limit"] = _page_size(limit)
        page = cast("RunList", self._get("/api/v1/runs", query))
        while page["next"] is not None and len(page["runs"]) < limit:
            query |= {"before": page["next"], "limit": _page_size(limit - len(page["runs"]))}
            further = self._get("/api/v1/runs", query)
            page["runs"] += further["runs"]
            page["next"] = further["next"]
        return page

    def run(self, run_id: int) -> "RunDetail":
        """Return one run, with its configuration and history."""
        return cast("RunDetail", RunWithPlot(self, self._get(f"/api/v1/runs/{run_id}")))

    def plot(self, run_id: int, *names: str, points: int = 2000) -> "Figure":
        """Return a plotly figure of a run; also `client.run(run_id).plot()`.

        names: series (loss, scale, grad_norm, lr) and metrics, a panel each; by default loss and,
        if it is scaled, loss scale. Skipped steps are marked. Requires plotly: `halfstep[plot]`.
        """
        from halfstep.api_client import figure

        page = self.chart(run_id, points=min(points, MOST_POINTS), metrics=list(names))
        return figure.of_page(page, names)

    def environment(self, run_id: int) -> "FullEnvironment":
        """Return a run's environment: machine, packages, command, folder, source and git."""
        return cast("FullEnvironment", dict(self._get(f"/api/v1/runs/{run_id}/environment")))

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

        further: priority, nodes, devices_per_node, after_id, parent_id, parent_step and
        compared_with.
        Raises ApiError, whose errors name each wrong field, its value and the allowed values.
        """
        body = {"recipe": recipe, "config": dict(config or {}), "name": name}
        return cast(
            "RunSummary", self._post("/api/v1/runs", body | {"tags": ", ".join(tags), **further})
        )

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
        name: str = "",
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "RunSummary":
        """Queue a command line for a worker that offers commands.

        parameters: a value for each placeholder, such as {lr}.  folder: on the worker, or within
        the git repository if git is set.  git: a repository; commit: a hash in it.  venv: a
        virtual environment on the worker.  variables: environment variables.  secrets: names of
        secrets that the server stores.  schema: by placeholder, the JSON Schema keywords type,
        minimum, maximum, enum, default.
        further: priority, devices_per_node and after_id. Raises ApiError, as `submit` does.
        """
        command = _command(line, folder, git, commit, venv, variables, secrets, schema)
        body = {"command": command, "config": dict(parameters or {}), "name": name}
        return cast(
            "RunSummary", self._post("/api/v1/runs", body | {"tags": ", ".join(tags), **further})
        )

    def upload_weights(
        self,
        path: Path | str,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "Uploaded":
        """Upload a .safetensors or .pt file; its "upload" is the value for `weights.upload`.

        A file that no run starts from is deleted after a day.  on_progress: called with the number
        of bytes sent and the total. Raises ApiError, also if the server received other bytes.
        """
        path, digest = Path(path), hashlib.sha256()
        size = path.stat().st_size

        def pieces() -> Iterator[bytes]:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                    yield piece
                    on_progress(file.tell(), size)

        headers = {"Content-Length": str(size)}
        with spoken():
            address = f"/api/v1/uploads/{quote(path.name, safe='', errors='replace')}"
            answer = self._http.put(
                address, content=pieces(), headers=headers, timeout=STORING_SECONDS
            )
            stored = cast("Uploaded", content(answer))
        if stored["sha256"] != digest.hexdigest():
            received = stored["sha256"]
            text = f"the server received SHA-256 {received}, not {digest.hexdigest()}"
            raise ApiError(0, f"{path} was damaged in the upload: {text}; upload it again")
        return stored

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

    def series(
        self, run_id: int, *, first: int = 1, last: int | None = None, points: int | None = None
    ) -> "Series":
        """Return loss, scale, grad_norm and the other columns of steps first to last.

        points: downsample to a chart of this width, 32 to 5,000, with every extreme; by default
        every step.  The series flags is a sum of 1, the step was skipped; 2, its loss is not
        finite; 4, its norm exceeds fp32; 16, its loss is unknown; 32, its norm is; 256, the first
        optimizer skipped; 512, the second did; …
        """
        from halfstep.api_client import series  # with numpy

        if points is not None:
            page = self.chart(run_id, first=max(first, 1), last=last, points=points)
            return series.of_page(page["series"], page["x"])
        with self.export(run_id, "steps") as text:
            return series.of_steps(text, first, float("inf") if last is None else last)

    def metrics(
        self, run_id: int, *, first: int = 0, last: int | None = None, points: int | None = None
    ) -> "Series":
        """Return the metrics that the training logged, by name.

        first, last, points: see `series`.
        """
        from halfstep.api_client import series  # with numpy

        if points is not None:
            metrics: JsonObject = {}
            after: str | None = ""
            while after is not None:
                page = self.chart(
                    run_id, first=max(first, 1), last=last, points=points, metric_after=after
                )
                metrics |= page["metrics"]
                after = page.get("metrics_next")  # servers of earlier versions lack it
            return series.of_page(metrics, page["x"])
        with self.export(run_id, "metrics") as text:
            return series.of_metrics(text, first, float("inf") if last is None else last)

    def chart(
        self,
        run_id: int,
        *,
        first: int = 1,
        last: int | None = None,
        points: int = MOST_POINTS,
        metric_search: str = "",
        metric_after: str = "",
        metrics: Sequence[str] = (),
    ) -> "SeriesPage":
        """Return a run page's chart data: series, metrics and skips, downsampled to points.

        metric_search: part of the metrics' names.  metric_after: `metrics_next` of the previous
        page; a page has 100 metrics.  metrics: up to 50 names that are always included.
        """
        query: JsonObject = {"first": first, "points": points}
        if last is not None:
            query["last"] = last
        if metric_search:
            query["metric_search"] = metric_search
        if metric_after:
            query["metric_after"] = metric_after
        if metrics:
            query["metric"] = list(metrics)
        return cast("SeriesPage", dict(self._get(f"/api/v1/runs/{run_id}/series", query)))

    def compare(self, run_ids: Sequence[int]) -> "RunComparison":
        """Compare up to 50 runs, as /compare does.

        Returns the runs, each with its last and best figures, the settings that differ, and the
        missing runs.
        """
        return cast(
            "RunComparison",
            dict(self._get("/api/v1/comparison", {"runs": ",".join(map(str, run_ids))})),
        )

    def parity(
        self,
        run_ids: Sequence[int],
        metric: str = "",
        *,
        margin: float | None = None,
        group: str = "",
        value: Literal["final", "area", "time_to_target"] = "final",
        target: float | None = None,
    ) -> "Parity":
        """Compare groups of runs with a reference over seeds, as /compare does.

        metric: default: the first, else the loss.  margin: largest difference that counts as
        equal; without it equivalence is not tested.  group: the setting to compare; default: the
        precision, else the only one that differs.  value: the last one; "area", the mean over the
        steps that the curves of the pairs share; or "time_to_target", the seconds until the metric
        first reaches `target`.
        """
        query: JsonObject = {"runs": ",".join(map(str, run_ids))}
        query |= {"metric": metric, "group": group, "value": value}
        numbers = {"margin": margin, "target": target}
        query |= {name: number for name, number in numbers.items() if number is not None}
        return cast("Parity", dict(self._get("/api/v1/comparison/parity", query)))

    def charts(
        self,
        run_ids: Sequence[int],
        series: Sequence[str] = ("loss",),
        *,
        first: int = 1,
        last: int | None = None,
        points: int = 1000,
    ) -> "dict[int, ComparedSeries]":
        """Return the comparison's chart data: series or metrics of each run, by run id."""
        query: JsonObject = {"runs": ",".join(map(str, run_ids)), "series": list(series)}
        query |= {"first": first, "points": points} | ({} if last is None else {"last": last})
        pages = self._get("/api/v1/comparison/series", query)["runs"]
        return {int(run_id): page for run_id, page in pages.items()}

    @contextmanager
    def export(self, run_id: int, name: str) -> Iterator[Iterator[str]]:
        """Open the CSV export of all `steps`, `events` or `metrics`, as an iterator of text."""
        path = f"/api/v1/runs/{run_id}/export/{name}.csv"
        with spoken(), self._http.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
                raise error_of(answer)
            yield answer.iter_text()

    def events(self, run_id: int) -> "Iterator[Event]":
        """Yield the scaler's events in order of step: skips with culprits, growth, backoff."""
        return cast("Iterator[Event]", self._pages(f"/api/v1/runs/{run_id}/events", "events"))

    def findings(self, run_id: int) -> "list[AdvisedFinding]":
        """Return a run's findings, each a problem and its remedy, the most severe first."""
        return cast(
            "list[AdvisedFinding]", list(self._pages(f"/api/v1/runs/{run_id}/findings", "findings"))
        )

    def precision_diff(self, run_id: int, step: int | None = None) -> "PrecisionDiff | None":
        """Return a batch in two precisions, compared module by module: by default the last one.

        None if the run has no diff of the step.
        """
        query = {} if step is None else {"step": step}
        diffs = self._get(f"/api/v1/runs/{run_id}/precision-diffs", query)
        return cast("PrecisionDiff | None", diffs["diff"])

    def artifacts(self, run_id: int) -> "list[ArtifactFile]":
        """Return a run's artifacts: images, texts and tables, newest step first."""
        return cast(
            "list[ArtifactFile]", list(self._pages(f"/api/v1/runs/{run_id}/artifacts", "artifacts"))
        )

    def set_scale(self, run_id: int, scale: float) -> "AcceptedRequest":
        """Request another loss scale for a running fp16 run, from its next step on."""
        return cast("AcceptedRequest", self._post(f"/api/v1/runs/{run_id}/scale", {"scale": scale}))

    def request_precision_diff(self, run_id: int) -> "AcceptedRequest":
        """Request a precision diff of a running fp16 or bf16 run; precision_diff returns it."""
        return cast("AcceptedRequest", self._post(f"/api/v1/runs/{run_id}/precision-diffs", {}))

    def request_checkpoint_diff(self, run_id: int, *steps: int) -> "RunSummary":
        """Queue precision diffs at checkpoints of a run, by default at the last one.

        Returns the run that measures them; precision_diff of that run returns them.
        """
        body = {"task": "precision_diff", "checkpoints": steps}
        return cast("RunSummary", self._post(f"/api/v1/runs/{run_id}/measurements", body))

    def request_precision_plan(
        self,
        run_id: int,
        *steps: int,
        fresh_weights: bool = True,
        batches: int = 2,
        max_error: float = 0.1,
        min_cosine: float = 0.99,
    ) -> "RunSummary":
        """Queue a precision plan with checkpoints of a run, and return the run that measures it.

        steps: of up to three checkpoints; by default the first, a middle and the last one.
        For a recipe without a run, submit it with `{"lab": {"task": "precision_plan"}}`.
        """
        body = {
            "task": "precision_plan",
            "checkpoints": steps,
            "fresh_weights": fresh_weights,
            "batches": batches,
            "max_error": max_error,
            "min_cosine": min_cosine,
        }
        return cast("RunSummary", self._post(f"/api/v1/runs/{run_id}/measurements", body))

    def precision_plan(self, run_id: int) -> "PrecisionPlan | None":
        """Return the precision plan that a run has measured; None if it has none, or not yet."""
        plan = self._get(f"/api/v1/runs/{run_id}/precision-plan")["plan"]
        return cast("PrecisionPlan | None", plan)

    def queue_best_of_plan(self, run_id: int, *, seeds: int = 3) -> list[int]:
        """Queue the three best points of a run's plan, and fp32, with several seeds.

        Returns the ids of the runs, for `parity`.
        """
        path = f"/api/v1/runs/{run_id}/precision-plan/runs"
        return list(self._post(path, {"seeds": seeds})["queued"])

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
        changed = merged(parent["config"], config or {})
        further |= {"parent_id": run_id, "parent_step": step}
        return self.submit(parent["recipe"], changed, name=name, tags=tags, **further)

    def continue_run(self, run_id: int) -> "RunSummary":
        """Queue the remaining steps of a cancelled or failed run, from its last checkpoint."""
        return cast("RunSummary", self._post(f"/api/v1/runs/{run_id}/continuation"))

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
        with spoken(), self._http.stream("GET", f"/runs/{run_id}/log/download") as answer:
            if answer.is_error:
                answer.read()
                raise error_of(answer)
            yield from _gunzipped(answer.iter_raw())

    def cancel(self, run_id: int) -> "RunSummary":
        """Cancel a run; one in training writes a checkpoint first."""
        return cast("RunSummary", self._post(f"/api/v1/runs/{run_id}/cancellation"))

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
        return cast("RunDetail", self._patch(f"/api/v1/runs/{run_id}", body))

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
        return cast("BulkResult", self._post("/api/v1/runs/bulk", body))

    def trash(self) -> "list[DeletedRun]":
        """Return the deleted runs that can be restored, newest first."""
        return cast("list[DeletedRun]", list(self._pages("/api/v1/trash", "runs")))

    def storage(self) -> "Storage":
        """Return the server's free space, and the space that files of runs use."""
        return cast("Storage", dict(self._get("/api/v1/storage")))

    def pause(self, run_id: int) -> "RunSummary":
        """Pause a run, with a checkpoint."""
        return cast("RunSummary", self._post(f"/api/v1/runs/{run_id}/pause"))

    def resume(self, run_id: int) -> "RunSummary":
        """Queue a paused run again."""
        return cast("RunSummary", self._post(f"/api/v1/runs/{run_id}/resumption"))

    def begin_sweep(
        self,
        recipe: str,
        space: Mapping[str, str | Sequence[Any] | Mapping[str, Any]],
        config: Mapping[str, Any] | None = None,
        *,
        kind: str = "grid",
        metric: str = "loss",
        goal: str = "",
        runs: int | None = None,
        at_once: int = 1,
        tags: Sequence[str] = (),
        **further: Any,
    ) -> "SweepDetail":
        """Start a sweep: runs that differ in the settings in `space`.

        space: by path of a setting, a list of values, or "16..64 step 16", "uniform(a, b)",
        "loguniform(a, b)", "integers(a, b)".  kind: grid, random, tpe or hyperband.  goal:
        minimise or maximise; by default derived from the metric's name.  further: seed, name,
        priority, nodes, devices_per_node.
        """
        body: JsonObject = {"recipe": recipe, "space": dict(space)}
        body["config"] = dict(config or {})
        body |= {"kind": kind, "metric": metric, "goal": goal, "runs": runs, "at_once": at_once}
        return cast(
            "SweepDetail", self._post("/api/v1/sweeps", body | {"tags": ", ".join(tags), **further})
        )

    def sweep_command(
        self,
        line: str,
        space: Mapping[str, str | Sequence[Any] | Mapping[str, Any]],
        parameters: Mapping[str, str | int | float | bool] | None = None,
        *,
        folder: str = "",
        git: str = "",
        commit: str = "",
        venv: str = "",
        variables: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        schema: Mapping[str, Mapping[str, Any]] | None = None,
        **further: Any,
    ) -> "SweepDetail":
        """Start a sweep of a command line: runs that differ in the placeholders in `space`.

        parameters: a value for each other placeholder.  further: see `begin_sweep`; the rest: see
        `submit_command`.
        """
        command = _command(line, folder, git, commit, venv, variables, secrets, schema)
        return self.begin_sweep("", space, parameters, command=command, **further)

    def sweeps(self, *, limit: int | None = None) -> "Iterator[SweepSummary]":
        """Yield sweeps, newest first. limit: most of them; None: all."""
        query = {"limit": _page_size(limit)}
        rows = self._pages("/api/v1/sweeps", "sweeps", query, cursor="before")
        return cast("Iterator[SweepSummary]", islice(rows, limit))

    def sweep(self, sweep_id: int) -> "SweepDetail":
        """Return one sweep: its progress, and its best run so far."""
        return cast("SweepDetail", dict(self._get(f"/api/v1/sweeps/{sweep_id}")))

    def trials(self, sweep_id: int) -> "list[SweepTrial]":
        """Return a sweep's runs with their settings and values, the best first."""
        query = {"sort": "value", "limit": 1000}
        return cast(
            "list[SweepTrial]",
            list(self._pages(f"/api/v1/sweeps/{sweep_id}/trials", "trials", query)),
        )

    def extend_sweep(
        self, sweep_id: int, *, runs: int | None = None, space: Mapping[str, Any] | None = None
    ) -> "SweepDetail":
        """Add runs to a sweep; to a grid, more values of its settings."""
        return cast(
            "SweepDetail",
            self._post(f"/api/v1/sweeps/{sweep_id}/extension", {"runs": runs, "space": space}),
        )

    def move_sweep(self, sweep_id: int, *, project: str) -> "SweepDetail":
        """Move a sweep and all of its runs to another project."""
        return cast(
            "SweepDetail", self._put(f"/api/v1/sweeps/{sweep_id}/project", {"project": project})
        )

    def pause_sweep(self, sweep_id: int) -> "SweepDetail":
        """Pause a sweep: it submits no more runs; runs under way continue."""
        return cast("SweepDetail", self._post(f"/api/v1/sweeps/{sweep_id}/pause"))

    def resume_sweep(self, sweep_id: int) -> "SweepDetail":
        """Resume a paused or failed sweep."""
        return cast("SweepDetail", self._post(f"/api/v1/sweeps/{sweep_id}/resumption"))

    def cancel_sweep(self, sweep_id: int) -> "SweepDetail":
        """Cancel a sweep, and its queued and training runs."""
        return cast("SweepDetail", self._post(f"/api/v1/sweeps/{sweep_id}/cancellation"))

    def wait_for_sweep(
        self,
        sweep_id: int,
        *,
        patience: float = AWAY_SECONDS,
        on_outage: Callable[[str], None] = lambda text: None,
    ) -> "SweepDetail":
        """Return the sweep once it has ended or failed.

        patience, on_outage: see `follow`.
        """
        sweep: SweepDetail | None = None
        while sweep is None or sweep["status"] not in ENDED:
            if sweep:
                time.sleep(POLL_SECONDS)
            sweep = patiently(lambda: self.sweep(sweep_id), patience, on_outage)
        return sweep

    def projects(self) -> "list[ProjectRow]":
        """Return the projects visible to the user, with their quotas and permissions."""
        return cast("list[ProjectRow]", list(self._get("/api/v1/projects")))

    def rename_project(self, name: str, new_name: str) -> "ProjectRow":
        """Rename a project. For admins."""
        body = {"name": name, "new_name": new_name}
        return cast("ProjectRow", self._patch("/api/v1/projects/name", body))

    def delete_project(self, name: str) -> None:
        """Delete a project that has no runs, with its sweeps. For admins."""
        self._delete("/api/v1/projects", {"name": name})

    def workers(self) -> "Iterator[WorkerState]":
        """Yield the workers, in the order of their registration."""
        return cast("Iterator[WorkerState]", self._pages("/api/v1/workers", "workers"))

    def drain_worker(self, worker_id: int, *, stop: bool = False) -> "WorkerState":
        """Stop a worker from taking runs. stop: also return its current runs to the queue."""
        return cast("WorkerState", self._post(f"/api/v1/workers/{worker_id}/drain", {"stop": stop}))

    def undrain_worker(self, worker_id: int) -> "WorkerState":
        """Let a worker take runs again."""
        return cast("WorkerState", self._post(f"/api/v1/workers/{worker_id}/undrain"))

    def checkpoints(self, run_id: int) -> "list[CheckpointFileRow]":
        """Return a run's checkpoint files, newest step first."""
        return cast(
            "list[CheckpointFileRow]",
            list(self._pages(f"/api/v1/runs/{run_id}/checkpoints", "checkpoints")),
        )

    def download(
        self,
        run_id: int,
        folder: Path | str = ".",
        *,
        step: int | None = None,
        kind: str = "",
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Download a file of a run's checkpoint into a folder; return its path.

        step: by default the newest.  kind: "checkpoint", the whole state, or "weights"; by default
        "checkpoint", or the only file if there is just one.
        on_progress: called from time to time with the number of bytes received and the total.
        Resumes an interrupted download. Raises ApiError if the SHA-256 differs from the server's.
        """
        files = [f for f in self.checkpoints(run_id) if step is None or f["step"] == step]
        matches = [f for f in files if f["kind"] == (kind or "checkpoint")]
        if not kind and len(files) == 1:
            matches = files
        if not matches:
            at = "" if step is None else f" at step {step}"
            named = [f"--kind {f['kind']} at step {f['step']}" for f in self.checkpoints(run_id)]
            existing = f"available: {', '.join(named) or 'none yet'}"
            text = f"run {run_id} has no file of the kind {kind or 'checkpoint'}{at}; {existing}"
            raise ApiError(404, text)
        [file, *_] = matches
        same_step = [f["kind"] for f in files if f["step"] == file["step"]]
        if file["kind"] == "checkpoint" and any(kind.startswith("shard.") for kind in same_step):
            raise ApiError(
                409,
                f"the state at step {file['step']} is sharded, which only a run can load; download "
                "its weights (kind weights), or a requested or the last checkpoint",
            )
        path = f"/runs/{run_id}/checkpoints/{file['id']}/download"
        partial = Path(folder) / f".{file['sha256']}.partial"
        partial.parent.mkdir(parents=True, exist_ok=True)
        name = self._fetch(path, partial, lambda done: on_progress(done, file["size_bytes"]))
        with partial.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != file["sha256"]:
            partial.unlink()
            raise ApiError(0, f"{name} is damaged: its SHA-256 is {digest}, not {file['sha256']}")
        return partial.replace(Path(folder) / name)

    def _fetch(self, path: str, partial: Path, on_progress: Callable[[int], None]) -> str:
        """Fetch the missing rest of a partial file; return its name on the server."""
        had = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={had}-"} if had else {}
        with spoken(), self._http.stream("GET", path, headers=headers) as answer:
            if answer.status_code == 416:  # the partial file is complete: fetch only its name
                return _name(self._http.head(path))
            if answer.is_error:
                answer.read()
                raise error_of(answer)
            with partial.open("ab" if answer.status_code == 206 else "wb") as file:
                for chunk in answer.iter_raw():
                    file.write(chunk)
                    on_progress(file.tell())
            return _name(answer)

    def _pages(
        self,
        path: str,
        name: str,
        query: Mapping[str, Any] | None = None,
        *,
        cursor: Literal["after", "before"] = "after",
    ) -> Iterator[JsonObject]:
        """Yield the rows of all pages. cursor: parameter that has a page's `next`."""
        query = dict(query or {})
        while True:
            page = self._get(path, query)
            yield from page[name]
            if page["next"] is None:
                return
            query[cursor] = page["next"]

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        with spoken():
            return content(self._http.get(path, params=query))

    def _delete(self, path: str, query: Mapping[str, Any] | None = None) -> None:
        with spoken():
            answer = self._http.delete(path, params=query)
        if answer.is_error:
            raise error_of(answer)

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> JsonObject:
        check_body(body)
        with spoken():
            return dict(content(self._http.post(path, json=body)))

    def _post_only(self, path: str, body: Mapping[str, Any]) -> None:
        """Send a request whose response is empty."""
        check_body(body)
        with spoken():
            answer = self._http.post(path, json=body)
        if answer.is_error:
            raise error_of(answer)

    def _patch(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        check_body(body)
        with spoken():
            return dict(content(self._http.patch(path, json=body)))

    def _put(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        check_body(body)
        with spoken():
            return dict(content(self._http.put(path, json=body)))


class RunWithPlot(dict[str, Any]):
    """A run as the API returns it, that can be plotted."""

    def __init__(self, client: Client, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._client = client

    def plot(self, *names: str, points: int = 2000) -> "Figure":
        """Return a plotly figure, as `Client.plot` does."""
        return self._client.plot(self["id"], *names, points=points)


T = TypeVar("T")


def patiently(request: Callable[[], T], patience: float, on_outage: Callable[[str], None]) -> T:
    """Return a request's result; retry with exponential backoff while the server is away."""
    pause, until = POLL_SECONDS, time.monotonic() + patience
    while True:
        try:
            return request()
        except ApiError as error:
            left = until - time.monotonic()
            if not is_away(error) or left <= 0:
                raise
            if pause == POLL_SECONDS:
                on_outage(f"{error}; retrying for {duration(patience)}")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _page_size(limit: int | None) -> int:
    """Return the number of rows of a page to request. Raises ApiError."""
    if limit is not None and limit < 1:
        raise ApiError(422, f"limit: {limit} is not valid; allowed: a whole number from 1")
    return MOST_RUNS if limit is None else min(limit, MOST_RUNS)


def _name(answer: httpx2.Response) -> str:
    """Return a download's file name, without any folder in it."""
    message = Message()
    headers = [one.headers.get("content-disposition") for one in (answer, *answer.history)]
    message["content-disposition"] = next(filter(None, headers), "")  # a bucket's answer has none
    return Path(message.get_filename("checkpoint.pt")).name


def _command(
    line: str,
    folder: str,
    git: str,
    commit: str,
    venv: str,
    variables: Mapping[str, str] | None,
    secrets: Sequence[str],
    schema: Mapping[str, Mapping[str, Any]] | None,
) -> JsonObject:
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


def _gunzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress concatenated gzip files."""
    decompressor = zlib.decompressobj(GZIP)
    for piece in pieces:
        rest = piece
        while rest:
            yield decompressor.decompress(rest)
            rest = decompressor.unused_data
            if decompressor.eof:
                decompressor = zlib.decompressobj(GZIP)
