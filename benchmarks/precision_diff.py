"""Cost of a precision diff in steps and memory, and equality of the training.

Each model trains in processes of its own, in one thread: once with steps only, once with diffs
between them. A step is forward, backward and update under autocast. Times are of the processor,
medians without the first. Memory is the peak of all tensors, of which the profiler reports each
allocation; weights and the optimizer's state are in all figures, gradients too during a diff and
a pass in fp32. That pass, forward and backward, is what a diff needs at least.
"""

import importlib.util
import os
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from benchmarks.report import report
from halfstep.config_groups import Precision
from halfstep.precision_lab.diff import diff_of
from trainer.data.sources import drawn
from trainer.diagnosis.recipe_checks import small_config
from trainer.registry import load_recipe
from trainer.repeatability import seed_everything
from trainer.setup import make_recipe
from trainer.several_losses import as_losses

LLAMA = "llama (transformers)"
MODELS = ("digits", "gpt", "erfnet", LLAMA)
DTYPES: dict[Precision, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
STEPS, DIFFS = 8, 4
BATCH_SIZE = 2
BAR, MEMORY_BAR = 6.0, 1.3
#: The target is for steps of at least this time: a diff also costs milliseconds per call.
LEAST_SECONDS = 0.05
CPU = torch.device("cpu")
SCALE = {"fp16": 1024.0, "bf16": 1.0}


class Training(NamedTuple):
    """The parts of a training."""

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    loss: Callable[[], Tensor]


class Cost(NamedTuple):
    """The figures of a process."""

    step_seconds: float
    diff_seconds: float
    step_bytes: int
    diff_bytes: int
    fp32_bytes: int
    state: list[bytes]


def recipe(name: str, precision: Precision) -> Training:
    """Return the training of a recipe on its first examples."""
    recipe_class = load_recipe(name)
    config = small_config(recipe_class, {}, precision, batch_size=BATCH_SIZE)
    made = make_recipe(recipe_class, config, CPU)
    batch = drawn(made, torch.arange(BATCH_SIZE), CPU)

    def loss() -> Tensor:
        first = next(iter(made.training_step(batch)))
        return torch.stack([each.value for each in as_losses(first)]).sum()

    return Training(made.modules, made.optimizers, loss)


def llama() -> Training:
    """Return the training of a small Llama, whose modules return dataclasses."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    text = torch.randint(0, 1000, (BATCH_SIZE, 128))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def loss() -> Tensor:
        value: Tensor = model(input_ids=text, labels=text).loss
        return value

    return Training({"model": model}, {"adamw": optimizer}, loss)


def measure(name: str, precision: Precision, *, with_diffs: bool) -> Cost:
    """Train some steps, with a diff before each of the last ones."""
    torch.set_num_threads(1)
    seed_everything(0)
    modules, optimizers, loss = llama() if name == LLAMA else recipe(name, precision)

    def step() -> None:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        with torch.autocast("cpu", DTYPES[precision]):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers.values():
            optimizer.step()

    def diff() -> None:
        diff_of(tuple(modules.values()), loss, DTYPES[precision], SCALE[precision])

    steps, diffs = [], [0.0]
    for number in range(STEPS):
        if with_diffs and number >= STEPS - DIFFS:
            diffs.append(_time(diff))
        steps.append(_time(step))
    tensors = [value for module in modules.values() for value in module.state_dict().values()]
    state = [each.detach().numpy().tobytes() for each in [*tensors, torch.get_rng_state()]]

    def fp32() -> None:
        weights = [p for module in modules.values() for p in module.parameters()]
        torch.autograd.grad(loss(), weights, allow_unused=True)

    step_bytes = diff_bytes = fp32_bytes = 0
    if with_diffs:
        diff_bytes, fp32_bytes = (_live(modules, optimizers) + _peak(each) for each in (diff, fp32))
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        step_bytes = _live(modules, optimizers) + _peak(step)
    return Cost(
        statistics.median(steps[1:]),
        statistics.median(diffs[2:] or diffs),
        step_bytes,
        diff_bytes,
        fp32_bytes,
        state,
    )


def alone(name: str, precision: Precision, *, with_diffs: bool) -> Cost:
    """Measure in a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, name, precision, with_diffs=with_diffs).result()


def main() -> None:
    """Print the table."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    has_transformers = importlib.util.find_spec("transformers") is not None
    if not has_transformers:
        print(f"{LLAMA}: left out, as transformers is not installed.")
    rows, times, memory, are_equal = [], [], [], True
    for name in MODELS:
        if name == LLAMA and not has_transformers:
            continue
        for precision in DTYPES:
            plain = alone(name, precision, with_diffs=False)
            cost = alone(name, precision, with_diffs=True)
            is_equal = plain.state == cost.state
            ratio = cost.diff_seconds / cost.step_seconds
            if cost.step_seconds >= LEAST_SECONDS:
                times.append(ratio)
            memory.append(cost.diff_bytes / cost.step_bytes)
            are_equal &= is_equal
            rows.append(
                (
                    name,
                    precision,
                    f"{1000 * cost.step_seconds:.0f}",
                    f"{ratio:.1f}",
                    f"{cost.step_bytes / 2**20:.1f}",
                    f"{cost.diff_bytes / 2**20:.1f}",
                    f"{memory[-1]:.2f}",
                    f"{cost.fp32_bytes / cost.step_bytes:.2f}",
                    "yes" if is_equal else "NO",
                )
            )
    report(
        "precision_diff",
        f"a diff takes ≤ {BAR:g} steps of ≥ {1000 * LEAST_SECONDS:g} ms and ≤ {MEMORY_BAR:g} × a "
        "step's memory, and changes no bit",
        (
            "model",
            "precision",
            "step, ms",
            "diff, steps",
            "step, MiB",
            "diff, MiB",
            "×",
            "fp32 pass, ×",
            "same bits",
        ),
        rows,
        measured=f"{max(times):.1f} steps and {max(memory):.1f} × at most, "
        f"{'the same' if are_equal else 'OTHER'} bits",
        passed=max(times) <= BAR and max(memory) <= MEMORY_BAR and are_equal,
    )


def _time(call: Callable[[], None]) -> float:
    start = process_time()
    call()
    return process_time() - start


def _live(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Any]) -> int:
    """Return the bytes of weights, buffers, gradients and the optimizers' state."""
    own = [t for m in modules.values() for t in (*m.parameters(), *m.buffers())]
    gradients = [tensor.grad for tensor in own if tensor.grad is not None]
    states = [s for o in optimizers.values() for each in o.state.values() for s in each.values()]
    tensors = [t for t in (*own, *gradients, *states) if isinstance(t, Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def _peak(call: Callable[[], None]) -> int:
    """Return a call's peak bytes of allocated tensors."""
    with profile(profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


if __name__ == "__main__":
    main()
