"""The client of a server's API, for scripts and notebooks.

    from halfstep import Client

    client = Client("http://127.0.0.1:8000", token)        (or HALFSTEP_URL and HALFSTEP_TOKEN,
                                                            or `halfstep login`)
    run = client.submit("digits", {"training": {"steps": 400}})
    run = client.wait(run["id"])
    client.series(run["id"])["loss"].value
    client.download(run["id"], folder)

What a method returns is the API's own JSON, as /api/v1/docs of the server describes it; series are
numpy arrays.
"""

import hashlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import httpx2

from halfstep.api_client import credentials
from halfstep.api_client.alert_calls import AlertCalls
from halfstep.api_client.responses import (
    ApiError,
    check_finite,
    content,
    is_away,
    naming,
    refusal,
    spoken,
)
from halfstep.api_client.saved_calls import ShelfCalls
from halfstep.session.nesting import merged

if TYPE_CHECKING:
    from halfstep.api_client.series import Series

URL = "http://127.0.0.1:8000"
ENDED = ("finished", "failed", "cancelled")
LOOK_SECONDS = 1.0  # between two looks at a run that is waited for
PATIENCE_SECONDS = 30.0  # for an answer
AWAY_SECONDS = 300.0  # for a server that is away while something is waited for
LONGEST_PAUSE_SECONDS = 30.0  # between two tries meanwhile
STORING_SECONDS = 600.0  # for a server that takes gigabytes to a bucket
PIECE_BYTES = 1 << 20
LOG_LINES_A_PAGE = 5000  # as many as the server lists at once
GZIP = 16 + zlib.MAX_WBITS  # of zlib, gzip's format
MOST_RUNS = 200  # that the server lists at once
MOST_POINTS = 5000  # of a line, that the server thins out


