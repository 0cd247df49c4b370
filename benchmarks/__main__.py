"""Run every benchmark, each in a process of its own, and print one table of all claims.

python -m benchmarks [--save]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.report import RESULTS, SUMMARY, summary

CLAIMS = (
    "peers",
    "telemetry_cost",
    "watch_cost",
    "checkpoint_stall",
    "accumulation_memory",
    "precision_diff",
    "cut_download",
    "data_loading",
    "syncs",
    "recording",
    "ingest",
    "many_names",
    "metric_points",
    "disk",
    "conversion",
    "opening",
    "opening_page",
    "largest_paint",
    "run_list",
    "growth",
    "list_patch",
    "random_windows",
    "history",
    "compare",
    "dashboards",
    "skips",
    "step_to_figure",
    "browser_busy",
    "start",
    "base_install",
    "idle_look",
    "gangs",
    "idle_workers",
    "live_viewers",
    "memory",
    "console_lines",
    "diagnosis",
)
#: Print tables of their own, without a target for this machine.
OTHERS = ("loop_hold", "gpu_performance", "gpu_launches")


def main() -> None:
    """Run all benchmarks; a failed one gets a line that says so."""
    with tempfile.NamedTemporaryFile("r", prefix="halfstep-bench-") as lines:
        for claim in (*OTHERS, *CLAIMS):
            arguments = sys.argv[1:] if claim in CLAIMS else []
            command = [sys.executable, "-m", f"benchmarks.{claim}", *arguments]
            failed = subprocess.run(command, env={**os.environ, SUMMARY: lines.name}).returncode
            if failed and claim in CLAIMS:
                with Path(lines.name).open("a") as file:
                    file.write(f"| {claim} | | it failed | | MISSED |\n")
        table = summary(lines.read())
    print(table)
    if "--save" in sys.argv:
        (RESULTS / "all.md").write_text(table)


if __name__ == "__main__":
    main()
