"""Fine-tune a language model: any that transformers' AutoModelForCausalLM loads from a folder.

    halfstep recipe train finetune --precision bf16 --set recipe.model=/models/llama-3.2-1b \\
        --set recipe.text=/data/letters.jsonl --set training.steps=1000

By default it trains LoRA's small matrices; with recipe.lora_rank=0 all weights. Nothing is
downloaded. Requires transformers and peft: pip install 'halfstep-service[finetune]'.

The result can be loaded by from_pretrained: "huggingface.zip" has configuration, tokenizer and,
with LoRA, the adapter; without LoRA, add a checkpoint's .safetensors as model.safetensors.

Shapes: B sequences in a batch, T tokens of context, V tokens in the vocabulary.
Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

import io
import math
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import Dataset

from halfstep.recipe import ConfigError, Loss, Recipe, RecipeConfig, RunConfig, data_path
from halfstep.watching.flops import count_flops
from trainer.recipes.corpus import Piece, read_pieces
from trainer.recipes.language_models import (
    load_model,
    load_tokenizer,
    one_sequence_a_row,
    tokenizer_mark,
    with_lora,
)
from trainer.recipes.token_file import tokens_of

EVALUATION_WINDOWS = 64  # of T tokens each, spread evenly over the validation text
SAMPLE_TOKENS = 48
ZIPPED_AT = (1980, 1, 1, 0, 0, 0)  # a fixed time makes archives of the same files identical


class FinetuneConfig(RecipeConfig):
    """The model, its training text, and the trained weights."""

    learning_rate: float = Field(
        2e-4,
        gt=0,
        le=1,
        title="Learning rate",
        description="Peak learning rate of AdamW. Without LoRA, use a tenth of it.",
    )
    model: str = Field(
        "",
        title="Model",
        description="A folder on the worker written by transformers' save_pretrained: config.json, "
        "weights, tokenizer.",
    )
    text: str = Field(
        "",
        title="Text",
        description="A text file or JSONL, or a folder of them (.txt, .md, .jsonl), on the worker.",
    )
    field: str = Field(
        "text", title="Field", description="Field of a JSONL line that contains the text."
    )
    max_bytes: int = Field(
        64 * 2**20, ge=1, title="Largest text", description="Read about this many bytes."
    )
    context: int = Field(
        256, ge=2, le=2**20, title="Context", description="Sequence length in tokens."
    )
    lora_rank: int = Field(
        8,
        ge=0,
        le=4096,
        title="LoRA's rank",
        description="Rank of the LoRA matrices that are trained next to each frozen weight. 0: no "
        "LoRA, all weights are trained.",
    )
    lora_alpha: float = Field(
        16.0,
        gt=0,
        le=2**20,
        title="LoRA's alpha",
        description="The LoRA product is scaled by alpha/rank.",
    )
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, title="LoRA's dropout", description="Share of the LoRA inputs dropped."
    )
    lora_modules: str = Field(
        "all-linear",
        title="LoRA's modules",
        description="Name suffixes of the modules with LoRA, such as q_proj, v_proj; all-linear: "
        "all linear layers except the last.",
    )
    gradient_checkpointing: bool = Field(
        False,
        title="Gradient checkpointing",
        description="Recompute the layers' activations in the backward pass: less memory, about a "
        "third more time.",
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1, title="Weight decay", description="AdamW's decoupled weight decay."
    )


class Finetune(Recipe):
    """Predict the next token; cross-entropy, AdamW."""

    name: ClassVar = "finetune"
    title: ClassVar = "Fine-tuning"
    description: ClassVar = (
        "Fine-tunes a language model from a local Hugging Face folder, fully or with LoRA."
    )
    Config: ClassVar = FinetuneConfig
    defaults: ClassVar = {
        "training": {"steps": 200, "batch_size": 4, "schedule": "cosine", "warmup_steps": 10},
        "evaluation": {"every_steps": 100},
        "data": {"workers": 1},
    }

    def __init__(self, config: RunConfig[FinetuneConfig], device: torch.device) -> None:
        settings = config.recipe
        for field in ("model", "text"):
            if not getattr(settings, field):
                raise ConfigError(f"recipe.{field} is empty: name a path on the worker")
        self.device, self.settings = device, settings
        folder = data_path(settings.model, "recipe.model")
        self.tokenizer = load_tokenizer(folder)
        network = load_model(folder)
        tokens = tokenize(self.tokenizer, settings)
        vocabulary = network.get_input_embeddings().num_embeddings
        if len(tokens) and (largest := tokens.max()) >= vocabulary:
            raise ConfigError(
                f"recipe.model is {settings.model!r}: its tokenizer produces token {largest}, but "
                f"its embedding has only {vocabulary} tokens"
            )
        split = len(tokens) * 9 // 10
        self.dataset = Windows(tokens[:split], settings.context)
        self.validation = Windows(tokens[split:], settings.context)
        if not (len(self.dataset) and len(self.validation)):
            raise ConfigError(
                f"recipe.text has {len(tokens)} tokens, a tenth of them for validation: too few "
                f"for recipe.context {settings.context}"
            )
        self.tokens_per_example = settings.context

        self.network: Any = with_settings(network, settings).to(device)
        self.modules = {"model": self.network}
        self.optimizers = {
            "adamw": torch.optim.AdamW(
                [p for p in self.network.parameters() if p.requires_grad],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                fused=config.training.fused,
            )
        }

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the mean cross-entropy, in nats a token."""
        yield Loss(cross_entropy(self.modules["model"], batch), optimizer="adamw")

    def flops(self) -> float:
        """Count the operations of one window of T tokens, also those of frozen weights."""
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(self.settings.model)
            network = transformers.AutoModelForCausalLM.from_config(config)
            model = with_settings(network, self.settings)
            window = torch.zeros(1, self.settings.context + 1, dtype=torch.int64)
        return count_flops(lambda: cross_entropy(model, window))

    def evaluate(self) -> dict[str, float]:
        """Return the cross-entropy of up to 64 windows, in nats a token, and its exponential."""
        count = min(EVALUATION_WINDOWS, len(self.validation))
        chosen = np.linspace(0, len(self.validation) - 1, count).round().astype(int)
        losses = [
            cross_entropy(self.modules["model"], self.validation[index][None].to(self.device))
            for index in chosen
        ]
        nats = torch.stack(losses).mean().item()
        return {"val/loss": nats, "val/perplexity": math.exp(min(nats, 700.0))}

    def artifacts(self) -> dict[str, bytes | str]:
        """Return files for from_pretrained, and a text continued by the model."""
        return {"huggingface.zip": self._zip(), "sample.txt": self._sample()}

    def _zip(self) -> bytes:
        """Zip configuration, tokenizer and, with LoRA, the adapter, as saved by the libraries."""
        with tempfile.TemporaryDirectory() as folder:
            if self.settings.lora_rank:
                # Skips a request to the hub, whether embeddings changed: they are frozen.
                self.network.save_pretrained(folder, save_embedding_layers=False)
            else:
                self.network.config.save_pretrained(folder)
                if self.network.can_generate():
                    self.network.generation_config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                    name = path.relative_to(folder).as_posix()
                    about = zipfile.ZipInfo(name, ZIPPED_AT)
                    archive.writestr(about, path.read_bytes(), zipfile.ZIP_DEFLATED)
        return file.getvalue()

    def _sample(self) -> str:
        given = self.validation[0][None, : self.settings.context // 2].to(self.device)
        written = self.network.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=False,
            pad_token_id=self.tokenizer.eos_token_id or 0,
        )[0]
        prompt, sample = (
            self.tokenizer.decode(part)
            for part in (written[: given.shape[1]], written[given.shape[1] :])
        )
        return f"{prompt}\n──── written by the model:\n{sample}"


