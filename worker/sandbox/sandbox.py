"""The sandbox of an attempt, and the probe of whether it is effective.

halfstep.sandbox implements the rules; this module sets them for a run.
"""

import json
import os
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit
from urllib.request import url2pathname

from sqlalchemy import make_url

from db import database_copy
from db.settings import Settings
from halfstep.api_client import credentials, local_server
from halfstep.isolation import Isolation
from halfstep.sandbox import Sandbox, is_supported
from halfstep.telemetry.attempt_files import AttemptFiles
from worker.sandbox.run_users import PLACES, hidden, trial_user

#: Starts a program in the isolation described by its environment.
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
#: Sockets whose services start programs outside of the sandbox, and PostgreSQL's, which may trust
#: the worker's user. Landlock does not restrict them.
SOCKETS = (
    "/run/postgresql",
    *("/run/docker.sock", "/run/containerd/containerd.sock", "/run/crio/crio.sock"),
    *("/run/podman/podman.sock", "/run/systemd/private", "/run/dbus/system_bus_socket"),
    "/run/snapd.socket",
)
SOCKETS_OF_USER = ("docker.sock", "podman/podman.sock", "systemd/private", "bus")
#: Folder of sockets, and what runs need in it: names of hosts and users, drivers of GPUs, and the
#: system's programs on NixOS.
SERVICES = "/run"
NEEDED = (
    *("/run/systemd/resolve", "/run/resolvconf", "/run/nscd", "/run/nvidia-persistenced"),
    *("/run/nvidia-fabricmanager", "/run/opengl-driver", "/run/current-system"),
)
PACKAGES = ("app", "db", "halfstep", "migrations", "trainer", "worker")
#: Devices of NVIDIA's driver, and of any GPU in WSL.
DEVICES = ("/dev/nvidiactl", "/dev/dxg")
PROBE_SECONDS = 60.0
NAMED = 3  # paths in a message


def private_paths(settings: Settings) -> list[Path]:
    """Return paths that runs may not read: the service's data, and the user's credentials."""
    home = Path.home()
    of_user = (*(home / name for name in IN_HOME), credentials.place(), local_server.folder())
    # Rules for each entry of /etc miss entries replaced later, so only if these files are readable.
    readable = (Path(place) for place in OF_SYSTEM if os.access(place, os.R_OK))
    return [*_private_paths_of_service(settings), *of_user, *readable]


def _private_paths_of_service(settings: Settings) -> list[Path]:
    """Return the data folder, the database's files, the secrets' key, backups and the storage."""
    paths = [settings.data, settings.secrets_key, *filter(None, [settings.backup_folder])]
    url = make_url(settings.database_url)
    if url.get_backend_name() == "sqlite" and url.database:
        file = Path(url.database).resolve()
        paths += [file.with_name(file.name + end) for end in ("", "-wal", "-shm", "-journal")]
        paths += database_copy.copies(file)
    if settings.storage_url.startswith("file://"):
        paths.append(Path(url2pathname(urlsplit(settings.storage_url).path)))
    return [path.resolve() for path in paths]


def sandbox_of_run(settings: Settings, files: AttemptFiles, read: Sequence[str] = ()) -> Sandbox:
    """Return the sandbox of an attempt.

    read: private files that it may read, in addition to its folders.
    """
    cache = settings.data / "cache"
    cache.mkdir(exist_ok=True)
    control = [str(files.control_folder)] if files.control_folder else []
    return Sandbox(
        private=[str(path) for path in private_paths(settings)],
        free=[str(folder) for folder in (files.folder, *settings.write_folders)],
        shared=[] if settings.run_users else [str(cache)],
        read=[str(settings.data / "recipes.json"), *control, *read],
        services=[SERVICES],
        needed=list(NEEDED),
        names_threads=has_cuda(),
    )


