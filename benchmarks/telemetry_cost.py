"""What telemetry costs: the loop's own step beside PyTorch's documented one, on a tiny GPT.

    python -m benchmarks.telemetry_cost [--steps 400] [--seconds 100] [--precision fp16]

Two copies of the model train on the same batches in one process, one step each in turn, so that
what else the machine does hits both. The bare step is the one of PyTorch's AMP examples: forward,
backward, unscale, clip, step, update. The other is `train_step` with the row in the ring, the
flags, the counts, the records and the spool written to a file. Printed is the mean of the
differences of neighbours, without the tenth at either end, as a share of the median bare step. (A
mean, because the ring is drained in one step of some.) On a CPU the time is the thread's own, which
other processes do not lengthen; on a GPU it is the clock's, to the device's last kernel. Telemetry
drains by a clock that counts the measured steps alone: in turn with the others, it would drain
twice as often as in a run. A processor without fp16 arithmetic takes ten times as long for a step:
it measures as many as there is time for. The headroom, which is looked at in one step of a hundred,
has a share of its own.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.report import report
from halfstep import ring
from halfstep.clock import clock as run_clock
from halfstep.recipe import Loss, Recipe
from halfstep.run_config import RunConfig, parse_config
from halfstep.run_settings import Diagnosis
from halfstep.spool import SpoolWriter
from trainer import machine
from trainer.ranks import Ranks
from trainer.schedule import make_schedule, peak_rates
from trainer.train import make_autocast, make_rig, make_scaler, train_step

LEAST_STEPS = 20
WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 128, 2, 4, 64, 256


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, T, D)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)  # (B, H, T, D / H)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(Recipe):
    """0.46 M parameters in 29 tensors, on random bytes."""

    name: ClassVar = "tiny-gpt"
    title: ClassVar = "Tiny GPT"
    description: ClassVar = "For the benchmark."
    defaults: ClassVar = {"training": {"batch_size": 8}}

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        self.device, self.train_size = device, 1024
        self.text = torch.randint(VOCABULARY, (self.train_size, CONTEXT + 1), device=device)
        self.modules = {
            "model": nn.Sequential(
                nn.Embedding(VOCABULARY, WIDTH),
                *[Block() for _ in range(LAYERS)],
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, VOCABULARY),
            ).to(device)
        }
        self.optimizers = {
            "adamw": torch.optim.AdamW(self.modules["model"].parameters(), fused=True)
        }

    def batch(self, indices: Tensor, generator: torch.Generator) -> Tensor:
        """Return bytes (B, T + 1)."""
        return self.text[indices.to(self.device, non_blocking=True)]

    def training_step(self, batch: Tensor) -> Iterator[Loss]:
        """Yield the cross-entropy of the next byte."""
        logits = self.modules["model"](batch[:, :-1])
        yield Loss(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()), "adamw")


class BareLoop:
    """PyTorch's documented loop, clip included."""

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        torch.manual_seed(0)
        self.recipe = TinyGPT(config, device)
        self.model = self.recipe.modules["model"]
        self.optimizer = self.recipe.optimizers["adamw"]
        self.autocast, self.scaler = make_autocast(config, device), make_scaler(config, device)

    def step(self, number: int, batch: Tensor) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast:
            loss = next(self.recipe.training_step(batch)).value
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class MeasuredLoop:
    """The service's own step, with everything that a run records."""

    def __init__(self, config: RunConfig[Any], device: torch.device, folder: Path) -> None:
        torch.manual_seed(0)
        recipe = TinyGPT(config, device)
        self.spool = SpoolWriter(folder, 1)
        self.schedule = make_schedule(
            config.training, recipe.optimizers, peak_rates(recipe.optimizers), device
        )
        self.rig, followers = make_rig(
            recipe,
            recipe.modules,
            config,
            device,
            Ranks(),
            on_steps=self.spool.steps,
            on_event=self.spool.event,
            at=run_clock(),
        )
        self.telemetry = followers.telemetry

    def step(self, number: int, batch: Tensor) -> None:
        """Train on one batch, as `train` does."""
        self.schedule.apply(number)
        self.rig.observers.before_step(number)
        result = train_step(self.rig, [batch])
        self.rig.observers.after_step(result)
        self.telemetry.tick()


