"""Settings that server and worker share, from HALFSTEP_* environment variables."""

import os
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from db import variables
from db.errors import Invalid
from db.setting_types import (
    KubernetesName,
    OptionalKubernetesName,
    Options,
    Proxies,
    PublicUrl,
    Users,
    required_by,
)
from halfstep.field_errors import reason

#: Folder of the folders that runs write.
SCRATCH = "scratch"


class Settings(BaseSettings):
    """Settings; the defaults work on a single machine without any setup."""

    model_config = SettingsConfigDict(env_prefix="HALFSTEP_", extra="ignore")

    # Folder of the database, the runs and checkpoints.
    data: Path = Path("data")
    # SQLAlchemy URL; empty: SQLite in the data folder.
    database_url: str = ""
    # Storage of checkpoints: empty (the data folder), s3://, gs://, az://.
    storage_url: str = ""
    # Whether checkpoints are downloaded directly from the bucket, by presigned URLs valid for 5
    # minutes.
    presigned_downloads: bool = False
    # Address that the server binds to.
    host: str = "127.0.0.1"
    # Port that the server binds to.
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    # Additional host names of the server, separated by commas.
    host_names: str = ""
    # Addresses or networks of proxies, separated by commas: their X-Forwarded-For and
    # X-Forwarded-Proto are trusted.
    trusted_proxies: Proxies = ""
    # Public address of the server, with a path if a proxy serves it below one:
    # https://host/halfstep.
    public_url: PublicUrl = ""
    # Mail server for alerts: smtp:// or smtps://user:password@host.
    smtp_url: SecretStr = SecretStr("")
    # Sender of alerts; empty: halfstep@ the mail server's host.
    smtp_from: str = ""
    # Whether alerts may go to addresses of the server's own network.
    alerts_allow_private_addresses: bool = False
    # Whether users may sign in with a password; sign-in links always work.
    password_login: bool = True
    # URL of the OIDC provider; empty: no single sign-on.
    oidc_issuer: str = ""
    # Client id of this server at the OIDC provider.
    oidc_client_id: str = ""
    # Client secret of this server at the OIDC provider.
    oidc_client_secret: SecretStr = SecretStr("")
    # Scopes requested from the OIDC provider.
    oidc_scopes: str = "openid profile email"
    # The provider's claim with the groups of a user.
    oidc_groups_claim: str = "groups"
    # Roles of groups: group=role@project, separated by commas; * is every user.
    oidc_roles: str = ""
    # Bearer token for /metrics (Prometheus); empty: no such endpoint.
    metrics_token: SecretStr = SecretStr("")
    # Whether watched scripts of the user who runs `halfstep up` connect to it without a token.
    local_scripts: bool = True
    # Name of this worker; empty: the host's name.
    worker_name: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    # Runs at once on a machine without a GPU.
    cpu_devices: Annotated[int, Field(ge=0)] = 1
    # Whether this worker runs command lines that users submit.
    allow_commands: bool = False
    # Folders of this worker with weights that runs may start from, separated by commas.
    weights_dirs: str = ""
    # Folders below which settings of recipes may name paths on this worker, separated by
    # os.pathsep; empty: anywhere except system and service folders, and with HALFSTEP_SANDBOX only
    # the run's own folder.
    data_roots: str = ""
    # With HALFSTEP_SANDBOX, additional folders that runs of this worker may write, separated by
    # os.pathsep; empty: none.
    write_roots: str = ""
    # Whether the worker keeps a process with torch loaded, from which it forks trainings: uses 0.3
    # GiB of memory and saves seconds at each start.
    warm_start: bool = True
    # Additional environment variables that recipes receive, separated by commas: NAME, NAME_*.
    run_environment: Annotated[str, Field(pattern=r"^[\w*, ]*$")] = ""
    # Variables of other tools whose names begin with HALFSTEP_, separated by commas: NAME, NAME_*;
    # any other unknown one is an error.
    other_variables: Annotated[str, Field(pattern=r"^[\w*, ]*$")] = ""
    # Minimum severity of log messages of server and workers.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Format of log lines: text, or a JSON object per line.
    log_format: Literal["text", "json"] = "text"
    # Whether runs are isolated from private files (Landlock on Linux).
    sandbox: bool = False
    # Whether the sandbox uses namespaces where the system permits them.
    sandbox_namespaces: bool = True
    # Range of user ids reserved for runs: 20000-20063; empty: none.
    run_users: Users = ""
    # Memory limit of a run by cgroup, in GiB; 0: none.
    run_memory_gib: Annotated[float, Field(ge=0, le=2**20, allow_inf_nan=False)] = 0.0
    # Limit of a run's processes and threads; 0: none.
    run_processes: Annotated[int, Field(ge=0, le=2**22)] = 0
    # CPU limit of a run by cgroup; 0: none.
    run_cpus: Annotated[float, Field(ge=0, le=2**16, allow_inf_nan=False)] = 0.0
    # Largest weights file that users may upload, in GiB; 0: uploads are off.
    upload_gib: Annotated[float, Field(ge=0, le=2**20, allow_inf_nan=False)] = 16.0
    # JSON lines that one token may log per minute, on each server; 0: no limit.
    log_lines_per_minute: Annotated[int, Field(ge=0, le=10**9)] = 60_000
    # Key file of the secrets; empty: secrets.key in the data folder.
    secrets_key_file: Path | None = None
    # Limit of concurrent runs per user; 0: none.
    runs_per_user: Annotated[int, Field(ge=0)] = 0
    # Limit of devices in use per user; 0: none.
    devices_per_user: Annotated[int, Field(ge=0)] = 0
    # Limit of queued runs per user; 0: none.
    queued_per_user: Annotated[int, Field(ge=0)] = 0
    # Waiting time in seconds after which devices are reserved for the first queued multi-device
    # run.
    reserve_after_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0
    # Duration of a node's lease in seconds: for that long, a node without contact counts as alive.
    lease_seconds: Annotated[float, Field(gt=0)] = 300.0
    # How workers are started. boxes: by hand, with `halfstep worker`. slurm, kubernetes, ray: for
    # each run, by `halfstep placer`.
    placement: Literal["boxes", "slurm", "kubernetes", "ray"] = "boxes"
    # Additional sbatch options: --partition=gpu --gres=gpu:{devices} …
    slurm_options: Options = ""
    # Image of the workers' pods.
    kubernetes_image: Annotated[
        str, Field(max_length=500), required_by("placement", "kubernetes")
    ] = ""
    # Namespace of the workers' jobs.
    kubernetes_namespace: KubernetesName = "default"
    # Service account of the workers' pods.
    kubernetes_service_account: OptionalKubernetesName = ""
    # Secret with the environment of the workers' pods, such as HALFSTEP_DATABASE_URL.
    kubernetes_secret: OptionalKubernetesName = ""
    # Resource name by which the pods request devices; empty: none.
    kubernetes_resource: Annotated[str, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[\w.-]{0,63}$")] = (
        "nvidia.com/gpu"
    )
    # Kueue local queue of the jobs; empty: no Kueue.
    kubernetes_queue: OptionalKubernetesName = ""
    # YAML file with a pod template, whose container `worker` is completed.
    kubernetes_pod_template: Path | None = None
    # Head of the Ray cluster: host:6379 on one of its machines, else ray://host:10001.
    ray_address: Annotated[
        str,
        Field(pattern=r"^(auto|(ray://)?[\w.-]+:\d{1,5})?$"),
        required_by("placement", "ray"),
    ] = ""
    # Ray resource name of devices.
    ray_resource: Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")] = "GPU"
    # Devices per cluster node.
    placed_devices: Annotated[int, Field(ge=1, le=1024)] = 8
    # Limit of pending requests to the cluster.
    max_pending_pilots: Annotated[int, Field(ge=1, le=10_000)] = 20
    # Network interface for communication between nodes; empty: the one that connects to the
    # database.
    network_interface: Annotated[str, Field(pattern=r"^[\w.:-]{0,15}$")] = ""
    # Timeout of collective operations between nodes in seconds; 0: two fifths of a lease.
    rank_timeout_seconds: Annotated[float, Field(ge=0)] = 0.0
    # Limit of killed attempts before a run fails.
    max_attempts: Annotated[int, Field(ge=1)] = 10
    # Limit of consecutive killed attempts without a new step.
    max_stalled_attempts: Annotated[int, Field(ge=1)] = 5
    # Limit of cached checkouts of ended commands.
    max_cached_checkouts: Annotated[int, Field(ge=0)] = 20
    # Days during which deleted runs can be restored.
    trash_days: Annotated[float, Field(ge=0)] = 7.0
    # Interval in hours at which a server backs up into HALFSTEP_BACKUP_FOLDER; 0: never.
    backup_every_hours: Annotated[float, Field(ge=0, le=24 * 365)] = 0.0
    # Folder of these backups, best on another disk or machine.
    backup_folder: Annotated[Path | None, required_by("backup_every_hours")] = None
    # How many of these backups are kept, the newest ones.
    backup_keep: Annotated[int, Field(ge=1, le=1000)] = 7
    # Free space in GB on the disk of the data folder below which a worker starts no run and the log
    # of running ones has a warning; 0: starts until it is full.
    reserve_disk_gb: Annotated[float, Field(ge=0)] = 1.0
    # Time in seconds for runs to save a checkpoint when their worker stops.
    stop_grace_seconds: Annotated[float, Field(gt=0)] = 30.0

    @model_validator(mode="after")
    def _fill(self) -> Self:
        self.data = self.data.resolve()
        if not self.database_url:
            self.database_url = f"sqlite:///{self.default_database}"
        # The bare name means SQLAlchemy's default driver, psycopg 2, which is not the one we ship.
        if self.database_url.startswith(("postgresql://", "postgres://")):
            self.database_url = f"postgresql+psycopg://{self.database_url.split('://', 1)[1]}"
        return self

    @classmethod
    def read(cls) -> Self:
        """Read the environment. Raises Invalid, naming each variable, its value and the fault."""
        problems = variables.problems(os.environ, cls.model_fields)
        try:
            settings = cls()
        except ValidationError as error:
            for wrong in error.errors():
                name = f"{variables.PREFIX}{wrong['loc'][0]}".upper()
                problems[name] = f"{wrong['input']!r}: {reason(wrong)}"
        if problems:
            raise Invalid(problems)
        return settings

    @property
    def address(self) -> str:
        """Base URL for links outside of the server's pages, without a trailing slash."""
        return self.public_url.rstrip("/") or f"http://{self.host}:{self.port}"

    @property
    def default_database(self) -> Path:
        """Path of SQLite's file in the data folder."""
        return self.data / "halfstep.db"

    @property
    def path_prefix(self) -> str:
        """Path of the public URL: "/halfstep", or "" for the root."""
        return urlsplit(self.public_url).path.rstrip("/")

    @property
    def per_user(self) -> dict[str, int]:
        """Limits per user, as keyword arguments of a claim."""
        return {"runs_per_user": self.runs_per_user, "devices_per_user": self.devices_per_user}

    @property
    def proxies(self) -> list[str]:
        """Addresses and networks of trusted proxies."""
        return [part for part in map(str.strip, self.trusted_proxies.split(",")) if part]

    @property
    def secrets_key(self) -> Path:
        """Path of the secrets' key file, which may not exist yet."""
        return self.secrets_key_file or self.data / "secrets.key"

    @property
    def weights_folders(self) -> list[Path]:
        """Folders below which a run may name weights.

        Not those in a folder that runs write: one could become a link to anywhere.
        """
        paths = filter(None, map(str.strip, self.weights_dirs.split(",")))
        named = [Path(path).expanduser().absolute() for path in paths]
        written = self.write_folders
        safe = [folder for folder in named if not any(map(folder.is_relative_to, written))]
        return [path.resolve() for path in safe]

    @property
    def write_folders(self) -> list[Path]:
        """Folders outside of its own that a run in the sandbox may write."""
        paths = filter(None, self.write_roots.split(os.pathsep))
        return [Path(path).expanduser().resolve() for path in paths]

    @property
    def run_user_range(self) -> range:
        """User ids reserved for runs, possibly empty."""
        first, _, last = self.run_users.partition("-")
        return range(int(first), int(last) + 1) if first else range(0)

    def run_folder(self, run_id: int, node: int = 0) -> Path:
        """Return the folder of a run's job, log and checkpoints on the training machine.

        Runs only read it.

        node: number of a node, since several may share a disk.
        """
        folder = self.data / "runs" / str(run_id)
        return folder / f"node-{node}" if node else folder

    def scratch_folder(self, run_id: int, node: int = 0) -> Path:
        """Return the folder that a run writes: its spool, working and temporary folders.

        All access is by `halfstep.untrusted_files`, since the run can make links there.
        """
        return self.data / SCRATCH / str(run_id) / str(node)
