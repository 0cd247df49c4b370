"""Client calls about precision diffs and precision plans."""

from typing import TYPE_CHECKING

from halfstep.api_client.connection import Connection

if TYPE_CHECKING:
    from halfstep.api_client.response_types import (
        AcceptedRequest,
        PrecisionDiff,
        PrecisionPlan,
        RunSummary,
    )


class PrecisionCalls(Connection):
    """The part of `halfstep.Client` for precision diffs and precision plans."""

    def precision_diff(self, run_id: int, step: int | None = None) -> "PrecisionDiff | None":
        """Return a batch in two precisions, compared module by module: by default the last one.

        None if the run has no diff of the step.
        """
        query = {} if step is None else {"step": step}
        diffs = self._get(f"/api/v1/runs/{run_id}/precision-diffs", query)
        return diffs["diff"]

    def request_precision_diff(self, run_id: int) -> "AcceptedRequest":
        """Request a precision diff of a running fp16 or bf16 run; precision_diff returns it."""
        return self._post(f"/api/v1/runs/{run_id}/precision-diffs", {})

    def request_checkpoint_diff(self, run_id: int, *steps: int) -> "RunSummary":
        """Queue precision diffs at checkpoints of a run, by default at the last one.

        Returns the run that measures them; precision_diff of that run returns them.
        """
        body = {"task": "precision_diff", "checkpoints": steps}
        return self._post(f"/api/v1/runs/{run_id}/measurements", body)

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
        return self._post(f"/api/v1/runs/{run_id}/measurements", body)

    def precision_plan(self, run_id: int) -> "PrecisionPlan | None":
        """Return the precision plan that a run has measured; None if it has none, or not yet."""
        return self._get(f"/api/v1/runs/{run_id}/precision-plan")["plan"]

    def queue_best_of_plan(self, run_id: int, *, seeds: int = 3) -> list[int]:
        """Queue the three best points of a run's plan, and fp32, with several seeds.

        Returns the ids of the runs, for `parity`.
        """
        path = f"/api/v1/runs/{run_id}/precision-plan/runs"
        return list(self._post(path, {"seeds": seeds})["queued"])
