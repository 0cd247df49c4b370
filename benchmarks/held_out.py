"""Diagnosis of loops whose authors had not read the engine.

    python -m benchmarks.held_out [first second …] [--watch] [--rows]

The diagnosis is that of `halfstep check`, or the findings on the page of a watched run.

For each case the benchmark prints right, partly, wrong or silent (for a healthy one right or
false), the remedies that the measured facts contradict, and whether a bit has changed.
"""

import argparse
from collections import Counter

import torch

from tests.diagnosis.held_out_cases import FOLDER, HEALTHY, cases, judge, judge_watched


def main() -> None:
    """Print the cases of the collections, and their totals."""
    everything = sorted(each.name for each in FOLDER.iterdir() if each.is_dir())
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held_out")
    parser.add_argument("collections", nargs="*", help=f"of {', '.join(everything)}; all if none")
    parser.add_argument("--watch", action="store_true", help="judge the findings of watched runs")
    parser.add_argument("--rows", action="store_true", help="print each statement")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for collection in chosen.collections or everything:
        counts: Counter[str] = Counter()
        for case in cases(collection):
            judged = judge_watched(case) if chosen.watch else judge(case)
            is_healthy = case.cause == HEALTHY
            counts[f"healthy {judged.named}" if is_healthy else judged.named] += 1
            counts["harmful"] += bool(judged.harmful)
            counts["other bits"] += not judged.is_same
            notes = [*sorted(judged.harmful), *(() if judged.is_same else ("other bits",))]
            print(f"{judged.named:7} {case.cause:17} {case.name:36} {' '.join(notes)}", flush=True)
            if chosen.rows:
                for row in judged.rows:
                    sign = "F" if row.is_fault else "n"
                    print(f"    {sign} {row.kind} {row.line} {row.text} | {row.advice}")
        print(collection, dict(counts), f"torch {torch.__version__}", flush=True)


if __name__ == "__main__":
    main()
