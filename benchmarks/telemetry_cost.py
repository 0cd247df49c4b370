"""Cost of telemetry: steps of the built-in loop next to PyTorch's documented one, on a tiny GPT.

    python -m benchmarks.telemetry_cost [--steps 400] [--seconds 200] [--precision fp16]

Copies of the model train on the same batches in one process, a few steps each in turn, so that
other work on the machine affects all of them. The bare step is the one of PyTorch's AMP examples:
forward, backward, unscale, clip, step, update. The others are `train_step` with the row in the
ring, the flags, the counts, the records and the spool written to a file: one without any diagnosis,
one with each periodic diagnosis, and one with all of them. The diagnoses run 50 times as often as
by default, and their added time is divided by 50; a turn has as many steps as the rarest interval.
The figure is the mean of the differences of neighbours, without the tenth at either end, as a share
of the median bare step. (A mean, because the ring is drained in one step of some.) Telemetry stands
beside the bare step; a diagnosis beside telemetry alone; "all" is telemetry and the copy with all
of them, each at its interval. Every copy ends with the bare one's weights, bit by bit.

On a CPU the time is the thread's own, which other processes do not lengthen; on a GPU it is the
clock's, to the device's last kernel. Telemetry drains by a clock that counts each copy's own steps
alone: in turn with the others, it would drain more often than in a run. A processor without fp16
arithmetic takes ten times as long for a step: it measures as many as there is time for.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.report import report
from halfstep.clock import clock as run_clock
from halfstep.config_groups import Diagnosis
from halfstep.recipe import Loss, Recipe
from halfstep.recording import ring
from halfstep.run_config import RunConfig, parse_config
from halfstep.telemetry.spool import SpoolWriter
from trainer import machine
from trainer.distributed.ranks import Ranks
from trainer.prepared_recipe import PreparedRecipe
from trainer.schedule import make_schedule, peak_rates
from trainer.setup import make_context
from trainer.step import make_autocast, make_scaler, train_step

LEAST_TURNS = 12
WARM_UP_TURNS = 5
#: Factor by which diagnoses run more often than by default.
MORE_OFTEN = 50
DIAGNOSES: dict[str, tuple[str, ...]] = {
    "headroom": ("headroom_every_steps",),
    "layer norms": ("layer_norms_every_steps",),
    "histogram": ("histogram_every_steps",),
}
DIAGNOSES["all"] = tuple(name for names in DIAGNOSES.values() for name in names)
DEFAULT = {name: getattr(Diagnosis(), name) for name in DIAGNOSES["all"]}
TURN_STEPS = max(DEFAULT.values()) // MORE_OFTEN
MOST_SHARE = 0.01  # of a step
WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 128, 2, 4, 64, 256


class Block(nn.Module):
    """A transformer block: attention and an MLP, each after a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block. x: (B, T, D)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D / H)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        wider: Tensor = self.mlp(self.norm2(x))
        return x + wider


class TinyGPT(Recipe):
    """A GPT of 0.46 M parameters in 29 tensors, for random bytes."""

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
    """PyTorch's documented loop, including the clip."""

    def __init__(self, config: RunConfig[Any], device: torch.device) -> None:
        torch.manual_seed(0)
        self.seconds = 0.0  # that its steps took
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
        self.seconds = 0.0  # that its steps took
        recipe = TinyGPT(config, device)
        self.model = recipe.modules["model"]
        self.spool = SpoolWriter(folder, 1)
        self.schedule = make_schedule(
            config.training, recipe.optimizers, peak_rates(recipe.optimizers), device
        )
        self.context, followers = make_context(
            PreparedRecipe(recipe, recipe.modules, config, device, Ranks()),
            on_steps=self.spool.steps,
            on_event=self.spool.event,
            at=run_clock(),
        )
        self.telemetry = followers.telemetry

    def step(self, number: int, batch: Tensor) -> None:
        """Train on one batch, as `train` does."""
        self.schedule.apply(number)
        self.context.observers.before_step(number)
        result = train_step(self.context, [batch])
        self.context.observers.after_step(result)
        self.telemetry.tick()

    def close(self) -> None:
        """Write all measured data."""
        self.context.observers.drain()
        self.spool.close()


class Cost(NamedTuple):
    """The cost of a copy.

    added: seconds per step.  share: of the bare step.  is_same: its weights equal the bare loop's.
    """

    added: float
    share: float
    is_same: bool


