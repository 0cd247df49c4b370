"""Kernels that a step launches on a GPU, by torch.profiler: bare, product and watched loop.

    python -m benchmarks.gpu_launches                       (a CUDA device)
    python -m benchmarks.gpu_launches --device cpu --small  (to try it out: operators, not kernels)

The loops are those of benchmarks.gpu_loops, with and without a clip and a scaler, past the first
steps of a watched loop, which are examined more closely. Waits are calls in which the host waits
for the device; the profiler itself waits once at its end.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_loops import FP16, FP16_SCALED, LOOPS, Case, Size, Step, pace, running
from benchmarks.report import table

STEPS = 50
#: Categories of the profiler's trace, and columns of the table.
ON_CUDA = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
ON_CPU = {"cpu_op": "operators"}
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")


def main() -> None:
    """Print the table, where a failing loop has a row with its error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    options = parser.parse_known_args()[0]
    device = torch.device(options.device)
    size, warm_up_steps = (Size(width=32, batch=16), 20) if options.small else (Size(), 300)
    is_cpu = device.type == "cpu"
    columns = [*ON_CPU.values()] if is_cpu else [*ON_CUDA.values(), "waits"]
    rows: list[tuple[object, ...]] = []
    failed = 0
    for is_clipped, precision, loop in product((False, True), (FP16, FP16_SCALED), LOOPS):
        begin = (loop, precision.name, "clip" if is_clipped else "no clip")
        try:
            case = Case(precision, loop, size, is_clipped=is_clipped)
            with running(case, device) as step:
                pace(step, warm_up_steps, device)
                counts = count_launches(step, device)
        except Exception as error:
            failed += 1
            text = f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            rows.append((*begin, text, *[""] * (len(columns) - 1)))
            continue
        rows.append((*begin, *(f"{counts[each] / STEPS:.1f}" for each in columns)))
    print(f"# gpu_launches\n\n{size.layers} × {size.width}, a step, mean of {STEPS}\n")
    print(table(("loop", "precision", "clip", *columns), rows), flush=True)
    sys.exit(failed == len(rows))


def count_launches(step: Step, device: torch.device) -> Counter[str]:
    """Return the kernels, copies, fills and waits of some steps, or a CPU's operators."""
    is_cpu = device.type == "cpu"
    categories = ON_CPU if is_cpu else ON_CUDA
    activities = [ProfilerActivity.CPU, *([] if is_cpu else [ProfilerActivity.CUDA])]
    with profile(activities=activities) as profiled:
        pace(step, STEPS, device)
    with tempfile.TemporaryDirectory(prefix="halfstep-gpu-") as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    counts: Counter[str] = Counter()
    for event in events:
        category = event.get("cat")
        if category in categories:
            counts[categories[category]] += 1
        elif event.get("name") in WAITS:
            counts["waits"] += 1
    return counts


if __name__ == "__main__":
    main()
