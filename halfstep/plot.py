"""Plots for `watch.log`: of classifiers here, charts of tables in halfstep.figures.

    matrix = halfstep.plot.confusion_matrix(probs=scores, y_true=targets, class_names=names)
    watch.log({"val/confusion": matrix})

The functions take the arguments of `wandb.plot`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfstep.figures import Plot, bar, histogram, line, line_series, scatter

__all__ = [
    "Plot",
    "bar",
    "confusion_matrix",
    "histogram",
    "line",
    "line_series",
    "pr_curve",
    "roc_curve",
    "scatter",
]

MOST_CLASSES = 200
MOST_CURVES = 20
#: Points of a curve that are kept.
MOST_POINTS = 500
#: Functions of `wandb.plot` that do nothing here.
UNSERVED = ("plot_table", "visualize")


def confusion_matrix(
    probs: object = None,
    y_true: object = None,
    preds: object = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    split_table: bool = False,
) -> Plot:
    """Count the examples by true and predicted class.

    probs: scores of shape (examples, classes), or instead preds: predicted classes. y_true: true
    classes, as indices. True and predicted classes may also come first, in scikit-learn's order.
    Raises ValueError for arguments that do not fit each other.
    """
    if probs is not None and preds is None and _array("probs", probs).ndim == 1:
        probs, y_true, preds = None, probs, y_true
    if (probs is None) == (preds is None):
        given = "both" if probs is not None else "neither"
        raise ValueError(f"probs and preds: {given} given; allowed: one of the two")
    true = _indices("y_true", y_true)
    scores = None if probs is None else _scores("probs", probs, len(true))
    predicted = _indices("preds", preds) if scores is None else scores.argmax(axis=1)
    if len(true) != len(predicted):
        found = f"y_true has {len(true)} values and preds {len(predicted)}"
        raise ValueError(f"{found}; allowed: as many")
    highest = int(max(true.max(initial=-1), predicted.max(initial=-1)))
    classes = scores.shape[1] if scores is not None else highest + 1
    names = _names("class_names", class_names, max(classes, highest + 1))
    counts = np.zeros((len(names), len(names)), np.int64)
    np.add.at(counts, (true, predicted), 1)
    return Plot(
        {
            "plot": "confusion_matrix",
            "title": title or "Confusion matrix",
            "classes": names,
            "counts": counts.tolist(),
        }
    )


def pr_curve(
    y_true: object = None,
    y_probas: object = None,
    labels: Sequence[str] | None = None,
    classes_to_plot: Sequence[int] | None = None,
    interp_size: int = 21,
    title: str | None = None,
    split_table: bool = False,
) -> Plot:
    """Return precision over recall for each class, with the average precision."""
    lines = []
    for name, hits in _rank(y_true, y_probas, labels, classes_to_plot):
        found = np.cumsum(hits)
        precision = found / np.arange(1, len(hits) + 1)
        recall = found / max(int(found[-1]), 1)
        area = float(np.sum(precision * hits) / max(int(found[-1]), 1))
        lines.append(_curve(name, np.r_[0.0, recall], np.r_[1.0, precision], area))
    return Plot({"plot": "pr_curve", "title": title or "Precision-recall", "lines": lines})


def roc_curve(
    y_true: object = None,
    y_probas: object = None,
    labels: Sequence[str] | None = None,
    classes_to_plot: Sequence[int] | None = None,
    title: str | None = None,
    split_table: bool = False,
) -> Plot:
    """Return the true-positive over the false-positive rate for each class, with its area."""
    lines = []
    for name, hits in _rank(y_true, y_probas, labels, classes_to_plot):
        true, false = np.cumsum(hits), np.cumsum(~hits)
        x = np.r_[0.0, false / max(int(false[-1]), 1)]
        y = np.r_[0.0, true / max(int(true[-1]), 1)]
        area = float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))
        lines.append(_curve(name, x, y, area))
    return Plot({"plot": "roc_curve", "title": title or "ROC", "lines": lines})


def __getattr__(name: str) -> Any:
    if name in UNSERVED:
        from halfstep.wandb_compat.unsupported import Unserved

        return Unserved(f"plot.{name}")
    raise AttributeError(f"module 'halfstep.plot' has no attribute {name!r}")


def _rank(
    y_true: object, y_probas: object, labels: Sequence[str] | None, chosen: Sequence[int] | None
) -> list[tuple[str, NDArray[np.bool_]]]:
    """Return for each class whether the examples belong to it, by falling score.

    Scores in one dimension are those of class 1.
    """
    true = _indices("y_true", y_true)
    if not len(true):
        raise ValueError("y_true is empty; allowed: at least 1 example")
    scores = _scores("y_probas", y_probas, len(true))
    is_binary = scores.shape[1] == 1
    if is_binary:
        scores = np.column_stack([1 - scores[:, 0], scores[:, 0]])
    names = _names("labels", labels, scores.shape[1])
    plotted = list(chosen if chosen is not None else [1] if is_binary else range(len(names)))
    if wrong := [index for index in plotted if not 0 <= index < len(names)]:
        allowed = f"0 to {len(names) - 1}"
        raise ValueError(f"classes_to_plot has {wrong[0]}; allowed: indices of classes, {allowed}")
    orders = (np.argsort(-scores[:, index], kind="stable") for index in plotted[:MOST_CURVES])
    return [
        (names[index], true[order] == index)
        for index, order in zip(plotted[:MOST_CURVES], orders, strict=True)
    ]


def _array(name: str, values: object) -> NDArray[np.generic]:
    if values is None:
        raise ValueError(f"{name} is missing")
    if hasattr(values, "detach"):  # torch
        values = values.detach().float().cpu().numpy()
    return np.asarray(values)


def _indices(name: str, values: object) -> NDArray[np.int64]:
    array = _array(name, values).ravel()
    try:
        indices = array.astype(np.int64)
        is_whole = bool(np.all(indices == array)) and not np.any(indices < 0)
    except (TypeError, ValueError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{name} has other values than indices of classes; allowed: 0, 1, 2, …")
    return indices


def _scores(name: str, values: object, examples: int) -> NDArray[np.float64]:
    array = _array(name, values).astype(np.float64)
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or len(array) != examples or not array.shape[1]:
        allowed = f"({examples}, classes), as y_true has {examples} values"
        raise ValueError(f"{name} has shape {array.shape}; allowed: {allowed}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has values that are not finite; allowed: finite scores")
    return array


def _names(name: str, names: Sequence[str] | None, classes: int) -> list[str]:
    if classes > MOST_CLASSES:
        raise ValueError(f"there are {classes} classes; allowed: at most {MOST_CLASSES}")
    if names is None:
        return [str(number) for number in range(classes)]
    if len(names) < classes:
        allowed = f"one for each of {classes} classes"
        raise ValueError(f"{name} has {len(names)} names; allowed: {allowed}")
    return [str(class_name) for class_name in names][:MOST_CLASSES]


def _curve(
    name: str, x: NDArray[np.float64], y: NDArray[np.float64], area: float
) -> dict[str, Any]:
    kept = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).round().astype(int))
    return {
        "name": name,
        "x": x[kept].round(6).tolist(),
        "y": y[kept].round(6).tolist(),
        "area": round(area, 6),
    }