def isolation_of_run(
    settings: Settings, files: AttemptFiles, read: Sequence[str] = (), needed: Sequence[str] = ()
) -> Isolation:
    """Return the isolation of an attempt, without its user and limits.

    read: private files that it may read.  needed: other paths that it needs, which a private /tmp
    would hide.
    """
    if not (settings.sandbox and is_supported()):
        return Isolation()
    isolation = Isolation(sandbox_of_run(settings, files, read))
    if not settings.sandbox_namespaces:
        return isolation
    roots = [*settings.data_roots.split(os.pathsep), *map(str, settings.weights_folders)]
    writable = map(str, settings.write_folders)
    return replace(
        isolation,
        in_namespaces=True,
        temporary=str(files.temporary),
        places=hidden_places(settings, *read, *needed, *roots, *writable),
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
    if not is_supported():
        return "this kernel has no Landlock, or a version older than that of Linux 6.2"
    places = list_executed_paths(settings, recipe_files)
    try:
        with _probe_folder(settings) as folder, _probe_folder(settings) as other:
            (other / "job-1.json").touch()
            with trial_user(settings) as user:
                return _probe(settings, user, folder, other, places)
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be probed: {error}"


def list_executed_paths(settings: Settings, recipe_files: Iterable[str] = ()) -> list[Path]:
    """List paths that other processes execute or read as configuration, existing or not."""
    home = Path.home()
    python = [*sys.path, *site.getsitepackages(), site.getusersitepackages(), sys.prefix]
    specs = filter(None, map(find_spec, PACKAGES))
    code = [place for spec in specs for place in spec.submodule_search_locations or ()]
    recipes = [place for file in recipe_files for place in (file, str(Path(file).parent))]
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    places = [*python, *code, *recipes, *path, str(Path(sys.executable).parent), str(Path.cwd())]
    data = (settings.data / name for name in (".", "runs", "recipes.json", "server.json"))
    paths = [
        *(Path(place).absolute() for place in places if place),
        *(home / name for name in EXECUTED_IN_HOME),
        *map(Path, (*EXECUTED, *PLACES)),
        *(*data, *private_paths(settings)),
    ]
    return list(dict.fromkeys(paths))


def _probe(
    settings: Settings, user: int | None, folder: Path, other: Path, places: list[Path]
) -> str:
    files = AttemptFiles(folder, 1)
    isolation = replace(isolation_of_run(settings, files), user=user)
    if user is not None:
        for owned in (folder, files.temporary):
            os.chown(owned, user, user)
    places = [place for place in places if not _is_below(place, isolation.places)]
    private = [path for path in private_paths(settings) if path != settings.data]
    daemon = Path(f"/proc/{os.getpid()}/environ")
    thread = ["/proc/thread-self/comm"] if has_cuda() else []
    own, terminal = os.openpty()
    request = {
        "own": [str(folder), str(files.temporary), *thread],
        "write": list(map(str, [other, *places, os.ttyname(terminal)])),
        "read": [str(path) for path in (other, daemon, *private) if path.exists()]
        + [os.ttyname(terminal)],
        "change": [str(path) for path in (other, other / "job-1.json", *private, *places)],
        "signal": [str(os.getpid())],
        "connect": [*SOCKETS, *_sockets_of_user()],
    }
    try:
        ended = subprocess.run(
            [*ISOLATED, sys.executable, "-I", "-m", "worker.sandbox.sandbox_probe"],
            env={"PATH": os.defpath} | isolation.variable(),
            cwd="/",
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    finally:
        os.close(own)
        os.close(terminal)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        return f"its probe failed: {lines[-1]}"
    return _description(json.loads(ended.stdout))


def namespaces_obstacle(settings: Settings) -> str:
    """Return why runs cannot have namespaces, or "" if they can."""
    if not settings.sandbox_namespaces:
        return "HALFSTEP_SANDBOX_NAMESPACES=no"
    try:
        with _probe_folder(settings) as folder:
            files = AttemptFiles(folder, 1)
            ended = subprocess.run(
                [*ISOLATED, "true"],
                env={"PATH": os.defpath} | isolation_of_run(settings, files).variable(),
                cwd="/",
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
            )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return f"this system permits no namespaces: {lines[-1]}" if ended.returncode else ""


@contextmanager
def _probe_folder(settings: Settings) -> Iterator[Path]:
    """Create a folder like that of a run, with a temporary folder."""
    scratch = settings.scratch_folder(0).parents[1]
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="probe-", dir=scratch, ignore_cleanup_errors=True) as folder:
        AttemptFiles(Path(folder), 1).temporary.mkdir()
        yield Path(folder)


def _sockets_of_user() -> list[str]:
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    return [str(runtime / name) for name in SOCKETS_OF_USER]


def _is_below(path: Path, places: Iterable[str]) -> bool:
    return any(path.is_relative_to(place) for place in places)


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
