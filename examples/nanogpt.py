"""A character-level transformer in the manner of nanoGPT, in fp16 under autocast.

    python examples/nanogpt.py --steps 200 --lr 1e-3

Two lines of it are for Halfstep; without them it trains the same. Through the queue:

    halfstep run submit --command 'python nanogpt.py --lr {lr}' --param lr=1e-3 --folder "$PWD"
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep

TEXT = Path(
    argparse.__file__
)  # any text will do: the standard library's source is on every machine


class Block(nn.Module):
    """Attention, then a perceptron, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, C)."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        q, k, v = (
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
        )  # (B, heads, T, C / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Predicts the next of `vocabulary` characters."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy. x, targets: (B, T)."""
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.norm(self.blocks(h)))  # (B, T, vocabulary)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def batch(data: Tensor, size: int, context: int, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and the same one character on, both (B, T)."""
    starts = torch.randint(len(data) - context - 1, (size,))
    x = torch.stack([data[i : i + context] for i in starts])
    y = torch.stack([data[i + 1 : i + context + 1] for i in starts])
    return x.to(device), y.to(device)


def rate(updates: int, args: argparse.Namespace) -> float:
    """Return the learning rate: up over a tenth of the steps, then down a cosine to a tenth.

    updates: of the weights so far; a step that the scaler skipped is none.
    """
    warm_up = max(args.steps // 10, 1)
    if updates < warm_up:
        return args.lr * (updates + 1) / warm_up
    share = (updates - warm_up) / max(args.steps - warm_up, 1)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def main() -> None:
    """Train, and print a line now and then."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--scale", type=float, default=2.0**24, help="where the loss scale begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("nanogpt.pt"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = args.text.read_text()
    characters = sorted(set(text))
    data = torch.tensor([characters.index(each) for each in text])

    model = GPT(len(characters), args.context, args.width, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, init_scale=args.scale, growth_interval=500)

    watch = halfstep.watch(model, config=vars(args))

    started, updates = time.perf_counter(), 0
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(updates, args)
        x, y = batch(data, args.batch, args.context, device)
        with torch.autocast(device, dtype=torch.float16):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()  # waits for the device, as below
        scaler.step(optimizer)
        scaler.update()
        updates += scaler.get_scale() >= scale  # it falls where the step was skipped
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == args.steps - 1:
            spent = time.perf_counter() - started
            print(f"step {step}: loss {loss.item():.3f}, {spent:.1f} s")  # waits for the device

    torch.save(model.state_dict(), args.out)
    watch.checkpoint(args.out)


if __name__ == "__main__":
    main()