def measure(
    precision: str, device: torch.device, folder: Path, *, turns: int, seconds: float
) -> tuple[float, int, dict[str, Cost]]:
    """Train all copies in turn; return the bare step's seconds, the number of turns, and the costs.

    turns: the maximum; at least LEAST_TURNS are measured, even if the time runs out.
    """
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    bare = BareLoop(_config(precision, ()), device)
    copies: dict[str, BareLoop | MeasuredLoop] = {"bare": bare}
    for name, looks in {"telemetry": (), **DIAGNOSES}.items():
        with _time_of(lambda: 0.0):
            copies[name] = MeasuredLoop(_config(precision, looks), device, folder / name)
    taken: dict[str, list[float]] = {name: [] for name in copies}  # a step, by turns
    until = time.perf_counter() + seconds
    order = list(copies)
    for turn in range(turns + WARM_UP_TURNS):
        if len(taken["bare"]) >= LEAST_TURNS and time.perf_counter() > until:
            break
        batches = [bare.recipe.text[torch.randint(1024, (8,))] for _ in range(TURN_STEPS)]
        order.append(order.pop(0))  # no variant always follows the same one, or is always first
        for name in order if turn % 2 else reversed(order):
            before = copies[name].seconds
            _train(copies[name], turn * TURN_STEPS + 1, batches, clock)
            if turn >= WARM_UP_TURNS:
                taken[name].append((copies[name].seconds - before) / TURN_STEPS)
    for copy in copies.values():
        if isinstance(copy, MeasuredLoop):
            copy.close()
    step = statistics.median(taken["bare"])
    costs: dict[str, Cost] = {}
    for name, copy in copies.items():
        if name != "bare":
            is_looking = name in DIAGNOSES
            added = _mean_added(taken[name], taken["telemetry" if is_looking else "bare"])
            added /= MORE_OFTEN if is_looking else 1
            if name == "all":
                added += max(costs["telemetry"].added, 0.0)  # below it is chance
            costs[name] = Cost(added, added / step, _is_same(copy.model, bare.model))
    return step, len(taken["bare"]), costs


def _config(precision: str, looks: tuple[str, ...]) -> RunConfig[Any]:
    every = {name: DEFAULT[name] // MORE_OFTEN if name in looks else 0 for name in DEFAULT}
    return parse_config(
        TinyGPT, {"precision": precision, "diagnosis": {**every, "replay_skips": 0}}
    )


def _train(
    copy: BareLoop | MeasuredLoop, first: int, batches: list[Tensor], clock: Callable[[], float]
) -> None:
    """Train a turn's steps, and add up their time."""
    with _time_of(lambda: copy.seconds):
        for number, batch in enumerate(batches, start=first):
            started = clock()
            copy.step(number, batch)
            if batch.is_cuda:
                torch.cuda.synchronize()
            copy.seconds += clock() - started


@contextmanager
def _time_of(seconds: Callable[[], float]) -> Iterator[None]:
    """Let a ring use this clock while the context is open."""
    with patch.object(ring, "clock", seconds):
        yield


def _mean_added(seconds: list[float], without: list[float]) -> float:
    """Return the mean of the differences, without the tenth at either end."""
    differences = sorted(b - a for a, b in zip(without, seconds, strict=True))
    tenth = len(differences) // 10
    return statistics.mean(differences[tenth : len(differences) - tenth])


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    weights: Mapping[str, Tensor] = other.state_dict()
    return all(torch.equal(weight, weights[key]) for key, weight in one.state_dict().items())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=200.0, help="at most, for all steps")
    parser.add_argument("--precision", default="fp16", choices=["fp16", "bf16", "fp32"])
    options = parser.parse_known_args()[0]
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        step, turns, costs = measure(
            options.precision,
            device,
            Path(folder),
            turns=options.steps // TURN_STEPS,
            seconds=options.seconds,
        )
    is_same = all(cost.is_same for cost in costs.values())
    report(
        "telemetry_cost",
        "telemetry, headroom, layer norms, histogram and all of them each ≤ 1 % of a step at "
        "their default intervals, the weights bit-identical",
        ("what", "looks every … steps", "added, µs a step", "of a step", "weights"),
        [
            (
                name,
                _intervals(name),
                f"{cost.added * 1e6:.0f}",
                f"{cost.share:.3%}",
                "bit-identical" if cost.is_same else "DIFFERENT",
            )
            for name, cost in costs.items()
        ],
        measured=f"{', '.join(f'{name} {cost.share:.2%}' for name, cost in costs.items())}, "
        f"{'identical' if is_same else 'DIFFERENT'}; a bare step is {step * 1e3:.2f} ms, of a tiny "
        f"GPT: width {WIDTH}, {LAYERS} layers, context {CONTEXT}, batch 8, {options.precision}, "
        f"{machine.device_name(device)}, 1 thread, torch {torch.__version__}, "
        f"{turns} turns of {TURN_STEPS} steps",
        passed=max(cost.share for cost in costs.values()) <= MOST_SHARE and is_same,
    )


def _intervals(name: str) -> str:
    return ", ".join(str(DEFAULT[each]) for each in DIAGNOSES.get(name, ())) or "–"


if __name__ == "__main__":
    main()
