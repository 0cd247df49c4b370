"""The sandbox of an attempt, and the probe of whether it is effective.

halfstep.sandbox implements the rules; this module sets them for a run.
"""

import json
import os
import site
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from db.settings import Settings
from halfstep.api_client import credentials, local_server
from halfstep.isolation import Isolation
from halfstep.sandbox import NEEDED_VERSION, Sandbox, version
from halfstep.telemetry.attempt_files import AttemptFiles
from worker.sandbox.run_users import PLACES, hidden, trial_user

#: Starts a program in the sandbox described by its environment.
START = [sys.executable, "-I", "-m", "halfstep.sandbox"]
#: The same for a run with its own user.
ISOLATED = [sys.executable, "-I", "-m", "halfstep.isolation"]
#: Folders by variable of files that programs compile or download, and execute later.
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TRITON_CACHE_DIR": "cache/triton",
    "TORCH_EXTENSIONS_DIR": "cache/torch_extensions",
    "CUDA_CACHE_PATH": "cache/cuda",
    "NUMBA_CACHE_DIR": "cache/numba",
    "HF_MODULES_CACHE": "cache/huggingface/modules",
}
#: Credentials of the worker's user and of the system, which runs may not read.
IN_HOME = (
    *(".ssh", ".aws", ".azure", ".kube", ".docker", ".gnupg", ".config/gcloud", ".config/gh"),
    *(".netrc", ".pgpass", ".git-credentials", ".pypirc", ".npmrc", ".cache/huggingface/token"),
)
OF_SYSTEM = ("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-")
#: Paths that the service, a shell, git, cron or the kernel executes or reads as configuration.
EXECUTED_IN_HOME = (
    *(".", ".config", ".local", ".local/bin", ".local/lib", ".cache", ".triton", ".ssh"),
    *(".gitconfig", ".config/git/config", ".bashrc", ".profile", ".ssh/authorized_keys"),
)
EXECUTED = (
    *("/etc", "/etc/cron.d", "/etc/ld.so.preload", "/usr/local/bin", "/usr/local/lib"),
    *("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"),
)
#: Sockets whose services start programs outside of the sandbox. Landlock does not restrict them.
SOCKETS = (
    *("/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock"),
    *("/run/podman/podman.sock", "/run/systemd/private"),
)
SOCKETS_OF_USER = ("docker.sock", "podman/podman.sock", "systemd/private")
PACKAGES = ("app", "db", "halfstep", "migrations", "trainer", "worker")
#: Devices of NVIDIA's driver, and of any GPU in WSL.
DEVICES = ("/dev/nvidiactl", "/dev/dxg")
PROBE_SECONDS = 60.0
NAMED = 3  # paths in a message


def private_paths(settings: Settings) -> list[Path]:
    """Return paths that runs may not read: the service's data, and the user's credentials."""
    home = Path.home()
    of_user = (*(home / each for each in IN_HOME), credentials.place(), local_server.folder())
    # Rules for each entry of /etc miss entries replaced later, so only if these files are readable.
    readable = (Path(each) for each in OF_SYSTEM if os.access(each, os.R_OK))
    return [*settings.private_paths, *of_user, *readable]


def sandbox_of_run(
    settings: Settings, files: AttemptFiles, read: Sequence[str] = (), free: Sequence[Path] = ()
) -> Sandbox:
    """Return the sandbox of an attempt.

    read: private files that it may read, in addition to its folder.  free: further folders where
    it may write and make links.
    """
    cache = settings.data / "cache"
    cache.mkdir(exist_ok=True)
    own = [each for each in (files.temporary, files.work) if each.is_dir()]
    return Sandbox(
        private=[str(each) for each in private_paths(settings)],
        own=str(files.folder),
        free=[str(each) for each in (*own, *settings.write_folders, *free)],
        shared=[str(cache)],
        read=[str(settings.data / "recipes.json"), *read],
        names_threads=has_cuda(),
    )


def has_cuda() -> bool:
    """Return whether this machine has NVIDIA's driver, or may have it in WSL."""
    return any(Path(device).exists() for device in DEVICES)


