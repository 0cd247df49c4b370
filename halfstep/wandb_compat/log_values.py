"""Conversion of values of `wandb.log` to those of `Watch.log`."""

from collections.abc import Sequence
from typing import Any

from halfstep.session.logged_values import is_number
from halfstep.wandb_compat.media import (
    Audio,
    Histogram,
    Html,
    Image,
    Object3D,
    Plotly,
    Table,
    Video,
)
from halfstep.wandb_compat.unsupported import Unserved, say_once

SHOWN = (Image, Table, Histogram, Audio, Video, Html, Plotly, Object3D)


def show(shown: dict[str, Any], name: str, value: Any) -> None:
    """Add a value in a form that `Watch.log` accepts; images of a list are numbered."""
    if isinstance(value, SHOWN):
        try:
            shown[name] = value.to_loggable()
        except Exception as error:
            say_once(f"{name} is not logged: {type(error).__name__}: {error}")
            return
        if caption := getattr(value, "caption", None):
            shown[f"{name}.caption"] = caption
    elif isinstance(value, list | tuple) and any(isinstance(item, Image) for item in value):
        for number, item in enumerate(value):
            show(shown, f"{name}-{number}", item)
    elif isinstance(value, Unserved):
        return
    elif is_number(value):
        shown[name] = value
    elif getattr(value, "ndim", 0) or (isinstance(value, list | tuple) and _are_numbers(value)):
        shown[name] = Histogram(value).to_loggable()  # as W&B does with an array
    else:
        shown[name] = value


def to_cell(value: Any) -> Any:
    """Return a summary value as a table cell."""
    if isinstance(value, dict):
        return ", ".join(f"{kind} {item}" for kind, item in value.items() if kind != "count")
    return value.item() if hasattr(value, "item") else value


def _are_numbers(values: Sequence[Any]) -> bool:
    return bool(values) and all(is_number(value) for value in values)
