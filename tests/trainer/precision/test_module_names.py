import pytest
from torch import nn

from halfstep.run_config import ConfigError
from tests.marks import looped
from trainer.precision.module_names import chosen


def blocks():
    """Return two blocks in a list, and a head whose weights have a second name."""
    network = nn.Module()
    network.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))
    network.head = network.tied = nn.Linear(2, 2)
    network.forward = lambda x: x
    network.scales = nn.ParameterList([nn.Parameter(nn.Linear(1, 1).weight)])
    return {"model": network}


@looped("patterns, names", [
        ([], []),
        (["model.head"], ["model.head"]),
        (["model.tied"], ["model.tied"]),
        (["model.head", "model.tied"], ["model.head"]),
        (["*.0.1", "*.1.0"], ["model.blocks.0.1", "model.blocks.1.0"]),
        (["model.blocks.?.0"], ["model.blocks.0.0", "model.blocks.1.0"]),
        (["model.blocks.*"], ["model.blocks.0", "model.blocks.1"]),
        (["model.blocks"], ["model.blocks.0", "model.blocks.1"]),
        (["model.blocks.1.0", "model"], ["model"]),
    ])  # fmt: skip
def test_a_pattern_names_the_outermost_modules_that_are_called(patterns, names):
    """A pattern selects the outermost called modules with submodules, but no ModuleList."""
    assert list(chosen(blocks(), "modules.fp32", patterns)) == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "model.haed",
            'modules.fp32: no module is named "model.haed"; modules: model, '
            "model.blocks, model.blocks.0, ",
        ),
        ("head", 'modules.fp32: no module is named "head"'),
        ("model.scales", "modules.fp32 names model.scales, a ParameterList: it contains no module"),
    ],
)
def test_a_pattern_without_a_match_is_an_error(pattern, message):
    """A pattern without a match is an error with field, pattern and some module names."""
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        chosen(blocks(), "modules.fp32", [pattern])
