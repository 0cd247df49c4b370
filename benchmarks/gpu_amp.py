"""The AMP recipe's benchmark in every precision: what this GPU gains, and against which fp32.

    python benchmarks/gpu_amp.py            (needs torch and nothing else; copy it anywhere)
    python benchmarks/gpu_amp.py --width 64 --batch 32 --batches 5 --device cpu      (to try it out)

Three linear layers of 4096, batch 512, 50 batches × 3 epochs, mean squared error, SGD 0.001.
"fp32" is run twice: in full precision, and as TF32, which rounds the factors of a matrix product
to 10 bits of fraction. A gain over TF32 is at most about 2 ×, over full fp32 far more: a ratio says
nothing without saying which.

Source: https://docs.pytorch.org/tutorials/recipes/recipes/amp_recipe.html
"""

import argparse
import platform
import time
from dataclasses import dataclass

import torch
from torch import nn

#: Dense fp16 peaks, TFLOP/s, from NVIDIA's data sheets; the longest name that fits counts.
FP16_PEAK = {
    "V100": 125.0,
    "T4": 65.0,
    "A100": 312.0,
    "A10": 125.0,
    "L4": 121.0,
    "L40": 181.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
}


@dataclass(frozen=True)
class Mode:
    """One row of the table."""

    name: str
    autocast: torch.dtype | None = None
    scaler: bool = False
    tf32: bool = False
    published_seconds: float | None = None  # the tutorial's, for 150 steps on its GPU


MODES = [
    Mode("fp32 (TF32 off)", published_seconds=9.405),
    Mode("fp32 (TF32 on)", tf32=True),
    Mode("fp16 autocast", torch.float16, tf32=True, published_seconds=2.712),
    Mode("fp16 autocast + GradScaler", torch.float16, True, tf32=True, published_seconds=3.113),
    Mode("bf16 autocast", torch.bfloat16, tf32=True),
]


def main() -> None:
    """Print the table, or say that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"There is no usable GPU on this machine (torch {torch.__version__}): nothing was "
            "measured. Run this on a machine with one, or try it out with --device cpu and a "
            "small --width."
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    peak = _peak(name)
    steps = options.batches * options.epochs
    # Forward and backward of three square layers; the first needs no gradient of its input.
    flops = 2 * options.batch * options.width**2 * (3 * 3 - 1)
    print(f"{name or device.type}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"3 × {options.width}, batch {options.batch}, {steps} steps, SGD fused\n")
    print(
        f"{'':<28}{'seconds':>9}{'steps/s':>9}{'peak GB':>9}{'TFLOP/s':>9}"
        f"{'of fp16 peak':>14}{'vs fp32':>9}{'vs TF32':>9}   tutorial"
    )
    seconds: dict[str, float] = {}
    for mode in MODES:
        taken, memory = _measure(mode, options, device)
        seconds[mode.name] = taken
        full, tf32 = seconds[MODES[0].name], seconds.get(MODES[1].name)
        share = f"{flops * steps / taken / 1e12 / peak:.1%}" if peak else "–"
        print(
            f"{mode.name:<28}{taken:>9.3f}{steps / taken:>9.1f}{memory / 1e9:>9.3f}"
            f"{flops * steps / taken / 1e12:>9.1f}{share:>14}{full / taken:>8.2f}×"
            + (f"{tf32 / taken:>8.2f}×" if tf32 else f"{'':>9}")
            + f"   {_published(mode)}"
        )


def _measure(mode: Mode, options: argparse.Namespace, device: torch.device) -> tuple[float, int]:
    """Return seconds for all steps after a warm-up, and the peak of bytes in tensors."""
    precision = "high" if mode.tf32 else "highest"
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    width = options.width
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=mode.scaler)
    autocast = torch.autocast(device.type, dtype=mode.autocast, enabled=mode.autocast is not None)
    inputs = torch.randn(options.batches, options.batch, width, device=device)
    targets = torch.randn(options.batches, options.batch, width, device=device)

    def step(index: int) -> None:
        with autocast:
            loss = nn.functional.mse_loss(model(inputs[index]), targets[index])
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    for index in range(min(10, options.batches)):  # libraries load, algorithms are chosen
        step(index)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(options.epochs):
        for index in range(options.batches):
            step(index)
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return taken, memory


def _published(mode: Mode) -> str:
    if mode.published_seconds is None:
        return ""
    ratio = (MODES[0].published_seconds or 0) / mode.published_seconds
    return f"{mode.published_seconds:.3f} s ({ratio:.2f}×)"


def _peak(name: str) -> float | None:
    fits = [known for known in FP16_PEAK if all(word in name for word in known.split())]
    return FP16_PEAK[max(fits, key=len)] if fits else None


if __name__ == "__main__":
    main()
