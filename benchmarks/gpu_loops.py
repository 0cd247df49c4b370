"""Loops that the GPU benchmarks measure: PyTorch's bare AMP loop, the product's, a watched one.

Linear layers with ReLU between them, mean squared error and fused SGD, as in PyTorch's AMP recipe:
https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html. Batches are on the device, and
all loops get the same ones. The bare loop needs only torch; the others import what they need.
"""

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]
TrainStep = Callable[[Tensor, Tensor], object]  # of a batch: inputs and targets
BATCHES = 8  # more than fit in a GPU's cache
LOOPS = ("bare", "product", "watched")
MODES = ("eager", "graph", "compiled")


@dataclass(frozen=True)
class Precision:
    """A precision of the AMP recipe."""

    name: str
    dtype: torch.dtype | None = None  # of autocast
    is_scaled: bool = False
    is_tf32: bool = False


FP32 = Precision("fp32 without TF32")
TF32 = Precision("fp32 with TF32", is_tf32=True)
FP16 = Precision("fp16 without scaler", torch.float16)
FP16_SCALED = Precision("fp16 with scaler", torch.float16, is_scaled=True)
BF16 = Precision("bf16", torch.bfloat16)
PRECISIONS = (FP32, TF32, FP16, FP16_SCALED, BF16)


@dataclass(frozen=True)
class Size:
    """Size of the network and its batch; by default the recipe's."""

    width: int = 4096
    batch: int = 512
    layers: int = 3

    @property
    def flops(self) -> int:
        """Return a step's operations: three products per layer, without a gradient of the
        inputs.
        """
        return 2 * self.batch * self.width**2 * (3 * self.layers - 1)


@dataclass(frozen=True)
class Case:
    """One configuration of a loop."""

    precision: Precision
    loop: str
    size: Size
    mode: str = "eager"
    is_clipped: bool = False


@contextmanager
def running(case: Case, device: torch.device) -> Iterator[Step]:
    """Yield a loop's step; it is watched or recorded until the context ends."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="halfstep-gpu-") as folder:
        if case.loop == "product":
            yield _product_step(case, device, Path(folder))
            return
        model, train = _bare_step(case, device)
        shape = (BATCHES, case.size.batch, case.size.width)
        batches = cycle(zip(*(torch.randn(shape, device=device) for _ in range(2)), strict=True))
        if case.mode == "graph":
            train = _make_graph(train, *next(batches))
        if case.loop == "bare":
            yield lambda: train(*next(batches))
            return
        import halfstep

        printed = io.StringIO()
        with redirect_stderr(printed):
            watch = halfstep.watch(
                model, folder=folder, mode="offline", console=False, system=False
            )
        if not list(Path(folder).glob("*/run.json")):
            raise RuntimeError(printed.getvalue())
        with watch:
            yield lambda: train(*next(batches))


def pace(step: Step, steps: int, device: torch.device) -> float:
    """Return milliseconds per step, until the device's last kernel."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - started) / steps * 1e3


def _bare_step(case: Case, device: torch.device) -> tuple[nn.Module, TrainStep]:
    """Return a network, and the step of PyTorch's AMP examples for it."""
    precision = case.precision
    torch.set_float32_matmul_precision("high" if precision.is_tf32 else "highest")
    model: Any = _make_layers(case.size).to(device)
    if case.mode == "compiled":
        model = torch.compile(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.is_scaled)
    autocast = torch.autocast(
        device.type, precision.dtype or torch.bfloat16, enabled=precision.dtype is not None
    )

    def train(inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        with autocast:
            loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if case.is_clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return model, train


def _make_layers(size: Size) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(size.layers - 1):
        layers += [nn.Linear(size.width, size.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(size.width, size.width))


def _make_graph(train: TrainStep, inputs: Tensor, targets: Tensor) -> TrainStep:
    """Return the replay of a CUDA graph of a whole step, from the zeroing to the scale's update.

    A fused optimizer reads scale and inf flag on the device, so that nothing waits in the capture.
    """
    if inputs.device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a CUDA device, not {inputs.device.type}")
    batch = inputs.clone(), targets.clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # libraries load, and the scaler creates its tensors
            train(*batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        train(*batch)

    def replay(inputs: Tensor, targets: Tensor) -> None:
        batch[0].copy_(inputs)
        batch[1].copy_(targets)
        graph.replay()

    return replay


def _product_step(case: Case, device: torch.device, folder: Path) -> Step:
    """Return a step of the trainer with its observers and telemetry, and a spool on the disk."""
    from halfstep.clock import clock
    from halfstep.recipe import Recipe
    from halfstep.run_config import parse_config
    from halfstep.telemetry.spool import SpoolWriter
    from trainer.distributed.ranks import Ranks
    from trainer.prepared_recipe import PreparedRecipe
    from trainer.recipes.mlp import MLP
    from trainer.setup import compile_module, make_context, set_up_process
    from trainer.step import train_step

    size, precision = case.size, case.precision
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", None: "fp32"}
    mlp: type[Recipe] = MLP
    config = parse_config(
        mlp,
        {
            "precision": names[precision.dtype],
            "recipe": {"width": size.width, "layers": size.layers, "batches": BATCHES},
            "training": {
                "steps": 100_000,
                "batch_size": size.batch,
                "tf32": precision.is_tf32,
                "cuda_graph": case.mode == "graph",
                "max_grad_norm": 1.0 if case.is_clipped else None,
            },
            "scaler": {"enabled": precision.is_scaled},
        },
    )
    device = set_up_process(device, config.training)
    recipe = MLP(config, device)
    modules = dict(recipe.modules)
    if case.mode == "compiled":
        recipe.modules = {name: compile_module(m, config.training) for name, m in modules.items()}
    spool = SpoolWriter(folder, 1)
    context, observers = make_context(
        PreparedRecipe(recipe, modules, config, device, Ranks()),
        on_steps=spool.steps,
        on_event=spool.event,
        at=clock(),
    )
    if case.mode == "graph" and device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a CUDA device, not {device.type}")
    rows = (torch.split(each, size.batch) for each in (recipe.inputs, recipe.targets))
    batches = cycle(zip(*rows, strict=True))
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        context.observers.before_step(number)
        train_step(context, [next(batches)])
        observers.telemetry.tick()

    return step


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
