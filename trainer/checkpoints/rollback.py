"""Rollback after a spike of the loss, to the last checkpoint before it, with other examples.

The host waits for the device at fixed steps and checks only there: a repeated or resumed run rolls
back from and to the same steps. So only checkpoints saved at an interval are used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfstep.run_config import RunConfig
from halfstep.telemetry.spool import Event
from trainer.checkpoints.checkpoint import Progress
from trainer.data.batches import Batches
from trainer.diagnosis.spikes import Spikes
from trainer.distributed.ranks import Ranks
from trainer.precision.scale_policies import RuleError


class SpikeError(RuleError):
    """The loss rose again after as many rewinds as were allowed; the message says when."""


class Rollback:
    """Decides when to check for a spike, and to which checkpoint to return."""

    def __init__(
        self, config: RunConfig[Any], spikes: Spikes, folder: Path | None, ranks: Ranks
    ) -> None:
        """folder: of the checkpoints; without there is no going back."""
        self._settings, self._spikes = config.spike, spikes
        self._folder, self._ranks = folder, ranks
        self._last = config.training.steps
        self._between = config.checkpoints.every_steps or self._last
        self._is_on = config.spike.rollback and folder is not None
        self._brought: list[Path] = []  # to this machine, to be read

    def is_due(self, step: int) -> bool:
        """Whether to wait for the device after this step, and look."""
        if not self._is_on:
            return False
        looks = (self._settings.look_every_steps, self._between)
        return step == self._last or any(step % every == 0 for every in looks)

    def look(self, finish_saves: Callable[[], None]) -> Path | None:
        """Return the checkpoint to return to; None to continue.

        finish_saves: waits for the disk, which may still be busy with that very checkpoint.
        Of a spike without one, and of one too many, nothing comes but its event; or SpikeError.
        """
        spike, self._spikes.pending = self._spikes.pending, None
        spike = self._ranks.gather(spike)[0]  # all have the same loss; the word of one counts
        if spike is None or self._folder is None:
            return None
        if self._spikes.rollbacks >= self._settings.max_rollbacks:
            if self._settings.afterwards == "fail":
                raise SpikeError(
                    f"the loss rose to {spike['loss']:.4g} at step {spike['step']} (z "
                    f"{spike['z']:.3g}), and spike.max_rollbacks is {self._settings.max_rollbacks}"
                )
            return None
        before = (spike["step"] - 1) // self._between * self._between
        path = self._folder / f"step-{before:08d}.pt"
        finish_saves()
        [saved, *_] = self._ranks.gather(_files(path))
        # By rank 0, whose disk other machines do not see.
        places = [self._folder / name for name in saved]
        self._brought = [place for place in places if self._ranks.hand_out(place)]
        if not saved:
            return None
        self._going_from, self._rollbacks = spike, self._spikes.rollbacks + 1
        return path

    def tell(
        self,
        back: Progress,
        step: int,
        batches: Batches,
        on_event: Callable[[Event], None],
    ) -> None:
        """Have it known that the run went back from a step, and from where in the data it goes on.

        back: how far the run is now.  batches: at the end of that step.
        """
        self._ranks.gather(None)  # all have read it
        for place in self._brought:
            place.unlink()
        spike, examples = self._going_from, batches.position - back.position
        self._spikes.pending, self._spikes.rollbacks = None, self._rollbacks
        self._spikes.left_out.append((back.step, examples))
        rolled_back = {
            "event": "rolled_back",
            "step": back.step,
            "from_step": step,
            "spike": spike["step"],
        }
        rolled_back |= {"loss": spike["loss"], "z": spike["z"]}
        on_event({**rolled_back, "examples": examples, "rollbacks": self._rollbacks})
        on_event({**spike, "rolled_back_to": back.step})


def _files(path: Path) -> list[str]:
    """Return the names of a checkpoint's files: its own and, of one in shards, theirs. Or none."""
    if not path.is_file():
        return []
    shards = sorted(path.with_suffix("").glob("*"))
    return [str(each.relative_to(path.parent)) for each in (*shards, path)]
