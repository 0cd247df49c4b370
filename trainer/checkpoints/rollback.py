"""Rollback after a spike of the loss, to the last checkpoint before it, with other examples.

The host waits for the device at fixed steps and checks only there: a repeated or resumed run rolls
back from and to the same steps. So only checkpoints saved at an interval are used.
"""

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from halfstep.number_formats import number
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, RolledBack
from trainer.checkpoints.checkpoint import Progress
from trainer.data.batches import Batches
from trainer.diagnosis.spikes import Spikes
from trainer.distributed.ranks import Ranks
from trainer.precision.scale_policies import RuleError


class SpikeError(RuleError):
    """The loss spiked again after the allowed number of rollbacks; the message has the step."""


class Rollback:
    """Decides when to check for a spike, and to which checkpoint to return."""

    def __init__(
        self, config: RunConfig, spikes: Spikes, folder: Path | None, ranks: Ranks
    ) -> None:
        """folder: of the checkpoints; None disables rollback."""
        self._settings, self._spikes = config.spike, spikes
        self._folder, self._ranks = folder, ranks
        self._last = config.training.steps
        self._between = config.checkpoints.every_steps or self._last
        self._is_on = config.spike.rollback and folder is not None
        self._brought: list[Path] = []  # files copied to this machine to be read

    def is_due(self, step: int) -> bool:
        """Return whether to wait for the device after this step and check for a spike."""
        if not self._is_on:
            return False
        intervals = (self._settings.check_every_steps, self._between)
        return step == self._last or any(step % every == 0 for every in intervals)

    def poll(self, finish_saves: Callable[[], None]) -> Path | None:
        """Return the checkpoint to roll back to; None to continue.

        finish_saves: waits until pending saves are on the disk. Without a checkpoint, or after the
        allowed number of rollbacks, a spike only emits its event, or raises SpikeError.
        """
        spike, self._spikes.pending = self._spikes.pending, None
        # All ranks have the same loss; rank 0's result is used.
        spike = self._ranks.gather(spike)[0]
        if spike is None or self._folder is None:
            return None
        if self._spikes.rollbacks >= self._settings.max_rollbacks:
            if self._settings.afterwards == "fail":
                raise SpikeError(
                    f"the loss rose to {number(spike.loss)} at step {spike.step:,} (z "
                    f"{number(spike.z)}), and spike.max_rollbacks is {self._settings.max_rollbacks}"
                )
            return None
        before = (spike.step - 1) // self._between * self._between
        path = self._folder / f"step-{before:08d}.pt"
        finish_saves()
        [saved, *_] = self._ranks.gather(_files(path))
        # Decided by rank 0, whose disk other machines cannot read.
        places = [self._folder / name for name in saved]
        self._brought = [place for place in places if self._ranks.hand_out(place)]
        if not saved:
            return None
        self._going_from, self._rollbacks = spike, self._spikes.rollbacks + 1
        return path

    def report(
        self,
        back: Progress,
        step: int,
        batches: Batches,
        on_event: Callable[[Event], None],
    ) -> None:
        """Emit the events of a rollback, and record the left-out examples.

        back: progress after the rollback.  batches: at the end of that step.
        """
        self._ranks.gather(None)  # all have read it
        for place in self._brought:
            place.unlink()
        spike, examples = self._going_from, batches.position - back.position
        self._spikes.pending, self._spikes.rollbacks = None, self._rollbacks
        self._spikes.left_out.append((back.step, examples))
        on_event(
            RolledBack(
                step=back.step,
                from_step=step,
                spike=spike.step,
                loss=spike.loss,
                z=spike.z,
                examples=examples,
                rollbacks=self._rollbacks,
            )
        )
        on_event(replace(spike, rolled_back_to=back.step))


def _files(path: Path) -> list[str]:
    """Return the names of a checkpoint's files, including its shards; [] if it is missing."""
    if not path.is_file():
        return []
    shards = sorted(path.with_suffix("").glob("*"))
    return [str(file.relative_to(path.parent)) for file in (*shards, path)]
