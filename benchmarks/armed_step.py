"""Time and memory of an armed step, compared with the same step without shadows.

`python -m benchmarks.armed_step [--device cuda]`. Each case runs in its own process and
alternates between some bare steps and as many armed ones. Memory is the peak of the process, or of
the device, in each. Models this small are bound by the number of operators in bf16, which take a
CPU some 0.15 ms each. In a watched run armed steps take at most two seconds and 1 % of the time.
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from benchmarks.report import report
from halfstep.check.session import CheckedLoop, CheckedSteps

STEPS, ROUNDS = 6, 5
BAR = 5.0
Step = Callable[[], None]


def mlp() -> tuple[nn.Module, Tensor]:
    """Return three layers and their inputs."""
    return nn.Sequential(*_layers(256)), torch.randn(256, 256)


def _layers(width: int) -> list[nn.Module]:
    return [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())]


def convolutions() -> tuple[nn.Module, Tensor]:
    """Return a convolutional network with batch norm, and images."""
    layers: list[nn.Module] = []
    for channels in (3, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers), torch.randn(8, 3, 24, 24)


def transformer() -> tuple[nn.Module, Tensor]:
    """Return two layers of a transformer, and sequences."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 32, 64)


MODELS = {"MLP": mlp, "convolutions": convolutions, "transformer": transformer}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def step_of(model: str, dtype: torch.dtype, device: torch.device) -> Step:
    """Return a function that takes one step."""
    torch.manual_seed(0)
    net, inputs = MODELS[model]()
    net, inputs = net.to(device), inputs.to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = GradScaler(device.type, enabled=dtype == torch.float16)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = net(inputs).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def measure(case: tuple[str, str, str]) -> tuple[float, float, float]:
    """Return milliseconds of a bare and an armed step, and the extra MiB of armed steps."""
    model, precision, device_name = case
    device = torch.device(device_name)
    torch.set_num_threads(1)
    step = step_of(model, DTYPES[precision], device)
    bare, armed = [_time(step, device)], []
    before = _most_mib(device)
    for _ in range(ROUNDS):
        bare.append(_time(step, device))
        with CheckedLoop(CheckedSteps(steps=0)):
            step()  # the first one reads the sources of lines
            armed.append(_time(step, device))
    more = _most_mib(device) - before
    return statistics.median(bare[1:]), statistics.median(armed), more


def _time(step: Step, device: torch.device) -> float:
    """Return milliseconds per step; on a CPU in CPU time, which other processes do not change."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    begun = clock()
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - begun) * 1e3 / STEPS


def _most_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Measure each model in each precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows, ratios = [], []
    context = multiprocessing.get_context("spawn")
    for model in MODELS:
        for precision in DTYPES:
            with context.Pool(1) as pool:
                case = (model, precision, options.device)
                bare, armed, more = pool.apply(measure, [case])
            if precision == "fp16":
                ratios.append(armed / bare)
            row = (model, precision, f"{bare:.2f}", f"{armed:.2f}", f"{armed / bare:.1f}")
            rows.append((*row, f"{more:.0f}"))
    report(
        "armed_step",
        f"an armed step in fp16 ≤ {BAR:g} of a bare one",
        ("model", "precision", "bare, ms", "armed, ms", "ratio", "more memory, MiB"),
        rows,
        measured=f"{min(ratios):.1f} to {max(ratios):.1f}",
        passed=max(ratios) <= BAR,
    )


if __name__ == "__main__":
    main()