def caches(folder: Path) -> dict[str, str]:
    """Return variables that put programs' caches into a folder of the run."""
    return {name: str(folder / place) for name, place in CACHES.items()}


def obstacle(settings: Settings, recipe_files: Iterable[str] = ()) -> str:
    """Probe the sandbox of runs; return why it is ineffective, or "".

    recipe_files: files that the worker loads outside of the sandbox, in addition to its own code.
    """
    if version() < NEEDED_VERSION:
        return "this kernel has no Landlock, or an older one than Linux 6.2 has"
    runs = settings.run_folder(0).parent
    runs.mkdir(parents=True, exist_ok=True)
    folder, other = (Path(mkdtemp(prefix="probe-", dir=runs)) for _ in range(2))
    (other / "job-1.json").touch()
    places = executed(settings, recipe_files)
    try:
        with trial_user(settings) as user:
            return _probe(settings, user, folder, other, places)
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be probed: {error}"
    finally:
        rmtree(folder, ignore_errors=True)
        rmtree(other, ignore_errors=True)


def executed(settings: Settings, recipe_files: Iterable[str] = ()) -> list[Path]:
    """List paths that other processes execute or read as configuration, existing or not."""
    home = Path.home()
    python = [*sys.path, *site.getsitepackages(), site.getusersitepackages(), sys.prefix]
    specs = filter(None, map(find_spec, PACKAGES))
    code = [place for each in specs for place in each.submodule_search_locations or ()]
    recipes = [place for each in recipe_files for place in (each, str(Path(each).parent))]
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    places = [*python, *code, *recipes, *path, str(Path(sys.executable).parent), str(Path.cwd())]
    data = (settings.data / each for each in (".", "runs", "recipes.json", "server.json"))
    paths = [
        *(Path(each).absolute() for each in places if each),
        *(home / each for each in EXECUTED_IN_HOME),
        *map(Path, (*EXECUTED, *PLACES)),
        *(*data, *private_paths(settings)),
    ]
    return list(dict.fromkeys(paths))


def _probe(
    settings: Settings, user: int | None, folder: Path, other: Path, places: list[Path]
) -> str:
    files = AttemptFiles(folder, 1)
    files.temporary.mkdir()
    start, environment = START, {"PATH": os.defpath} | sandbox_of_run(settings, files).variable()
    if user is not None:
        for each in (folder, files.temporary):
            os.chown(each, user, user)
        isolation = Isolation(user, str(files.temporary), hidden_places(settings))
        start, environment = ISOLATED, environment | isolation.variable()
        places = [each for each in places if not _is_below(each, isolation.places)]
    private = [each for each in private_paths(settings) if each != settings.data]
    daemon = Path(f"/proc/{os.getpid()}/environ")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    thread = ["/proc/thread-self/comm"] if has_cuda() else []
    request = {
        "own": [str(folder), str(files.temporary), *thread],
        "write": list(map(str, [other, *places])),
        "read": [str(each) for each in (other, daemon, *private) if each.exists()],
        "connect": [*SOCKETS, *(str(runtime / each) for each in SOCKETS_OF_USER)],
    }
    ended = subprocess.run(
        [*start, sys.executable, "-I", "-m", "worker.sandbox.sandbox_probe"],
        env=environment,
        cwd="/",
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
    )
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        return f"its probe failed: {lines[-1]}"
    return _description(json.loads(ended.stdout))


def _is_below(path: Path, places: Iterable[str]) -> bool:
    return any(path.is_relative_to(each) for each in places)


def hidden_places(settings: Settings, *needed: str) -> tuple[str, ...]:
    """Return the folders that a run with its own user sees replaced by its temporary folder."""
    ours = str(Path(__file__).parents[2])  # the checkout, if installed from one
    return hidden((str(settings.data), sys.prefix, ours, *filter(None, needed)))


def _description(answer: dict[str, list[str]]) -> str:
    """Describe the paths that a run could reach, and those of its own that it could not."""
    parts = []
    for verb, places in answer.items():
        further = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
        if places:
            parts.append(f"{verb} {', '.join(places[:NAMED])}{further}")
    return f"a run could {'; '.join(parts)}" if parts else ""