def headroom_share(precision: str, device: torch.device, clock: Callable[[], float]) -> float:
    """Return what a look at the headroom adds to a step, over its default interval.

    It is taken in every other step here, and the medians of both kinds are compared.
    """
    diagnosis = {"headroom_every_steps": 2, "histogram_every_steps": 0, "replay_skips": 0}
    config = parse_config(TinyGPT, {"precision": precision, "diagnosis": diagnosis})
    with tempfile.TemporaryDirectory() as folder:
        loop = MeasuredLoop(config, device, Path(folder))
        seconds: list[list[float]] = [[], []]
        for number in range(1, 2 * LEAST_STEPS + 5):
            batch = loop.rig.recipe.text[torch.randint(1024, (8,))]
            started = clock()
            loop.step(number, batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number > 4:
                seconds[number % 2].append(clock() - started)
    looked, bare = map(statistics.median, seconds)
    return (looked - bare) / bare / Diagnosis().headroom_every_steps


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=100.0, help="at most, for all steps")
    parser.add_argument("--precision", default="fp16", choices=["fp16", "bf16", "fp32"])
    parser.add_argument("--histogram", type=int, default=0, help="every … steps; 0: none")
    options = parser.parse_known_args()[0]
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    config = parse_config(
        TinyGPT,
        {
            "precision": options.precision,
            "diagnosis": {
                "histogram_every_steps": options.histogram,
                "headroom_every_steps": 0,
                "replay_skips": 0,
            },
        },
    )
    own_time = [0.0]
    ring.clock = lambda: own_time[0]
    with tempfile.TemporaryDirectory() as folder:
        loops = [BareLoop(config, device), MeasuredLoop(config, device, Path(folder))]
        seconds: list[list[float]] = [[], []]
        until = time.perf_counter() + options.seconds
        for number in range(1, options.steps + 21):
            if len(seconds[0]) >= LEAST_STEPS and time.perf_counter() > until:
                break
            batch = loops[0].recipe.text[torch.randint(1024, (8,))]
            for which in (0, 1) if number % 2 else (1, 0):  # neither is always the second
                started = clock()
                loops[which].step(number, batch)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                taken = clock() - started
                if which == 1:
                    own_time[0] += taken
                if number > 20:  # the first ones warm up
                    seconds[which].append(taken)
    weights = [
        loops[0].model.state_dict(),
        loops[1].rig.recipe.modules["model"].state_dict(),
    ]
    same = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    bare, measured = map(statistics.median, seconds)
    differences = sorted(b - a for a, b in zip(*seconds, strict=True))
    tenth = len(differences) // 10
    added = statistics.mean(differences[tenth:-tenth])
    share = added / bare
    headroom = headroom_share(options.precision, device, clock)
    report(
        "telemetry_cost",
        "≤ 1 % of a step, the headroom likewise, the weights bit-identical",
        (
            *("step", "bare, ms", "with telemetry, ms", "added, µs, mean of pairs", "share"),
            *("headroom, every 100th", "weights"),
        ),
        [
            (
                f"tiny GPT: width {WIDTH}, {LAYERS} layers, context {CONTEXT}, batch 8, "
                f"{options.precision}, {machine.device_name(device)}, 1 thread, "
                f"torch {torch.__version__}, {len(differences)} pairs",
                f"{bare * 1e3:.2f}",
                f"{measured * 1e3:.2f}",
                f"{added * 1e6:.0f}",
                f"{share:.2%}",
                f"{headroom:.2%}",
                "bit-identical" if same else "DIFFERENT",
            )
        ],
        measured=f"{share:.2%}, headroom {headroom:.2%}, {'identical' if same else 'DIFFERENT'}",
        passed=max(share, headroom) <= 0.01 and same,
    )


if __name__ == "__main__":
    main()
