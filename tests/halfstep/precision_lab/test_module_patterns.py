"""Patterns that name modules, in the syntax of modules.fp32."""

from collections.abc import Collection

from torch import nn

from halfstep.precision_lab.module_patterns import ModuleTree, wildcard
from halfstep.recording.gradients import module_names
from tests.halfstep.precision_lab.models_made import Transformer
from tests.marks import looped

MODELS = {
    "transformer": lambda: Transformer(blocks=3),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "nested": lambda: nn.ModuleDict(
        {"a": nn.ModuleList(nn.Sequential(nn.ReLU(), nn.ReLU()) for _ in range(2)), "b": nn.ReLU()}
    ),
}


@looped(
    "model, names, patterns",
    [
        ("transformer", {"blocks.0.norm1", "blocks.1.norm1", "blocks.2.norm1"}, ["blocks.*.norm1"]),
        ("transformer", {"blocks.0.norm1", "blocks.1.norm1"}, ["blocks.0.norm1", "blocks.1.norm1"]),
        ("transformer", {"blocks.0", "blocks.1", "blocks.2", "norm"}, ["blocks.*", "norm"]),
        ("transformer", {"blocks.0", "blocks.0.norm1"}, ["blocks.0"]),
        ("transformer", {"blocks.1.attention"}, ["blocks.1.attention"]),
        ("transformer", set(), []),
        ("sequential", {"0", "2"}, ["0", "2"]),  # * would match the others too
        ("nested", {"a.0.0", "a.0.1", "a.1.0", "a.1.1"}, ["a.*.*"]),
        ("nested", {"a.0.0", "a.1.0"}, ["a.0.0", "a.1.0"]),
    ],
)
def test_patterns_match_exactly(model: str, names: Collection[str], patterns: list[str]) -> None:
    """The fewest patterns that match the modules and nothing else are returned."""
    tree = ModuleTree.of(module_names((MODELS[model](),)))
    assert tree.patterns(names) == patterns


@looped(
    "name, expected",
    [("0", "*"), ("a.0.b1", "a.*.b1"), ("a.10.2", "a.*.*"), ("layer1.0", "layer1.*"), ("a", "a")],
)
def test_numbers_between_dots_are_wildcards(name: str, expected: str) -> None:
    """Only parts of a name that are integers become wildcards."""
    assert wildcard(name) == expected
