"""Resume from a checkpoint: of an earlier attempt or another run, or after a spike."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfstep.recipe import Recipe
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import Progress
from trainer.cuda_graph import GraphedSteps
from trainer.data.batches import Batches
from trainer.distributed.shards import maker
from trainer.prepared_recipe import PreparedRecipe
from trainer.schedule import make_schedule


def resume_from(
    resume: Path,
    prepared: PreparedRecipe,
    batches: Batches,
    *,
    is_fork: bool,
    is_checked: bool,
) -> tuple[Progress, Mapping[str, Any], list[str]]:
    """Load a checkpoint's state; return its progress, its inherited parts, and notes.

    is_checked: the file's SHA-256 was verified just now.

    The notes list reasons why the run may not continue bit-exactly. No notes means the same
    settings, software and device, and the same next batch.
    """
    recipe, ranks = prepared.recipe, prepared.ranks
    state, progress, notes = load_and_restore(resume, prepared, is_checked=is_checked)
    batches.seek(progress.position, checkpoint.in_memory(state.get("data")))
    fingerprints = state.get("next_batch", [])
    if len(fingerprints) != ranks.world_size:
        notes.append("the next batch is unknown")
    elif any(ranks.gather(batches.fingerprint() != fingerprints[ranks.rank])):
        notes.append(f"the next batch differs: {_why_other_batch(state, recipe)}")
    inherited = select_inherited_parts(state, is_scaled=recipe.scaler.is_enabled(), is_fork=is_fork)
    return progress, inherited, notes


def _why_other_batch(state: Mapping[str, Any], recipe: Recipe) -> str:
    if "data" not in state:
        return "the version that saved the checkpoint used another order of examples"
    if recipe.dataset is not None:
        return "the dataset or its own random state has changed"
    return "Recipe.batch does not depend only on its indices"


def go_back_to(
    path: Path,
    prepared: PreparedRecipe,
    peaks: Mapping[str, list[float]],
    parts: dict[str, Any],
    graph: GraphedSteps | None,
) -> Progress:
    """Restore a checkpoint of this run, except for its position in the data.

    Returns its progress.

    parts: objects whose state continues; the schedule is created again, because optimizers have new
    parameter groups.
    """
    recipe, training = prepared.recipe, prepared.config.training
    state, progress, _notes = load_and_restore(path, prepared)
    if graph is not None:
        graph.forget()
    parts["schedule"] = make_schedule(training, recipe.optimizers, peaks, prepared.device)
    load_parts(
        parts, select_inherited_parts(state, is_scaled=recipe.scaler.is_enabled(), is_fork=False)
    )
    return progress


def load_and_restore(
    path: Path,
    prepared: PreparedRecipe,
    *,
    is_checked: bool = False,
) -> tuple[dict[str, Any], Progress, list[str]]:
    """Load a checkpoint and restore it; return it with the result of checkpoint.restore.

    is_checked: its bytes are verified; if they are not, rank 0 verifies them.
    """
    is_checked = is_checked or prepared.ranks.rank > 0
    state = checkpoint.load(path, is_checked=is_checked, make=maker(prepared.modules))
    progress, notes = checkpoint.restore(state, prepared)
    return state, progress, notes


def select_inherited_parts(
    state: Mapping[str, Any], *, is_scaled: bool, is_fork: bool
) -> Mapping[str, object]:
    """Return the parts of a checkpoint's state that a run continues with.

    is_scaled: this run's scaler is enabled.  is_fork: the checkpoint is another run's.
    """
    parts: Mapping[str, Any] = state.get("parts", {})
    if is_fork and "spikes" in parts:  # rollbacks are counted per run
        parts = {**parts, "spikes": parts["spikes"] | {"pending": None, "rollbacks": 0}}
    if not (is_scaled and state["scaler"]):
        # Without a scaler no step is skipped, which says nothing about the calibration of a scale.
        return {name: part for name, part in parts.items() if name in ("schedule", "spikes", "ema")}
    if is_fork:  # telemetry, reported buffers and replays are per run
        own: dict[str, object] = {"telemetry": None}
        if "replay" in parts:
            own["replay"] = parts["replay"] | {"replayed": 0}
        if parts.get("poison"):
            own["poison"] = parts["poison"] | {"told": []}
        return {**parts, **own}
    return parts


def load_parts(parts: Mapping[str, Any], inherited: Mapping[str, object]) -> None:
    """Load the states of all parts that a checkpoint contains."""
    for name, part in parts.items():
        if inherited.get(name):
            # An average, as large as its model, is copied directly to its destination.
            own = inherited[name] if name == "ema" else checkpoint.in_memory(inherited[name])
            part.load_state_dict(own)
