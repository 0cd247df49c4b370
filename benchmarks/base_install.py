"""What each dependency of the two base installs costs: MiB, CPU seconds to install and to import.

A dependency counts with the packages that only it needs: what an extra would save. Installing is
unpacking and compiling wheels that are downloaded before. Each import has a process of its own; the
fastest of five counts. docs/decisions/0002-two-wheels-one-command.md has the decision that follows.
"""

import resource
import subprocess
import sys
import tempfile
from collections.abc import Collection
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.report import report

ROUNDS = 5
#: Most MiB of each install, and what a watched script and a server load at their start.
INSTALLS = {"halfstep": (120, "import halfstep"), "halfstep-service": (600, "import app.serve")}
HEAVY_MIB = 25  # of a dependency that the start does not load, but numpy
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@cache
def needed(package: str) -> frozenset[str]:
    """Return a package's requirements, each with extras: psycopg[binary]."""
    name, _, extras = package.rstrip("]").partition("[")
    environments = [{"extra": extra} for extra in extras.split(",")]
    return frozenset(
        canonicalize_name(each.name) + (f"[{','.join(each.extras)}]" if each.extras else "")
        for each in map(Requirement, distribution(name).requires or ())
        if each.marker is None or any(map(each.marker.evaluate, environments))
    )


def closure(packages: Collection[str]) -> set[str]:
    """Return the names of these packages and of all that they require."""
    found, waiting = set(packages), set(packages)
    while waiting:
        waiting = set().union(*map(needed, waiting)) - found
        found |= waiting
    return {package.partition("[")[0] for package in found}


def mib(names: Collection[str]) -> float:
    """Return the size of the files of packages."""
    files = (Path(str(file.locate())) for name in names for file in distribution(name).files or ())
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


def cpu_seconds(*command: str) -> tuple[float, str]:
    """Return the CPU seconds and the output of a process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = subprocess.check_output(command, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def install(names: Collection[str]) -> float:
    """Return the seconds that pip takes to install these packages without a network."""
    wheels = [f"{name}=={distribution(name).version}" for name in names]
    with tempfile.TemporaryDirectory() as folder:
        cpu_seconds(*PIP, "download", "--no-deps", "--dest", folder, *wheels)
        places = ("--find-links", folder, "--target", f"{folder}/installed")
        return cpu_seconds(*PIP, "install", "--no-deps", "--no-index", *places, *wheels)[0]


def load(code: str) -> tuple[float, set[str]]:
    """Return the seconds of an import after Python's start, and the loaded modules."""
    codes = ("import sys", f"import sys; {code}; print(*sys.modules)")
    (start, _), (seconds, modules) = (
        min(cpu_seconds(sys.executable, "-c", each) for _ in range(ROUNDS)) for each in codes
    )
    return max(seconds - start, 0.0), set(modules.split())


def main() -> None:
    """Measure each dependency, and print the largest first."""
    everywhere = packages_distributions().items()
    modules = {str(canonicalize_name(name)): top for top, names in everywhere for name in names}
    rows, measured, passed = [], [], True
    for package, (most, code) in INSTALLS.items():
        direct, (seconds, loaded) = needed(package) - {"halfstep"}, load(code)
        everything = closure(direct)
        measured.append(f"{package} {mib(everything):.0f} MiB, `{code}` {seconds:.2f} s")
        passed &= mib(everything) <= most
        for each in direct:
            own, top = everything - closure(direct - {each}), modules[each.partition("[")[0]]
            times = install(own) if own else 0.0, load(f"import {top}")[0]
            passed &= mib(own) <= HEAVY_MIB or top == "numpy" or top not in loaded
            start = "yes" if top in loaded else "no"
            rows.append((mib(own), package, each, len(own), *map("{:.2f}".format, times), start))
    header = ("MiB", "install", "dependency", "packages", "s to install", "s to import", "at start")
    listed = [(f"{size:.1f}", *others) for size, *others in sorted(rows, reverse=True)]
    bars = ", ".join(f"{package} ≤ {most} MiB" for package, (most, _code) in INSTALLS.items())
    bars += f"; of > {HEAVY_MIB} MiB only numpy is loaded at the start"
    report("base_install", bars, header, listed, measured="; ".join(measured), passed=passed)


if __name__ == "__main__":
    main()
