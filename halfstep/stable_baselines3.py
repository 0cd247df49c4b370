"""Stable-Baselines3: `model.learn(..., callback=halfstep.stable_baselines3.Watch())`.

Steps are observed through torch's own optimizers; this callback only passes the policy, logs what
Stable-Baselines3 logs, such as the mean reward, and finishes the run.
"""

from typing import Any

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter

from halfstep.session import run_start, watch_session


class Watch(BaseCallback):  # type: ignore[misc]
    """Callback that watches one training. Takes the arguments of halfstep.watch."""

    def __init__(self, **named: Any) -> None:
        super().__init__()
        self._named = named
        self.watch: watch_session.Watch | None = None

    def _on_training_start(self) -> None:
        """Start watching, once the policy and its optimizers exist."""
        named = {"config": _config(self.model), "name": type(self.model).__name__} | self._named
        self.watch = run_start.watch(self.model.policy, **named)
        self._writer = _Writer(self.watch)
        self.logger.output_formats.append(self._writer)

    def _on_step(self) -> bool:
        """Continue: each call follows a step of the environment."""
        return True

    def _on_training_end(self) -> None:
        """Finish the run. (An exception ends the process, and is handled as in any script.)"""
        if self.watch:
            self.logger.output_formats.remove(self._writer)
            self.watch.finish()


class _Writer(KVWriter):  # type: ignore[misc]
    """Output format that logs numbers, at the last training step."""

    def __init__(self, watch: watch_session.Watch) -> None:
        self._watch = watch

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """Log numbers; time/total_timesteps has the environment's step."""
        self._watch.log({name: value for name, value in key_values.items() if _is_number(value)})

    def close(self) -> None:
        """Do nothing: the callback finishes the run."""


def _config(model: Any) -> dict[str, Any]:
    """Return the arguments of the algorithm that are numbers or texts."""
    return {name: value for name, value in vars(model).items() if _is_plain(name, value)}


def _is_plain(name: str, value: object) -> bool:
    return not name.startswith("_") and isinstance(value, bool | int | float | str)


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)
