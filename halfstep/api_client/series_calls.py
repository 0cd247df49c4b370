"""Client calls about the measured values of runs: series, metrics, comparisons and findings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from halfstep.api_client.connection import Connection
from halfstep.telemetry.plain_json import JsonObject

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from halfstep.api_client.response_types import (
        AdvisedFinding,
        ComparedSeries,
        DamageOfRuns,
        Event,
        Parity,
        RunComparison,
        SeriesPage,
    )
    from halfstep.api_client.series import Series

MOST_POINTS = 5000  # the server's limit per line of a chart


class SeriesCalls(Connection):
    """The part of `halfstep.Client` for measured values and findings."""

    def plot(self, run_id: int, *names: str, points: int = 2000) -> "Figure":
        """Return a plotly figure of a run; also `client.run(run_id).plot()`.

        names: series (loss, scale, grad_norm, lr) and metrics, a panel each; by default loss and,
        if it is scaled, loss scale. Skipped steps are marked. Requires plotly: `halfstep[plot]`.
        """
        from halfstep.api_client import figure

        page = self.chart(run_id, points=min(points, MOST_POINTS), metrics=list(names))
        return figure.of_page(page, names)

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
        return self._get(f"/api/v1/runs/{run_id}/series", query)

    def compare(self, run_ids: Sequence[int]) -> "RunComparison":
        """Compare up to 50 runs, as /compare does.

        Returns the runs, each with its last and best figures, the settings that differ, and the
        missing runs.
        """
        return self._get("/api/v1/comparison", {"runs": ",".join(map(str, run_ids))})

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
        return self._get("/api/v1/comparison/parity", query)

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
        with self._stream(path) as answer:
            yield answer.iter_text()

    @contextmanager
    def export_file(self, run_id: int, name: str) -> Iterator[Iterator[bytes]]:
        """Open an export as a file, such as steps.parquet or metrics.csv, as pieces of it."""
        with self._stream(f"/api/v1/runs/{run_id}/export/{name}") as answer:
            yield answer.iter_bytes()

    def events(self, run_id: int) -> "Iterator[Event]":
        """Yield the scaler's events in order of step: skips with culprits, growth, backoff."""
        return self._pages(f"/api/v1/runs/{run_id}/events", "events")

    def damage(self, *run_ids: int) -> "DamageOfRuns":
        """Return what is damaged or missing of runs: steps, metrics, checkpoints, artifacts.

        `text` is empty if they are whole. The server reads all of their steps.
        """
        damage: DamageOfRuns = self._get("/api/v1/damage", {"runs": ",".join(map(str, run_ids))})
        return damage

    def findings(self, run_id: int) -> "list[AdvisedFinding]":
        """Return a run's findings, each a problem and its remedy, the most severe first."""
        return list(self._pages(f"/api/v1/runs/{run_id}/findings", "findings"))
