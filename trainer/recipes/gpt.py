"""A byte-level transformer language model: its vocabulary is the 256 bytes, so any file is text.

By default it is trained on the source files of Python's standard library, which every machine has.
Minutes on a CPU at the default size; on a GPU, set the sizes:

    halfstep recipe train gpt --precision bf16 --set training.steps=200
    halfstep recipe train gpt --set recipe.text=/data/shakespeare.txt --set training.compile=true

    layers  width  heads  context   parameters
         1     32      2       16       0.02 M   the tests' size
         4    128      4      128       0.84 M   the default
        12    768     12     1024       86   M   GPT-2 small, without its 50,257 tokens
        25    640     10     1024      124   M   as many parameters as GPT-2 small

Shapes: B sequences in a batch, T bytes of context, D width, H heads of D/H each, V = 256 bytes.
fp16: attention and LayerNorm sum in fp32 inside their kernels, the residual stream is summed in
fp32 (the embedding's type), and autocast computes the loss in fp32. Nothing else can overflow.
"""

import math
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep.recipe import ConfigError, Loss, Recipe, RecipeConfig, RunConfig, data_path, place
from halfstep.watching.flops import count_flops

VOCABULARY = 256
EVALUATION_WINDOWS = 64  # of T bytes each, spread evenly over the validation text
SAMPLE_BYTES = 400
SAMPLE_TEMPERATURE = 0.8  # below 1: prefers likelier bytes
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class GPTConfig(RecipeConfig):
    """Sizes of the model, and the text that it learns."""

    learning_rate: float = Field(
        1e-3, gt=0, title="Learning rate", description="Peak learning rate of AdamW."
    )
    text: str = Field(
        "",
        title="Text",
        description="A text file, or a folder of them, on the worker. Empty: the source files of "
        "Python's standard library.",
    )
    max_bytes: int = Field(
        4 * 2**20, ge=1, title="Largest text", description="Read no more than this many bytes."
    )
    layers: int = Field(4, ge=1, le=200, title="Layers", description="Transformer blocks.")
    width: int = Field(128, ge=1, le=16384, title="Width", description="Embedding size.")
    heads: int = Field(4, ge=1, le=256, title="Heads", description="Attention heads per block.")
    context: int = Field(
        128, ge=1, le=65536, title="Context", description="Sequence length in bytes."
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, title="Dropout", description="Share of activations dropped in training."
    )
    tied: bool = Field(
        True,
        title="Tie the weights",
        description="Share the weights of the embedding and the output layer.",
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        title="Weight decay",
        description="Weight decay of matrices; biases and norms have none.",
    )


