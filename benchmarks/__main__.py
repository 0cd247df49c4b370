"""Run every benchmark, each in a process of its own: python -m benchmarks [--save]."""

import subprocess
import sys

CLAIMS = ("recording", "disk", "memory", "opening", "random_windows", "skips")

for claim in CLAIMS:
    subprocess.run([sys.executable, "-m", f"benchmarks.{claim}", *sys.argv[1:]], check=True)
