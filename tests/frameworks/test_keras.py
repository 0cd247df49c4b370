"""Keras on torch with `halfstep.keras.Watch`, compared with the unwatched fit."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.telemetry.flags import SKIPPED
from tests.frameworks.reference import read_written, samples

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
import halfstep  # noqa: E402
import halfstep.keras  # noqa: E402


class Recording(keras.optimizers.LossScaleOptimizer):
    """An optimizer that records its scale, and which gradients are not finite."""

    def check_finite(self, grads: Any) -> Any:
        """Record scale and culprits before the check."""
        if not hasattr(self, "reported"):
            self.reported: list[tuple[float, set[str]]] = []
        culprits = {
            variable.path.replace("/", ".")
            for variable, gradient in zip(self._trainable_variables, grads, strict=True)
            if not gradient.isfinite().all()
        }
        self.reported.append((float(self.dynamic_scale.value), culprits))
        return super().check_finite(grads)


def fit(callbacks: list[Any], *, is_scaled: bool = True) -> tuple[Any, list[torch.Tensor]]:
    """Fit two epochs on the CPU; with scaling the gradients overflow."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    )
    optimizer: Any = keras.optimizers.Adam(1e-2)
    if is_scaled:
        optimizer = Recording(optimizer, initial_scale=2.0**127, dynamic_growth_steps=4)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    x, y = samples()
    model.fit(
        x.numpy(), y.numpy(), batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=callbacks
    )
    weights = [each.value.detach().cpu().clone() for each in model.trainable_variables]
    return model.optimizer, weights


def test_keras_is_recorded_exactly(tmp_path: Path) -> None:
    """Scales, skips and culprits equal the optimizer's, and weights those without a watch."""
    bare, without = fit([])
    watched, with_us = fit([halfstep.keras.Watch(folder=tmp_path)])
    assert watched.reported == bare.reported
    assert all(map(torch.equal, with_us, without))
    steps, events = read_written(tmp_path)
    skipped = [bool(culprits) for _, culprits in watched.reported]
    assert 2 <= sum(skipped) < len(skipped)
    assert steps["scale"].tolist() == [scale for scale, _ in watched.reported]
    assert ((steps["flags"] & SKIPPED) != 0).tolist() == skipped
    assert np.isfinite(steps["loss"]).all()
    assert steps["lr"] == pytest.approx(1e-2)
    result = {
        e["step"]: {c["name"] for c in e["culprits"]} for e in events if e.get("kind") == "skip"
    }
    expected = [culprits for _, culprits in watched.reported]
    assert result == {step: culprits for step, culprits in enumerate(expected, 1) if culprits}
    assert {e["name"] for e in events if e["event"] == "metric"} == {"mae"}
    assert not {"apply", "check_finite", "scale_loss"} & set(vars(watched))


def test_keras_without_a_scale_is_watched_too(tmp_path: Path) -> None:
    """Without a loss scale Keras' steps are recorded with a scale of 1 and no skips."""
    _, without = fit([], is_scaled=False)
    _, with_us = fit([halfstep.keras.Watch(folder=tmp_path)], is_scaled=False)
    assert all(map(torch.equal, with_us, without))
    steps, _ = read_written(tmp_path)
    assert (len(steps), set(steps["scale"])) == (24, {1.0})
    assert (steps["grad_norm"] > 0).all()