class Windows(Dataset[Tensor]):
    """Adjacent windows of T tokens, each with the token that follows, (T + 1,)."""

    def __init__(self, tokens: NDArray[np.int32], context: int) -> None:
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._context)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        return torch.from_numpy(self._tokens[start : start + self._context + 1].astype(np.int64))


def with_settings(network: Any, settings: FinetuneConfig) -> Any:
    """Return a model with LoRA and gradient checkpointing, if these are enabled."""
    if settings.gradient_checkpointing:
        # Not reentrant: that needs an input with a gradient, which frozen embeddings lack.
        network.activation_checkpointing_enable({"use_reentrant": False})
    if settings.lora_rank == 0:
        return network
    return with_lora(
        network,
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        modules=settings.lora_modules,
    )


def cross_entropy(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean over windows (B, T + 1); autocast computes it in fp32."""
    with one_sequence_a_row():
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def tokenize(tokenizer: Any, settings: FinetuneConfig) -> NDArray[np.int32]:
    """Return the tokens of all documents, each followed by an end-of-text if there is one.

    Memory-mapped.
    """
    # Its threads have ended before workers are forked; if unset, it would warn about them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(pieces: list[Piece]) -> list[list[int]]:
        texts = [piece.text for piece in pieces]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [
            [*tokens, *(end if piece.is_last else ())]
            for piece, tokens in zip(pieces, encoded, strict=True)
        ]

    text = data_path(settings.text, "recipe.text"), settings.field, settings.max_bytes
    mark = tokenizer_mark(data_path(settings.model, "recipe.model"))
    return tokens_of(lambda: read_pieces(*text), encode, mark)
