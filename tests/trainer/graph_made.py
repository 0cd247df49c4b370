"""Recipes for steps in a CUDA graph, and a stand-in for the graph on a CPU."""

import random
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.recipe import Loss
from tests.trainer.conftest import Regression, assert_same_bits
from trainer.recipes.digits import Digits
from trainer.recipes.gpt import GPT

EXACT = ["step", "loss", "scale", "grad_norm", "grad_norm_clipped", "lr", "flags"]
#: The first 100 steps run without a graph, and one in ten after them for a histogram.
STEPS = 180
#: The learning rate is a tensor with and without a graph, so that both round it to fp32.
COMMON = {"steps": STEPS, "schedule": "cosine", "schedule_counts": "applied"}
SCALER = {"init_scale": 2.0**24, "growth_interval": 20}
FP16 = {"precision": "fp16", "scaler": SCALER}
SMALL_GPT = {"recipe": {"layers": 1, "width": 32, "heads": 2, "context": 16, "max_bytes": 2**16}}


class Logging(Regression):
    """A recipe that logs a tensor in each step, with dropout and running statistics."""

    name: ClassVar = "logging"

    def __init__(self, config, device):
        super().__init__(config, device)
        layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)]
        model = nn.Sequential(*layers, nn.Linear(16, 1)).to(device)
        self.modules = {"model": model}
        self.optimizers = {"adam": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)}

    def training_step(self, batch):
        inputs, targets = batch
        output = self.modules["model"](inputs)
        self.log({"largest": output.detach().abs().amax()})
        yield Loss(F.mse_loss(output, targets), "adam")


class Waiting(Logging):
    """A recipe that reads its loss on the host."""

    def training_step(self, batch):
        for loss in super().training_step(batch):
            loss.value.item()
            yield loss


class Drawing(Logging):
    """A recipe that draws a random number on the host in each step."""

    def training_step(self, batch):
        for loss in super().training_step(batch):
            yield Loss(loss.value * random.choice([1.0, 2.0]), "adam")


class Counting(Logging):
    """A recipe that logs a number of the host."""

    def training_step(self, batch):
        self.log({"examples": len(batch[0])})
        yield from super().training_step(batch)


CASES = [
    (Digits, FP16, {}),
    (GPT, SMALL_GPT | FP16, {"max_grad_norm": None}),
    (GPT, SMALL_GPT | {"precision": "bf16"}, {"accumulation_steps": 2}),
    (Logging, FP16, {"max_grad_value": 0.1}),
    (Logging, {"precision": "fp16", "scaler": SCALER | {"hysteresis": 2}}, {"ema_decay": 0.9}),
    (Logging, {"precision": "fp32", "diagnosis": {"norms_every_steps": 3}}, {}),
]


def assert_a_graph_changes_no_bit(run_loop, device, replays, recipe, values, training):
    """Compare rows, logged values and weights with and without a graph, to the bit."""
    values = {"diagnosis": {"histogram_every_steps": 10}} | values
    values["training"] = COMMON | training
    graphed = values | {"training": values["training"] | {"cuda_graph": True}}
    plain = run_loop(recipe, values, device=device)
    assert not replays
    run = run_loop(recipe, graphed, device=device)
    assert run.of("left_out") == []
    assert len(replays) > 50
    for name in EXACT:
        assert run.records[name].tobytes() == plain.records[name].tobytes(), name
    logged = [
        [(metric["step"], metric["value"]) for metric in each.of("metric", name="largest")]
        for each in (run, plain)
    ]
    assert logged[0] == logged[1]
    assert_same_bits(run.weights(), plain.weights())
    assert_same_bits(*([p.grad for p in _parameters(each)] for each in (run, plain)))


def _parameters(run):
    return [p for module in run.recipe.modules.values() for p in module.parameters()]


def assert_a_resumed_run_is_exact(run_loop, device, replays, tmp_path):
    """Compare a run resumed between two graph replays with an uninterrupted one."""
    values = FP16 | {"checkpoints": {"every_steps": 150}}
    values["training"] = {"steps": 300, "cuda_graph": True}
    straight = run_loop(Digits, values, tmp_path / "a", device=device)
    assert len(replays) > 150
    resumed = run_loop(
        Digits, values, tmp_path / "b", device=device, resume=tmp_path / "a/step-00000150.pt"
    )
    for name in EXACT:
        assert resumed.records[name].tobytes() == straight.records[name][150:].tobytes(), name
    assert_same_bits(resumed.weights(), straight.weights())


def assert_it_trains_without(run_loop, device, replays, recipe, reason):
    """Train a recipe that cannot be captured: the reason is reported, and nothing differs."""
    values = FP16 | {"training": COMMON}
    random.seed(0)
    plain = run_loop(recipe, values, device=device)
    random.seed(0)
    run = run_loop(recipe, values | {"training": COMMON | {"cuda_graph": True}}, device=device)
    [left_out] = run.of("left_out")
    assert left_out["diagnosis"] == "CUDA graph"
    assert reason in left_out["reason"], left_out["reason"]
    assert not replays
    assert_same_bits(run.weights(), plain.weights())


class StandIn(TorchDispatchMode):
    """Records operators like a CUDA graph, and runs them again on the same tensors.

    Unlike CUDA, a CPU runs operators during the capture, so their effects are undone.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.own = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for written in _list_written(func, args, kwargs):
            if written.untyped_storage().data_ptr() not in self.own:
                self.before.setdefault(id(written), (written, written.clone()))
        results = func(*args, **kwargs)
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        created = [] if is_view else _list_tensors(results)
        self.own |= {tensor.untyped_storage().data_ptr() for tensor in created}
        self.calls.append((func, args, kwargs, created))
        return results

    @torch.no_grad()
    def replay(self):
        """Run the operators again."""
        for func, args, kwargs, created in self.calls:
            results = func(*args, **kwargs)
            for tensor, result in zip(created, _list_tensors(results), strict=False):
                tensor.copy_(result)


@contextmanager
def capture_by_stand_in(graph, capture_error_mode):
    """Capture like `torch.cuda.graph`."""
    generator = torch.get_rng_state()
    try:
        with graph:
            yield
    finally:
        torch.set_rng_state(generator)
        with torch.no_grad():
            for tensor, before in graph.before.values():
                tensor.copy_(before)


def _list_tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _list_written(func, args, kwargs):
    """Return the tensors that an operator changes in place."""
    if "batch_norm" in str(func):  # its schema does not say so
        return _list_tensors(args[3:5])
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    return [
        tensor
        for argument, value in zip(arguments, values, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _list_tensors(value)
    ]
