import math
from functools import partial

import numpy as np
import pytest
import torch

from halfstep.run_config import ConfigError, parse_config
from tests.trainer.conftest import CPU, assert_same_bits
from trainer.recipes import gpt
from trainer.recipes.gpt import GPT, GPTConfig, Transformer, read_text

TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "max_bytes": 2**16}


@pytest.mark.extended
def test_a_tiny_model_learns_the_standard_library(run_loop):
    """A tiny fp16 model needs far less than the 8 bits per byte of a random guess."""
    values = {
        "recipe": TINY | {"learning_rate": 1e-2},
        "training": {"steps": 60, "batch_size": 32},
        "evaluation": {"every_steps": None},
    }
    run = run_loop(GPT, values)
    metrics = {event["name"]: event["value"] for event in run.of("metric")}
    assert metrics["val/bits_per_byte"] < 5
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"] / math.log(2))
    assert run.records["loss"][0] == pytest.approx(math.log(256), rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "millions"), [((4, 128, 4, 128), 0.84), ((25, 640, 10, 1024), 124)]
)
def test_sizes_are_those_that_the_module_documents(sizes, millions):
    """The documented sizes up to 124 M parameters follow from the documented settings."""
    settings = dict(zip(("layers", "width", "heads", "context"), sizes, strict=True))
    with torch.device("meta"):
        model = Transformer(GPTConfig(**settings))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_a_byte_does_not_see_those_after_it(tied):
    """Changing the last byte changes the last prediction only."""
    torch.manual_seed(0)
    model = Transformer(GPTConfig(**(TINY | {"tied": tied, "layers": 2}))).eval()
    text = torch.arange(16)[None]
    changed = text.clone()
    changed[0, -1] = 200
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
    assert (model.head.weight is model.bytes.weight) == tied


@pytest.mark.slow
def test_a_batch_is_text_with_its_next_bytes():
    """Targets are inputs shifted by one byte, and windows depend on the generator only."""
    recipe = GPT(parse_config(GPT, {"recipe": TINY}), CPU)
    indices = torch.tensor([0, recipe.train_size - 1])
    inputs, targets = recipe.batch(indices, torch.Generator().manual_seed(5))
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = recipe.batch(indices, torch.Generator().manual_seed(5))
    other, _ = recipe.batch(indices, torch.Generator().manual_seed(6))
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)


@pytest.mark.slow
def test_it_compiles_to_one_graph(run_loop, monkeypatch):
    """torch.compile finds no graph break in forward."""
    compiled = partial(torch.compile, backend="eager", fullgraph=True)  # no code generation
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(GPT, "artifacts", lambda self: {})  # grows: a graph per length
    values = {"recipe": TINY, "evaluation": {"every_steps": None}}
    losses = [
        run_loop(GPT, values | {"training": {"steps": 3, "compile": wanted}}).records["loss"]
        for wanted in (True, False)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


@pytest.mark.slow
def test_the_sample_is_text_and_changes_nothing(run_loop, tmp_path, monkeypatch):
    """Writing samples does not change the weights of a run."""
    monkeypatch.setattr(gpt, "SAMPLE_BYTES", 40)  # each of them is a forward pass
    values = {"recipe": TINY | {"dropout": 0.1}, "training": {"steps": 4}}
    sampled = run_loop(GPT, values | {"evaluation": {"every_steps": 1}}, folder=tmp_path / "c")
    plain = run_loop(GPT, values | {"evaluation": {"every_steps": None}})
    assert_same_bits(sampled.weights(), plain.weights())
    samples = [path.read_text() for path in sorted((tmp_path / "artifacts").rglob("*sample*"))]
    assert len(samples) == 4
    assert all("──── written by the model:" in sample for sample in samples)


def test_a_file_or_a_folder_is_read_in_order_and_within_bounds(tmp_path):
    """Files are read in order up to a limit, without hidden and binary ones."""
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\0\1")
    assert bytes(read_text(tmp_path, 100).tolist()) == b"onetwo"
    assert bytes(read_text(tmp_path / "b.txt", 2).tolist()) == b"tw"


def test_folders_are_read_where_their_names_belong(tmp_path):
    """Folders are sorted among files at any depth, and linked folders are not followed."""
    for number, name in enumerate(("a.txt", "b/c/d.txt", "b/e.txt", "b.txt", "f/tests/g.txt")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(number))
    (tmp_path / "z").symlink_to(tmp_path / "b")
    assert bytes(read_text(tmp_path, 100).tolist()) == b"0123"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 33}, "recipe.width is 33: use a multiple of recipe.heads, 2"),
        ({"max_bytes": 100}, "recipe.text has 100 bytes, .* too few for recipe.context 16"),
        ({"text": "/nowhere"}, "recipe.text is '/nowhere': there is no text file"),
    ],
)
def test_conflicting_settings_are_rejected(settings, message):
    """Conflicting settings are rejected with field, value and allowed values."""
    with pytest.raises(ConfigError, match=message):
        GPT(parse_config(GPT, {"recipe": TINY | settings}), CPU)
