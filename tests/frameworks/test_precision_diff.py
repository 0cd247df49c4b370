"""Precision diffs of transformers' models, whose modules return dataclasses and dictionaries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
import halfstep  # noqa: E402


def llama(*, use_cache: bool = False) -> Any:
    """Return a small Llama with random weights."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=use_cache,
        )
    )


def gpt2() -> Any:
    """Return a small GPT-2 with tied and random weights, and dropout."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, use_cache=False
        )
    )


def bert() -> Any:
    """Return a small BERT, an encoder with a mask."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's loss, from its dataclass."""
    value: Tensor = model(**batch, labels=batch["input_ids"]).loss
    return value


def make_padded_text() -> dict[str, Tensor]:
    """Return two texts, of which one is shorter and padded."""
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0
    return {"input_ids": torch.randint(0, 128, (2, 16)), "attention_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_healthy_model_is_measured_whole(make: Callable[[], Any], dtype: torch.dtype) -> None:
    """Each call of a healthy model has a local error, no module is suggested, nothing is
    changed.
    """
    torch.manual_seed(0)
    model, batch = make().train(), make_padded_text()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    report = halfstep.precision_diff(model, batch, loss, dtype)
    assert [(row.name, row.unknown) for row in report.rows if row.unknown] == []
    forward = [row for row in report.rows if row.direction == "forward"]
    assert {type(model).__name__, "(loss)"} < {row.name for row in forward}
    assert all(float(row.local or 0) < 0.1 for row in forward)
    assert not report.suggest()
    assert 0 < report.error < 0.1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_with_a_cache_is_unknown_not_wrong() -> None:
    """Attention that extends a cache cannot be repeated and is unknown; other calls are known."""
    torch.manual_seed(0)
    report = halfstep.precision_diff(
        llama(use_cache=True), make_padded_text(), loss, torch.bfloat16
    )
    unknown = {row.name for row in report.rows if row.unknown and row.direction != "parameter"}
    assert unknown == {f"model.layers.{layer}.self_attn" for layer in range(2)}
    assert not report.suggest()


class Cancelled(nn.Module):
    """A difference of two large, nearly equal numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return approximately x."""
        return (x.half() + 300) - 300


def test_module_that_loses_precision_is_named() -> None:
    """A module that loses precision is named within modules that return dataclasses and tuples."""
    torch.manual_seed(0)
    model, batch = llama(), make_padded_text()
    model.model.layers[1].mlp.act_fn = Cancelled()
    report = halfstep.precision_diff(model, batch, loss, torch.float16)
    assert [each.name for each in report.suggest()] == ["model.layers.1.mlp.act_fn"]