class GPT(Recipe):
    """Predict the next byte; cross-entropy, AdamW."""

    name: ClassVar = "gpt"
    title: ClassVar = "Language model"
    description: ClassVar = "A byte-level transformer, by default trained on Python's own sources."
    Config: ClassVar = GPTConfig
    defaults: ClassVar = {
        "training": {"steps": 500, "batch_size": 16, "schedule": "cosine", "warmup_steps": 20},
        "evaluation": {"every_steps": 100},
    }

    def __init__(self, config: RunConfig[GPTConfig], device: torch.device) -> None:
        settings = config.recipe
        if settings.width % settings.heads:
            raise ConfigError(
                f"recipe.width is {settings.width}: use a multiple of recipe.heads, "
                f"{settings.heads}"
            )
        self.device, self.context, self.settings = device, settings.context, settings
        self.tokens_per_example = settings.context  # a byte is a token
        path = data_path(settings.text, "recipe.text") if settings.text else None
        text = read_text(path, settings.max_bytes)
        split = len(text) * 9 // 10
        self.train_text, self.val_text = text[:split].to(device), text[split:].to(device)
        # Training examples are windows of T bytes that start anywhere in the T bytes after i·T.
        self.train_size = split // self.context - 1
        if min(self.train_size, len(self.val_text) - self.context) < 1:
            raise ConfigError(
                f"recipe.text has {len(text)} bytes, a tenth of them for validation: too few for "
                f"recipe.context {self.context}"
            )
        self.window = torch.arange(self.context + 1, device=device)  # the T inputs, and one more

        model = place(partial(Transformer, settings), config, device)
        self.modules = {"model": model}
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self.optimizers = {
            "adamw": torch.optim.AdamW(
                [
                    {"params": matrices, "weight_decay": settings.weight_decay},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=settings.learning_rate,
                betas=(0.9, 0.95),  # GPT-3's: a shorter average of squared gradients
                fused=config.training.fused,
            )
        }

    def batch(self, indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return bytes (B, T) and the bytes that follow each of them (B, T)."""
        offsets = torch.randint(self.context, indices.shape, generator=generator)
        starts = (indices * self.context + offsets).to(self.device, non_blocking=True)
        return self._windows(self.train_text, starts)

    def training_step(self, batch: Any) -> Iterator[Loss]:
        """Yield the mean cross-entropy, in nats a byte."""
        yield Loss(self._cross_entropy(*batch), optimizer="adamw")

    def flops(self) -> float:
        """Count the operations of one window of T bytes, including masked attention."""
        with torch.device("meta"):
            model = Transformer(self.settings)
            text = torch.zeros(1, self.context, dtype=torch.int64)
        return count_flops(lambda: F.cross_entropy(model(text).flatten(0, 1), text.flatten()))

    def evaluate(self) -> dict[str, float]:
        """Return the cross-entropy of up to 64 windows, in nats and in bits per byte."""
        last = len(self.val_text) - self.context - 1
        count = min(EVALUATION_WINDOWS, 1 + last // self.context)
        starts = torch.linspace(0, last, count, device=self.device).long()
        total = 0.0
        for some in torch.split(starts, 16):
            mean = self._cross_entropy(*self._windows(self.val_text, some))
            total += mean.item() * len(some)
        nats = total / count
        return {"val/loss": nats, "val/bits_per_byte": nats / math.log(2)}

    def artifacts(self) -> dict[str, bytes | str]:
        """Return a text generated by the model; identical for identical weights."""
        # Separate, so that the run's random state is unchanged.
        generator = torch.Generator().manual_seed(0)
        text = self.val_text[: self.context // 2 + 1].long()  # (T/2 + 1,)
        given = len(text)
        for _ in range(SAMPLE_BYTES):
            logits = self.modules["model"](text[None, -self.context :])[0, -1]  # (V,)
            chances = torch.softmax(logits.float() / SAMPLE_TEMPERATURE, dim=0)
            byte = torch.multinomial(chances.cpu(), 1, generator=generator)
            text = torch.cat([text, byte.to(self.device)])
        written = bytes(text.tolist())
        prompt, sample = written[:given], written[given:]
        return {
            "sample.txt": f"{_readable(prompt)}\n──── written by the model:\n{_readable(sample)}"
        }

    def _cross_entropy(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.modules["model"](inputs)  # (B, T, V), fp16 under autocast
        # One of the functions that autocast computes in fp32, from (B·T, V) and (B·T).
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[starts[:, None] + self.window].long()  # (B, T + 1)
        return windows[:, :-1], windows[:, 1:]


class Transformer(nn.Module):
    """GPT-2's architecture: learned positions, LayerNorm before each part of a block, GELU."""

    def __init__(self, settings: GPTConfig) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        self.dropout = nn.Dropout(settings.dropout)
        blocks = [Block(settings) for _ in range(settings.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for block in blocks:  # each adds two terms to the residual stream: preserves its variance
            for layer in (block.attention.output, block.mlp_output):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * settings.layers))
        if settings.tied:
            self.head.weight = self.bytes.weight

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the byte after each byte of text (B, T)."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.bytes(text) + self.positions(positions))  # (B, T, D), fp32
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Block(nn.Module):
    """Attention, then two linear layers, each with a residual connection."""

    def __init__(self, settings: GPTConfig) -> None:
        super().__init__()
        width = settings.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(settings)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_input = nn.Linear(width, 4 * width)
        self.mlp_output = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D): fp32 plus fp16 is fp32, so the residual stream keeps its precision."""
        x = x + self.attention(self.attention_norm(x))
        hidden = F.gelu(self.mlp_input(self.mlp_norm(x)), approximate="tanh")  # (B, T, 4D), fp16
        y: Tensor = x + self.dropout(self.mlp_output(hidden))
        return y


class Attention(nn.Module):
    """Causal self-attention over bytes."""

    def __init__(self, settings: GPTConfig) -> None:
        super().__init__()
        self.heads, self.dropout_share = settings.heads, settings.dropout
        self.input = nn.Linear(settings.width, 3 * settings.width)
        self.output = nn.Linear(settings.width, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D)."""
        # (B, T, 3D) → three of (B, H, T, D/H)
        query, key, value = self.input(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # One kernel, which divides by √(D/H) first and computes the softmax in fp32: a manual query
        # @ key would overflow in fp16.
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout_share if self.training else 0.0,
            is_causal=True,
        )
        output: Tensor = self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return output


def read_text(path: Path | None, max_bytes: int) -> Tensor:
    """Return the bytes of a file, or of a folder's text files ordered by name, as uint8.

    path: None for Python's standard library. Raises ConfigError if there is no text.
    """
    folder = path or Path(sysconfig.get_path("stdlib"))
    files = [folder] if folder.is_file() else _text_files(folder, "" if path else ".py")
    text = bytearray()
    for file in files:
        if path:
            data_path(file, "recipe.text")  # a link in the folder may lead anywhere
        with file.open("rb") as opened:
            text += opened.read(max_bytes - len(text))
        if len(text) == max_bytes:
            break
    if not text:
        raise ConfigError(f"recipe.text is {str(path)!r}: there is no text file on this worker")
    return torch.frombuffer(text, dtype=torch.uint8)


def _text_files(folder: Path, suffix: str) -> Iterator[Path]:
    """Yield the text files below a folder, ordered by name, without looking at those beyond."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:  # no such folder, or one that this user may not read
        return
    for path in paths:
        if path.name in NOT_TEXT or path.name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _text_files(path, suffix)
        elif path.name.endswith(suffix) and path.is_file() and _is_text(path):
            yield path


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(1024)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)  # GPT-2's
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _readable(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")