class Client(AlertCalls, ShelfCalls):
    """A connection to one server, as one user. A context manager, which closes it."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        """url: HALFSTEP_URL, that of `halfstep login`, or this machine.

        token: HALFSTEP_TOKEN, or that of `halfstep login`; it is made on the account page.
        """
        found = credentials.known(url, token, otherwise=URL)
        if found is None:
            advice = "make one on the account page; `halfstep login`, or set HALFSTEP_TOKEN"
            raise ApiError(0, f"there is no token: {advice}")
        self._http = httpx2.Client(
            base_url=found.url,
            headers={"Authorization": f"Bearer {found.token}"},
            timeout=PATIENCE_SECONDS,
            follow_redirects=True,
            event_hooks=naming(found.origin),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def recipes(self) -> list[dict[str, Any]]:
        """Return what can be trained, each with the JSON Schema of its configuration."""
        return list(self._get("/api/v1/recipes"))

    def runs(
        self,
        filter: str = "",  # noqa: A002 - as the API calls it
        *,
        sort: str = "-id",
        limit: int = 50,
        values: Sequence[str] = (),
    ) -> list[dict[str, Any]]:
        """Return runs, newest first.

        filter: words that all hold, as the list's own: "sweep status:failed val/accuracy>0.9".
        sort: a column, a setting or a metric, as loss; "-loss": downwards.  values: names of
        settings and metrics, to be found under "values" of each run.
        """
        return list(self.run_page(filter, sort=sort, limit=limit, values=values)["runs"])

    def run_page(
        self,
        filter: str = "",  # noqa: A002 - as the API calls it
        *,
        sort: str = "-id",
        limit: int = 50,
        values: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Return what `runs` has as "runs", how many match in all as "total", and as "notes" the
        names of filter and sort that no setting or metric has.

        More than the server gives at once is asked for page by page.
        """
        query: dict[str, Any] = {"filter": filter, "sort": sort, "values": ",".join(values)}
        query["limit"] = min(limit, MOST_RUNS)
        page = dict(self._get("/api/v1/runs", query))
        while page["next"] is not None and len(page["runs"]) < limit:
            query |= {"before": page["next"], "limit": min(limit - len(page["runs"]), MOST_RUNS)}
            further = self._get("/api/v1/runs", query)
            page["runs"] += further["runs"]
            page["next"] = further["next"]
        return page

    def run(self, run_id: int) -> dict[str, Any]:
        """Return one run, with its configuration and history."""
        return dict(self._get(f"/api/v1/runs/{run_id}"))

    def environment(self, run_id: int) -> dict[str, Any]:
        """Return what a run was started in: machine, versions, command, folder.

        Of a queued run its source and git too.
        """
        return dict(self._get(f"/api/v1/runs/{run_id}/environment"))

    def submit(
        self,
        recipe: str,
        config: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        tags: Sequence[str] = (),
        **further: Any,
    ) -> dict[str, Any]:
        """Queue a run. What the configuration leaves out has the recipe's default.

        further: priority, nodes, devices_per_node, after_id, parent_id, parent_step and
        compared_with.
        Raises ApiError, whose errors name each wrong field, its value and what is allowed.
        """
        wanted = {"recipe": recipe, "config": dict(config or {}), "name": name}
        return self._post("/api/v1/runs", wanted | {"tags": ", ".join(tags), **further})

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
    ) -> dict[str, Any]:
        """Queue a command line for a worker that offers commands.

        parameters: a value for each placeholder, {lr} say.  folder: on the worker; within the
        repository, if git names one, of which commit is a hash.  venv: a virtual environment there.
        variables: of its environment.  secrets: names of what the server keeps for it.  schema: of
        a placeholder, as JSON Schema has it: type, minimum, maximum, enum, default.
        further: priority, devices_per_node and after_id. Raises ApiError, as `submit` does.
        """
        command = _command(line, folder, git, commit, venv, variables, secrets, schema)
        wanted = {"command": command, "config": dict(parameters or {}), "name": name}
        return self._post("/api/v1/runs", wanted | {"tags": ", ".join(tags), **further})

    def upload_weights(
        self, path: Path | str, *, told: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[str, Any]:
        """Upload a .safetensors or .pt file; its "upload" is what `weights.upload` is to be.

        A file from which no run starts is kept for a day.  told: how many bytes have gone, and of
        how many. Raises ApiError, also if what came in is not what was sent.
        """
        path, digest = Path(path), hashlib.sha256()
        size = path.stat().st_size

        def pieces() -> Iterator[bytes]:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                    yield piece
                    told(file.tell(), size)

        headers = {"Content-Length": str(size)}
        with spoken():
            address = f"/api/v1/uploads/{quote(path.name, safe='', errors='replace')}"
            answer = self._http.put(
                address, content=pieces(), headers=headers, timeout=STORING_SECONDS
            )
            stored = dict(content(answer))
        if stored["sha256"] != digest.hexdigest():
            found = stored["sha256"]
            raise ApiError(0, f"{path} came in as {found}, not as {digest.hexdigest()}")
        return stored

    def wait(
        self,
        run_id: int,
        *,
        patience: float = AWAY_SECONDS,
        told: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Return the run once it is over, however it ended. patience, told: as of `follow`."""
        # Not all that it was in days of training.
        [run] = deque(self.follow(run_id, patience=patience, told=told), maxlen=1)
        return run

    def follow(
        self,
        run_id: int,
        *,
        patience: float = AWAY_SECONDS,
        told: Callable[[str], None] = lambda text: None,
    ) -> Iterator[dict[str, Any]]:
        """Yield the run as it is, and again whenever it has changed, until it is over.

        patience: for so many seconds a server that is away, restarted say, is asked again, before
        ApiError is raised.  told: a sentence, once each time that it is away.
        """
        run: dict[str, Any] = {}
        while run.get("status") not in ENDED:
            if run:
                time.sleep(LOOK_SECONDS)
            before, run = run, _patiently(lambda: self.run(run_id), patience, told)
            if run != before:
                yield run

    def series(
        self, run_id: int, *, first: int = 1, last: int | None = None, points: int | None = None
    ) -> "Series":
        """Return loss, scale, grad_norm and what else each step has, from step first to step last.

        points: as many as a chart of this width has use for, 32 to 5,000, with every extreme; every
        step if not told.  flags: a sum of 1, the step was skipped; 2, its loss is not finite; 4,
        its norm is beyond fp32; 256, the first optimizer skipped; 512, the second did; …
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
        """Return what the training logged beside: the numbers that it named itself, by name.

        first, last, points: as of `series`.
        """
        from halfstep.api_client import series  # with numpy

        if points is not None:
            metrics: dict[str, Any] = {}
            after: str | None = ""
            while after is not None:
                page = self.chart(
                    run_id, first=max(first, 1), last=last, points=points, metric_after=after
                )
                metrics |= page["metrics"]
                after = page.get("metrics_next")  # which servers of earlier versions lack
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
    ) -> dict[str, Any]:
        """Return what the page draws: series, metrics and skips, as few points as a screen has.

        metric_search: part of the names of metrics.  metric_after: the `metrics_next` of the page
        before, of 100 metrics.  metrics: up to 50 names that are told in any case.
        """
        query: dict[str, Any] = {"first": first, "points": points}
        if last is not None:
            query["last"] = last
        if metric_search:
            query["metric_search"] = metric_search
        if metric_after:
            query["metric_after"] = metric_after
        if metrics:
            query["metric"] = list(metrics)
        return dict(self._get(f"/api/v1/runs/{run_id}/series", query))

    def compare(self, run_ids: Sequence[int]) -> dict[str, Any]:
        """Lay up to 50 runs side by side, as /compare does: runs, each with its last figures and
        its best ones, the settings in which they differ, and the runs that are missing.
        """
        return dict(self._get("/api/v1/comparison", {"runs": ",".join(map(str, run_ids))}))

    def charts(
        self,
        run_ids: Sequence[int],
        series: Sequence[str] = ("loss",),
        *,
        first: int = 1,
        last: int | None = None,
        points: int = 1000,
    ) -> dict[int, dict[str, Any]]:
        """Return what that page draws: of each run some series or metrics, by its number."""
        query: dict[str, Any] = {"runs": ",".join(map(str, run_ids)), "series": list(series)}
        query |= {"first": first, "points": points} | ({} if last is None else {"last": last})
        found = self._get("/api/v1/comparison/series", query)["runs"]
        return {int(run_id): page for run_id, page in found.items()}

    @contextmanager
    def export(self, run_id: int, name: str) -> Iterator[Iterator[str]]:
        """Open the export of all `steps`, `events` or `metrics`; yield its CSV in pieces."""
        path = f"/api/v1/runs/{run_id}/export/{name}.csv"
        with spoken(), self._http.stream("GET", path) as answer:
            if answer.is_error:
                answer.read()
                raise refusal(answer)
            yield answer.iter_text()

    def events(self, run_id: int) -> Iterator[dict[str, Any]]:
        """Yield what the scaler did, in order of step: skips, with culprits, growth, backoff."""
        return self._pages(f"/api/v1/runs/{run_id}/events", "events")

    def findings(self, run_id: int) -> list[dict[str, Any]]:
        """Return what is wrong with a run and what to do, the gravest first."""
        return list(self._pages(f"/api/v1/runs/{run_id}/findings", "findings"))

    def artifacts(self, run_id: int) -> list[dict[str, Any]]:
        """Return the images, texts and tables that a run left, newest step first."""
        return list(self._pages(f"/api/v1/runs/{run_id}/artifacts", "artifacts"))

    def set_scale(self, run_id: int, scale: float) -> dict[str, Any]:
        """Ask a running fp16 run to go on with another loss scale from its next step on."""
        return self._post(f"/api/v1/runs/{run_id}/scale", {"scale": scale})

    def fork(
        self,
        run_id: int,
        config: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        name: str = "",
        tags: Sequence[str] = (),
        **further: Any,
    ) -> dict[str, Any]:
        """Queue a run that starts from another's checkpoint, configured as that was.

        config: what is to be otherwise.  step: of the checkpoint; the newest if not told.
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

    def go_on(self, run_id: int) -> dict[str, Any]:
        """Queue the steps that a cancelled or failed run has not made, from its last checkpoint."""
        return self._post(f"/api/v1/runs/{run_id}/continuation")

    def log(self, run_id: int, *, last: int | None = None) -> list[dict[str, Any]]:
        """Return the lines of a run's log, oldest first. last: so many at most, up to 5,000."""
        if last is not None:
            return list(self._get(f"/api/v1/runs/{run_id}/log", {"limit": last})["log"])
        pages: list[list[dict[str, Any]]] = []
        query: dict[str, Any] | None = {"limit": LOG_LINES_A_PAGE}
        while query is not None:
            page = self._get(f"/api/v1/runs/{run_id}/log", query)
            pages.append(page["log"])
            is_last = page["next"] is None
            query = None if is_last else {"limit": LOG_LINES_A_PAGE, "before": page["next"]}
        return [line for page in reversed(pages) for line in page]

    def log_text(self, run_id: int) -> Iterator[bytes]:
        """Yield all that a run has printed, in pieces; of a run in training its complete parts.

        Raises ApiError, of status 404 if there is no file of its log.
        """
        with spoken(), self._http.stream("GET", f"/runs/{run_id}/log/download") as answer:
            if answer.is_error:
                answer.read()
                raise refusal(answer)
            yield from _gunzipped(answer.iter_raw())

    def cancel(self, run_id: int) -> dict[str, Any]:
        """End a run; one that trains leaves a checkpoint first."""
        return self._post(f"/api/v1/runs/{run_id}/cancellation")

    def edit(
        self,
        run_id: int,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        note: str | None = None,
    ) -> dict[str, Any]:
        """Change a run's name, tags or note, which is Markdown; what is not told stays."""
        wanted = {"name": name, "tags": None if tags is None else list(tags), "note": note}
        with spoken():
            return dict(content(self._http.patch(f"/api/v1/runs/{run_id}", json=wanted)))

    def delete(self, *run_ids: int) -> dict[str, Any]:
        """Put runs that have ended into the trash; return those `done`, and those `refused`."""
        return self.bulk("delete", run_ids)

    def restore(self, *run_ids: int) -> dict[str, Any]:
        """Take runs out of the trash; the answer is that of `delete`."""
        return self.bulk("restore", run_ids)

    def move(self, *run_ids: int, project: str) -> dict[str, Any]:
        """Let runs belong to another project; the answer is that of `delete`."""
        return self.bulk("move", run_ids, project=project)

    def bulk(
        self, action: str, run_ids: Sequence[int], *, tag: str = "", project: str | None = None
    ) -> dict[str, Any]:
        """Do one thing with up to 200 runs, as far as it can be done with each.

        action: add_tag or remove_tag, with a tag; cancel, delete, restore; move, with a project; or
        erase, which deletes runs of the trash for good.
        """
        wanted = {"action": action, "runs": list(run_ids), "tag": tag, "project": project}
        return self._post("/api/v1/runs/bulk", wanted)

    def bin(self) -> list[dict[str, Any]]:
        """Return the deleted runs that can be restored, newest first."""
        return list(self._pages("/api/v1/trash", "runs"))

    def storage(self) -> dict[str, Any]:
        """Return what room there is, and what the files of runs take."""
        return dict(self._get("/api/v1/storage"))

    def pause(self, run_id: int) -> dict[str, Any]:
        """Pause a run, with a checkpoint."""
        return self._post(f"/api/v1/runs/{run_id}/pause")

    def resume(self, run_id: int) -> dict[str, Any]:
        """Queue a paused run again."""
        return self._post(f"/api/v1/runs/{run_id}/resumption")

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
    ) -> dict[str, Any]:
        """Begin a sweep: runs that differ in what `space` has by path of a setting.

        space: a list of values, or "16..64 step 16", "uniform(a, b)", "loguniform(a, b)",
        "integers(a, b)".  kind: grid, random, tpe or hyperband.  goal: minimise or maximise; as the
        metric's name has it if not told.  further: seed, name, priority, nodes, devices_per_node.
        """
        wanted: dict[str, Any] = {"recipe": recipe, "space": dict(space)}
        wanted["config"] = dict(config or {})
        wanted |= {"kind": kind, "metric": metric, "goal": goal, "runs": runs, "at_once": at_once}
        return self._post("/api/v1/sweeps", wanted | {"tags": ", ".join(tags), **further})

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
    ) -> dict[str, Any]:
        """Begin a sweep of a command line: runs that differ in what `space` has by placeholder.

        parameters: a value for each of the others.  further: as of `begin_sweep`; the rest is that
        of `submit_command`.
        """
        command = _command(line, folder, git, commit, venv, variables, secrets, schema)
        return self.begin_sweep("", space, parameters, command=command, **further)

    def sweeps(self, *, limit: int = 50) -> list[dict[str, Any]]:
        """Return sweeps, newest first."""
        return list(self._get("/api/v1/sweeps", {"limit": limit})["sweeps"])

    def sweep(self, sweep_id: int) -> dict[str, Any]:
        """Return one sweep: where it is, and its best run so far."""
        return dict(self._get(f"/api/v1/sweeps/{sweep_id}"))

    def trials(self, sweep_id: int) -> list[dict[str, Any]]:
        """Return a sweep's runs with what each tried and its value, the best first."""
        query = {"sort": "value", "limit": 1000}
        return list(self._get(f"/api/v1/sweeps/{sweep_id}/trials", query)["trials"])

    def extend_sweep(
        self, sweep_id: int, *, runs: int | None = None, space: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Add runs to a sweep; to a grid, more values of its settings."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/extension", {"runs": runs, "space": space})

    def move_sweep(self, sweep_id: int, *, project: str) -> dict[str, Any]:
        """Let a sweep and all of its runs belong to another project."""
        return self._put(f"/api/v1/sweeps/{sweep_id}/project", {"project": project})

    def pause_sweep(self, sweep_id: int) -> dict[str, Any]:
        """Submit no more runs of a sweep for now; those under way go on."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/pause")

    def resume_sweep(self, sweep_id: int) -> dict[str, Any]:
        """Go on with a paused or failed sweep."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/resumption")

    def cancel_sweep(self, sweep_id: int) -> dict[str, Any]:
        """End a sweep, and its runs that wait or train."""
        return self._post(f"/api/v1/sweeps/{sweep_id}/cancellation")

    def wait_for_sweep(
        self,
        sweep_id: int,
        *,
        patience: float = AWAY_SECONDS,
        told: Callable[[str], None] = lambda text: None,
    ) -> dict[str, Any]:
        """Return the sweep once it is over, or has stopped for a fault.

        patience, told: as of `follow`.
        """
        found: dict[str, Any] = {}
        while found.get("status") not in ENDED:
            if found:
                time.sleep(LOOK_SECONDS)
            found = _patiently(lambda: self.sweep(sweep_id), patience, told)
        return found

    def projects(self) -> list[dict[str, Any]]:
        """Return the projects that you see, with what they may use and do."""
        return list(self._get("/api/v1/projects"))

    def rename_project(self, name: str, new_name: str) -> dict[str, Any]:
        """Call a project otherwise. For operators."""
        wanted = {"name": name, "new_name": new_name}
        with spoken():
            return dict(content(self._http.patch("/api/v1/projects/name", json=wanted)))

    def delete_project(self, name: str) -> None:
        """Delete a project that has no runs, with its sweeps. For operators."""
        self._delete("/api/v1/projects", {"name": name})

    def workers(self) -> Iterator[dict[str, Any]]:
        """Yield the workers, in the order in which they came."""
        return self._pages("/api/v1/workers", "workers")

    def drain_worker(self, worker_id: int, *, stop: bool = False) -> dict[str, Any]:
        """Have a worker take nothing more. stop: what runs there goes back to the queue too."""
        return self._post(f"/api/v1/workers/{worker_id}/drain", {"stop": stop})

    def undrain_worker(self, worker_id: int) -> dict[str, Any]:
        """Let a worker take runs again."""
        return self._post(f"/api/v1/workers/{worker_id}/undrain")

    def checkpoints(self, run_id: int) -> list[dict[str, Any]]:
        """Return the files that a run has saved, newest step first."""
        return list(self._pages(f"/api/v1/runs/{run_id}/checkpoints", "checkpoints"))

    def download(
        self,
        run_id: int,
        folder: Path | str = ".",
        *,
        step: int | None = None,
        kind: str = "",
        told: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Download a file of a run's checkpoint into a folder; return where it lies.

        step: the newest if not told.  kind: checkpoint, the whole state, if not told, or the only
        file that there is; or weights.
        told: how many bytes have come, and of how many, from time to time.
        One that broke off goes on where it did. Raises ApiError if its SHA-256 is not the server's.
        """
        files = [f for f in self.checkpoints(run_id) if step is None or f["step"] == step]
        wanted = [f for f in files if f["kind"] == (kind or "checkpoint")]
        if not kind and len(files) == 1:
            wanted = files
        if not wanted:
            at = "" if step is None else f" at step {step}"
            named = [f"--kind {f['kind']} at step {f['step']}" for f in self.checkpoints(run_id)]
            there = f"there are: {', '.join(named) or 'none yet'}"
            text = f"run {run_id} has no file of the kind {kind or 'checkpoint'}{at}; {there}"
            raise ApiError(404, text)
        [file, *_] = wanted
        same_step = [f["kind"] for f in files if f["step"] == file["step"]]
        if file["kind"] == "checkpoint" and any(kind.startswith("shard.") for kind in same_step):
            raise ApiError(
                409,
                f"the state at step {file['step']} lies in shards, which a run goes on from; to "
                "download are its weights (kind weights), and states that were asked for or are a "
                "run's last",
            )
        path = f"/runs/{run_id}/checkpoints/{file['id']}/download"
        partial = Path(folder) / f".{file['sha256']}.partial"
        partial.parent.mkdir(parents=True, exist_ok=True)
        name = self._fetch(path, partial, lambda done: told(done, file["size_bytes"]))
        with partial.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != file["sha256"]:
            partial.unlink()
            raise ApiError(0, f"{name} is damaged: its SHA-256 is {found}, not {file['sha256']}")
        return partial.replace(Path(folder) / name)

    def _fetch(self, path: str, partial: Path, told: Callable[[int], None]) -> str:
        """Fetch what a file lacks; return the name that the server gives it."""
        had = partial.stat().st_size if partial.exists() else 0
        headers = {"Range": f"bytes={had}-"} if had else {}
        with spoken(), self._http.stream("GET", path, headers=headers) as answer:
            if answer.status_code == 416:  # it has come whole, but its name is not known any more
                return _name(self._http.head(path))
            if answer.is_error:
                answer.read()
                raise refusal(answer)
            with partial.open("ab" if answer.status_code == 206 else "wb") as file:
                for chunk in answer.iter_raw():
                    file.write(chunk)
                    told(file.tell())
            return _name(answer)

    def _pages(self, path: str, name: str) -> Iterator[dict[str, Any]]:
        after: str | None = ""
        while after is not None:
            page = self._get(path, {"after": after})
            yield from page[name]
            after = page["next"]

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        with spoken():
            return content(self._http.get(path, params=query))

    def _delete(self, path: str, query: Mapping[str, Any] | None = None) -> None:
        with spoken():
            answer = self._http.delete(path, params=query)
        if answer.is_error:
            raise refusal(answer)

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        check_finite(body)
        with spoken():
            return dict(content(self._http.post(path, json=body)))

    def _put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        check_finite(body)
        with spoken():
            return dict(content(self._http.put(path, json=body)))


def _patiently(
    look: Callable[[], dict[str, Any]], patience: float, told: Callable[[str], None]
) -> dict[str, Any]:
    """Return what a look finds; while the server is away it is repeated, ever more rarely."""
    pause, until = LOOK_SECONDS, time.monotonic() + patience
    while True:
        try:
            return look()
        except ApiError as error:
            left = until - time.monotonic()
            if not is_away(error) or left <= 0:
                raise
            if pause == LOOK_SECONDS:
                told(f"{error}; it is asked again for {patience:g} seconds")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _name(answer: httpx2.Response) -> str:
    """Return the name that a download has; nothing that would leave its folder."""
    message = Message()
    told = [each.headers.get("content-disposition") for each in (answer, *answer.history)]
    message["content-disposition"] = next(filter(None, told), "")  # a bucket's answer has none
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
) -> dict[str, Any]:
    return {
        "line": line,
        "folder": folder,
        "git": git,
        "commit": commit,
        "venv": venv,
        "variables": dict(variables or {}),
        "secrets": list(secrets),
        "parameters": {name: dict(rules) for name, rules in (schema or {}).items()},
    }


def _gunzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress files of gzip that follow each other."""
    decompressor = zlib.decompressobj(GZIP)
    for piece in pieces:
        rest = piece
        while rest:
            yield decompressor.decompress(rest)
            rest = decompressor.unused_data
            if decompressor.eof:
                decompressor = zlib.decompressobj(GZIP)
