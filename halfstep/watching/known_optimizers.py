"""Optimizers that a watched loop has, had, or has replaced. This module imports torch."""

import sys

from torch.optim import Optimizer

from halfstep.watching.state import LoopState

OWN_REFERENCES = 2  # to an optimizer that only its Gradients keep alive, and sys.getrefcount's


def list_gone(state: LoopState) -> list[int]:
    """Return the ids of optimizers that the loop has dropped, and that no open row has."""
    if state.wanted is not None:
        return []
    scaled = [row.measured for row in state.open_rows.values()]
    return [
        identity
        for identity, gradients in state.known.items()
        if sys.getrefcount(gradients.optimizer) <= OWN_REFERENCES
        and not any(identity in measured for measured in scaled)
    ]


def forget(state: LoopState, identity: int, successor: Optimizer) -> None:
    """Forget an optimizer by its id; its clipped gradients may be a successor's."""
    own = [list(map(id, group["params"])) for group in successor.param_groups]
    if state.known[identity].has_groups(own) and identity in state.before_clip:
        state.before_clip[id(successor)] = state.before_clip[identity]
        state.clips_ahead[id(successor)] = state.clips_ahead.get(identity, {})
    state.passes.forget(identity)
    state.passes.first.end()
    state.clipping.discard(identity)
    for by_id in (
        *(state.known, state.row_of, state.before_clip),
        *(state.clips_ahead, state.uncleared),
    ):
        by_id.pop(identity, None)


def choose_name(state: LoopState, optimizer: Optimizer) -> str:
    """Return the name of an optimizer in rows: its class, numbered if others have it."""
    if state.wanted is not None:
        return state.wanted[id(optimizer)]
    name = type(optimizer).__name__
    others = [type(known.optimizer).__name__ for known in state.known.values()]
    return f"{name}{others.count(name) + 1}" if name in others else name
