"""Batches of past steps, which are drawn again."""

from halfstep.evidence.loop_inputs import nonfinite_tensors
from halfstep.telemetry.events import BadInput
from trainer.data.batches import Batches


class PastBatches:
    """Batches of past steps. The caller restores the sampler and the generators."""

    def __init__(self, batches: Batches, left_out: list[tuple[int, int]]) -> None:
        """left_out: for each rollback a step and the number of examples skipped after it.

        May grow.
        """
        self._batches, self._left_out = batches, left_out

    def find_nonfinite(self, step: int, coming: int) -> list[BadInput]:
        """Return the nonfinite tensors of a past step's batch. The host waits."""
        position = self.find_position(step, coming)
        batches = self._batches.again(position) if position >= 0 else ()
        tensors = {
            name: BadInput(name=name[:200], inf=inf, nan=nan)
            for batch in batches
            for name, inf, nan in nonfinite_tensors("batch", batch)
        }
        return list(tensors.values())

    def find_position(self, step: int, coming: int) -> int:
        """Return the position of a past step's examples. coming: the next step to be drawn."""
        position = self._batches.position - (coming - step) * self._batches.examples_in_a_step
        return position - sum(examples for last, examples in self._left_out if step <= last)
