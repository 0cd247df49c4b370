"""Plots of classifiers: their values equal scikit-learn's, and invalid arguments are rejected."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import halfstep
from halfstep import figures, plot
from tests.halfstep.watching.watch_made import Written

sklearn_metrics = pytest.importorskip("sklearn.metrics")


@pytest.fixture
def scored() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """True classes and scores of 300 examples in four classes."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, 4, 300)
    scores = rng.random((300, 4)) + np.eye(4)[true] * 0.5
    return true, scores / scores.sum(axis=1, keepdims=True)


def test_confusion_matrix_counts_true_by_predicted(scored: Any) -> None:
    """A confusion matrix accepts scores or classes as arrays, lists or tensors."""
    true, scores = scored
    expected = sklearn_metrics.confusion_matrix(true, scores.argmax(1)).tolist()
    names = ["a", "b", "c", "d"]
    made = plot.confusion_matrix(probs=torch.tensor(scores), y_true=true, class_names=names)
    assert made.content["counts"] == expected
    assert made.content["classes"] == names
    listed = plot.confusion_matrix(y_true=true.tolist(), preds=scores.argmax(1).tolist())
    assert listed.content["counts"] == expected
    assert listed.content["classes"] == ["0", "1", "2", "3"]
    assert plot.confusion_matrix(true, scores.argmax(1)).content["counts"] == expected


def test_curves_have_the_areas_of_scikit_learn(scored: Any) -> None:
    """Average precision and ROC area equal scikit-learn's, for each class and for a single
    class.
    """
    true, scores = scored
    pr, roc = plot.pr_curve(true, scores).content, plot.roc_curve(true, scores).content
    for each in range(4):
        is_class = true == each
        average = sklearn_metrics.average_precision_score(is_class, scores[:, each])
        area = sklearn_metrics.roc_auc_score(is_class, scores[:, each])
        assert pr["lines"][each]["area"] == pytest.approx(average, abs=1e-5)
        assert roc["lines"][each]["area"] == pytest.approx(area, abs=1e-5)
    [line] = plot.roc_curve(true == 1, scores[:, 1], labels=["no", "yes"]).content["lines"]
    assert (line["name"], line["x"][0], line["y"][-1]) == ("yes", 0.0, 1.0)
    [line] = plot.pr_curve(true, scores, classes_to_plot=[2]).content["lines"]
    assert (line["name"], line["y"][0], line["x"][-1]) == ("2", 1.0, 1.0)
    long = plot.roc_curve(np.arange(50_000) % 2, np.random.default_rng(0).random(50_000))
    assert len(long.content["lines"][0]["x"]) == plot.MOST_POINTS


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("confusion_matrix", {"y_true": [0]}, "neither given"),
        ("confusion_matrix", {"y_true": [0, 1], "preds": [0]}, "2 values and preds 1"),
        ("confusion_matrix", {"y_true": [0, 500], "preds": [0, 1]}, "501 classes"),
        ("confusion_matrix", {"y_true": [0.5], "preds": [0]}, "y_true has other values"),
        ("confusion_matrix", {"y_true": ["a"], "preds": [0]}, "y_true has other values"),
        ("confusion_matrix", {"y_true": [1], "preds": [0], "class_names": ["a"]}, "1 names"),
        ("roc_curve", {"y_true": [0, 1], "y_probas": [[0.5, 0.5]]}, "shape (1, 2)"),
        ("roc_curve", {"y_true": [], "y_probas": []}, "y_true is empty"),
        ("pr_curve", {"y_true": [0], "y_probas": [[float("nan"), 1]]}, "not finite"),
        ("pr_curve", {"y_true": [0], "y_probas": [[0, 1]], "classes_to_plot": [2]}, "has 2"),
    ],
)
def test_wrong_arguments_are_named(function: str, arguments: dict[str, Any], words: str) -> None:
    """The error for an invalid plot argument has its name, value and allowed values."""
    with pytest.raises(ValueError, match=r"allowed|missing") as error:
        getattr(plot, function)(**arguments)
    assert words in str(error.value)


def test_plots_and_images_in_tables_are_files(tmp_path: Path) -> None:
    """Plots are stored as JSON, and images in tables as files that the cells name."""
    rows = [
        {"name": "cat", "image": np.zeros((4, 4), np.uint8)},
        {"name": "dog", "image": torch.ones(3, 4, 4)},
    ]
    with halfstep.watch(folder=tmp_path, name="it") as watch:
        watch.log({"matrix": plot.confusion_matrix(y_true=[0, 1], preds=[1, 1]), "val/rows": rows})
    files = {
        each["name"]: tmp_path / "it" / each["path"]
        for each in Written(tmp_path / "it").of("artifact")
    }
    assert json.loads(files["matrix.plot.json"].read_text())["counts"] == [[0, 1], [0, 1]]
    table = next(name for name in files if name.endswith(".csv"))
    stem = table.removesuffix(".csv")
    lines = [f"{name},{stem}.cell-{row}-2.png" for row, name in ((1, "cat"), (2, "dog"))]
    assert files[table].read_text().splitlines() == ["name,image", *lines]
    for row in (1, 2):
        assert files[f"{stem}.cell-{row}-2.png"].read_bytes().startswith(b"\x89PNG")


def test_the_drop_in_offers_the_same_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """`wandb.plot` has the same functions; unsupported ones do nothing and print a line."""
    wandb: Any = halfstep
    assert wandb.plot.confusion_matrix is plot.confusion_matrix
    assert wandb.plot.scatter is figures.scatter
    wandb.plot.visualize("id", None)
    assert "plot.visualize is not supported" in capsys.readouterr().err
    with pytest.raises(AttributeError):
        wandb.plot.unknown  # noqa: B018
