"""Build both images with buildah: python -m tests.images.builder (root, Debian).

It needs no container engine and no registry: the base is debootstrap's Debian, tagged like the
Dockerfile's base in a store of its own.
"""

import configparser
import os
import re
import subprocess
import sys
import tempfile
import time
from ast import literal_eval
from pathlib import Path

ROOT = Path(__file__).parents[2]
STORE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "halfstep-images"
LOG = STORE / "build.log"
#: Tagged, all of them, so that pruning leaves what the next build can go on from.
STAGES = ("base", "build-server", "server", "build-worker", "worker")


def main() -> None:
    """Build the images, then print time and sizes."""
    began = time.monotonic()
    buildah("rm", "--all")  # of a trial that was cut off
    make_base()
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES:
            # Mount points stay in a layer. Only these two are mounted into; what is shipped is
            # made without.
            settings = pip_settings(Path(folder)) if stage.startswith("build-") else []
            words = ("--layers", "--format=docker", "--pull=never", f"--logfile={LOG}", *settings)
            buildah("build", *words, "--target", stage, "--tag", f"halfstep-{stage}", str(ROOT))
    buildah("rmi", "--prune", "--force")
    print(f"built in {time.monotonic() - began:.0f} s:")
    for image in ("server", "worker"):
        size = buildah("images", "--format", "{{.Size}}", f"localhost/halfstep-{image}")
        print(f"    halfstep-{image:8}{size}")


def buildah(*words: str) -> str:
    """Run buildah in the store and return its stdout; stderr goes to the terminal."""
    command = [*BUILDAH, *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


BUILDAH = (
    *("buildah", "--storage-driver", "vfs"),
    *("--root", str(STORE / "storage"), "--runroot", str(STORE / "run")),
)
os.environ["BUILDAH_ISOLATION"] = "chroot"


def make_base() -> None:
    """Make an image of Debian with Python, which has what is used of Docker's."""
    name = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)[1]
    tag = f"docker.io/library/{name}"
    if buildah("images", "--quiet", "--filter", f"reference={tag}"):
        return
    version, suite = re.fullmatch(r"python:([\d.]+)-slim-(\w+)", name).groups()
    container = buildah("from", "scratch")
    root = Path(buildah("mount", container))
    packages = "ca-certificates,python3,python3-pip"
    subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", suite, root],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    for command, target in (("python", "python3"), ("python3", "python3"), ("pip", "pip3")):
        (root / "usr/local/bin" / command).symlink_to(f"/usr/bin/{target}")
    # What the slim images leave out as well.
    clear = "apt-get clean; cd /usr/share; rm -rf doc/* info/* locale/* man/* /var/lib/apt/lists/*"
    buildah("run", container, "--", "sh", "-c", clear)
    assert f"Python {version}." in buildah("run", container, "--", "python", "--version")
    buildah("commit", "--quiet", "--rm", container, tag)


def pip_settings(folder: Path) -> list[str]:
    """Return pip settings with which a build finds this machine's packages."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    config, paths = configparser.RawConfigParser(), set()
    for line in listed.splitlines():  # such as global.find-links='/srv/wheels'
        name, _, quoted = line.partition("=")
        section, _, key = name.replace(":env:", "global").partition(".")
        value = str(literal_eval(quoted)).split()
        config.read_dict({section: {key: " ".join(value)}})
        for word in value:
            # The files of an index are next to it.
            is_index = word.startswith("file://") and key.endswith("index-url")
            path = Path(word.removeprefix("file://"))
            paths.add(path.parent if is_index else path)
    with (folder / "pip.conf").open("w") as file:
        config.write(file)
    mounted = {path: path for path in paths if path.is_absolute() and path.exists()}
    mounted[folder / "pip.conf"] = Path("/etc/pip.conf")
    words = [f"--volume={here}:{there}:ro" for here, there in mounted.items()]
    if index := os.environ.get("TORCH_INDEX"):
        words.append(f"--build-arg=TORCH_INDEX={index}")
    return words


if __name__ == "__main__":
    main()
