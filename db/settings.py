"""Settings that server and worker share, from HALFSTEP_* environment variables."""

import os
import re
import shlex
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url

from db.errors import Invalid

#: A label as RFC 1123 has it, which names of Kubernetes' are made of.
KUBERNETES_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
#: What a placement cannot do without.
NEEDED_BY = {"kubernetes_image": "kubernetes", "ray_address": "ray"}
#: That runs may have to themselves.
MOST_USERS = 10_000


class Settings(BaseSettings):
    """Every setting has a default that works on one machine with nothing to set up."""

    model_config = SettingsConfigDict(env_prefix="HALFSTEP_", extra="ignore")

    data: Annotated[Path, Field(description="Folder of the database, the runs and checkpoints")] = (
        Path("data")
    )
    database_url: Annotated[
        str, Field(description="SQLAlchemy URL; empty means SQLite in the data folder")
    ] = ""
    storage_url: Annotated[
        str,
        Field(
            description="Where checkpoints are kept: empty (the data folder), s3://, gs://, az://"
        ),
    ] = ""
    presigned_downloads: Annotated[
        bool,
        Field(
            description="Whether checkpoints of a bucket are downloaded from it, by an address "
            "that opens the file to whoever holds it, for five minutes"
        ),
    ] = False
    host: Annotated[str, Field(description="Address that the server binds to")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="Port that the server binds to")] = 8000
    host_names: Annotated[
        str, Field(description="Further names that browsers may use for the server, with commas")
    ] = ""
    trusted_proxies: Annotated[
        str,
        Field(
            description="Addresses or networks, with commas, whose X-Forwarded-For and -Proto count"
        ),
    ] = ""
    public_url: Annotated[
        str,
        Field(
            description="Address by which people open the server, with a path if a proxy serves it "
            "below one: https://host/halfstep"
        ),
    ] = ""
    smtp_url: Annotated[
        SecretStr, Field(description="Of alerts by e-mail: smtp:// or smtps://user:password@host")
    ] = SecretStr("")
    smtp_from: Annotated[
        str,
        Field(description="Sender of alerts; empty means halfstep@ the mail server's host"),
    ] = ""
    alerts_allow_private_addresses: Annotated[
        bool, Field(description="Whether alerts may go to addresses of the server's own network")
    ] = False
    password_login: Annotated[
        bool, Field(description="Whether people may sign in by password; links always work")
    ] = True
    oidc_issuer: Annotated[
        str, Field(description="Of single sign-on: the provider's address; empty: there is none")
    ] = ""
    oidc_client_id: Annotated[str, Field(description="What the provider knows this server by")] = ""
    oidc_client_secret: Annotated[
        SecretStr, Field(description="What this server proves that with")
    ] = SecretStr("")
    oidc_scopes: Annotated[str, Field(description="What the provider is asked for")] = (
        "openid profile email"
    )
    oidc_groups_claim: Annotated[
        str, Field(description="The provider's claim that has somebody's groups")
    ] = "groups"
    oidc_roles: Annotated[
        str,
        Field(description="What groups may: group=role@project, with commas; * is everybody"),
    ] = ""
    metrics_token: Annotated[
        SecretStr,
        Field(description="What Prometheus sends to read /metrics; empty: there are none"),
    ] = SecretStr("")
    worker_name: Annotated[
        str,
        Field(
            pattern=r"^[\w.-]{0,64}$",
            description="Name of this worker; empty means the host's name",
        ),
    ] = ""
    cpu_devices: Annotated[
        int, Field(ge=0, description="Runs at once on a machine without a GPU")
    ] = 1
    allow_commands: Annotated[
        bool, Field(description="Whether this worker runs command lines that people submit")
    ] = False
    weights_dirs: Annotated[
        str,
        Field(
            description="Folders of this worker with weights that runs may start from, by commas"
        ),
    ] = ""
    data_roots: Annotated[
        str,
        Field(
            description="Folders below which recipes of this worker may be told to read, by "
            "os.pathsep; empty: anywhere but in the system's and the service's own, and with "
            "HALFSTEP_SANDBOX in the run's own folder only"
        ),
    ] = ""
    write_roots: Annotated[
        str,
        Field(
            description="With HALFSTEP_SANDBOX, folders that runs of this worker may write besides "
            "their own, by os.pathsep; empty: none"
        ),
    ] = ""
    run_environment: Annotated[
        str,
        Field(
            pattern=r"^[\w*, ]*$",
            description="Further variables that recipes here get, by commas: NAME, NAME_*",
        ),
    ] = ""
    sandbox: Annotated[
        bool,
        Field(description="Whether runs are walled off from what is private, where Linux can"),
    ] = False
    run_users: Annotated[
        str,
        Field(
            pattern=r"^([1-9]\d{0,8}-[1-9]\d{0,8})?$",
            description="Users that runs have to themselves, by numbers: 20000-20063; empty: none",
        ),
    ] = ""
    run_memory_gib: Annotated[
        float, Field(ge=0, le=2**20, allow_inf_nan=False, description="Of a run, by cgroup; 0: any")
    ] = 0.0
    run_processes: Annotated[
        int, Field(ge=0, le=2**22, description="Of a run, threads included; 0: any number")
    ] = 0
    run_cpus: Annotated[
        float, Field(ge=0, le=2**16, allow_inf_nan=False, description="Of a run, by cgroup; 0: any")
    ] = 0.0
    upload_gib: Annotated[
        float,
        Field(
            ge=0,
            le=2**20,
            allow_inf_nan=False,
            description="Largest file of weights that people may upload, in GiB; 0: none",
        ),
    ] = 16.0
    secrets_key_file: Annotated[
        Path | None,
        Field(description="File of the key of secrets; empty means secrets.key in the data folder"),
    ] = None
    runs_per_user: Annotated[
        int, Field(ge=0, description="How many runs may train at once for one user; 0: any number")
    ] = 0
    devices_per_user: Annotated[
        int, Field(ge=0, description="On how many devices one user's runs may train; 0: any number")
    ] = 0
    queued_per_user: Annotated[
        int, Field(ge=0, description="How many runs one user may have in the queue; 0: any number")
    ] = 0
    reserve_after_seconds: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="Seconds that a run of several devices is the first to wait before devices "
            "are kept for it",
        ),
    ] = 300.0
    lease_seconds: Annotated[
        float, Field(gt=0, description="How long a silent node of a run is believed alive")
    ] = 300.0
    placement: Annotated[
        Literal["boxes", "slurm", "kubernetes", "ray"],
        Field(
            description="What starts workers: boxes: whoever starts `halfstep worker`; a cluster, "
            "for each run, by `halfstep placer`: slurm, kubernetes, ray"
        ),
    ] = "boxes"
    slurm_options: Annotated[
        str,
        Field(
            max_length=2000,
            description="What sbatch is told besides: --partition=gpu --gres=gpu:{devices} …",
        ),
    ] = ""
    kubernetes_image: Annotated[
        str,
        Field(validate_default=True, max_length=500, description="Image of the workers' pods"),
    ] = ""
    kubernetes_namespace: Annotated[
        str, Field(pattern=KUBERNETES_NAME, description="Where their jobs are made")
    ] = "default"
    kubernetes_service_account: Annotated[
        str, Field(pattern=f"{KUBERNETES_NAME}|^$", description="Whose rights they have")
    ] = ""
    kubernetes_secret: Annotated[
        str,
        Field(
            pattern=f"{KUBERNETES_NAME}|^$",
            description="The Secret that is their environment: HALFSTEP_DATABASE_URL and all else",
        ),
    ] = ""
    kubernetes_resource: Annotated[
        str,
        Field(
            pattern=r"^([a-z0-9.-]{1,253}/)?[\w.-]{0,63}$",
            description="By which name they ask for devices; empty: they ask for none",
        ),
    ] = "nvidia.com/gpu"
    kubernetes_queue: Annotated[
        str,
        Field(
            pattern=f"{KUBERNETES_NAME}|^$",
            description="Kueue's local queue that admits them; empty: they start as they come",
        ),
    ] = ""
    kubernetes_pod_template: Annotated[
        Path | None,
        Field(description="YAML file of a pod template, whose container `worker` becomes theirs"),
    ] = None
    ray_address: Annotated[
        str,
        Field(
            validate_default=True,
            pattern=r"^(auto|(ray://)?[\w.-]+:\d{1,5})?$",
            description="Head of the Ray cluster: host:6379 on one of its machines, else "
            "ray://host:10001",
        ),
    ] = ""
    ray_resource: Annotated[
        str,
        Field(pattern=r"^[\w.:-]{1,64}$", description="By which name its nodes' devices go"),
    ] = "GPU"
    placed_devices: Annotated[
        int, Field(ge=1, le=1024, description="How many devices a node of the cluster has")
    ] = 8
    max_pending_pilots: Annotated[
        int, Field(ge=1, le=10_000, description="How many runs a cluster is asked for at once")
    ] = 20
    network_interface: Annotated[
        str,
        Field(
            pattern=r"^[\w.:-]{0,15}$",
            description="Network interface by which nodes of a run reach each other; empty: the "
            "one by which this machine reaches the database",
        ),
    ] = ""
    rank_timeout_seconds: Annotated[
        float,
        Field(
            ge=0,
            description="How long ranks on several nodes wait for each other before they raise; "
            "0: two fifths of a lease",
        ),
    ] = 0.0
    max_attempts: Annotated[
        int, Field(ge=1, description="How many attempts of a run may be killed before it fails")
    ] = 10
    max_stalled_attempts: Annotated[
        int, Field(ge=1, description="How many killed attempts in a row may make no new step")
    ] = 5
    max_cached_checkouts: Annotated[
        int, Field(ge=0, description="How many checkouts of ended commands a data folder keeps")
    ] = 20
    trash_days: Annotated[
        float, Field(ge=0, description="How many days deleted runs can be restored")
    ] = 7.0
    stop_grace_seconds: Annotated[
        float, Field(gt=0, description="Time that a stopping worker gives its runs to checkpoint")
    ] = 30.0

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, text: str) -> str:
        for each in filter(None, map(str.strip, text.split(","))):
            try:
                ip_network(each)
            except ValueError as error:
                message = f"{each!r} is none; allowed: addresses or networks, as 10.0.0.0/8"
                raise PydanticCustomError("proxies", "{message}", {"message": message}) from error
        return text

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, text: str) -> str:
        if text and not re.fullmatch(r"https?://[^/?#\s]+(/[\w.~-]+)*/?", text):
            message = {"message": "allowed: http:// or https://, a host, and a path of plain names"}
            raise PydanticCustomError("public_url", "{message}", message)
        return text

    @field_validator("run_users")
    @classmethod
    def _check_users(cls, text: str) -> str:
        first, _, last = text.partition("-")
        if text and not 0 <= int(last) - int(first) < MOST_USERS:
            message = {"message": f"allowed: from a number to one not below, {MOST_USERS} at most"}
            raise PydanticCustomError("users", "{message}", message)
        return text

    @field_validator("slurm_options")
    @classmethod
    def _check_options(cls, text: str) -> str:
        try:
            shlex.split(text)
        except ValueError as error:
            message = {"message": f"{error}; allowed: words as a shell reads them"}
            raise PydanticCustomError("options", "{message}", message) from error
        return text

    @field_validator(*NEEDED_BY)
    @classmethod
    def _check_needed(cls, text: str, info: ValidationInfo) -> str:
        placement = NEEDED_BY[str(info.field_name)]
        if not text and info.data.get("placement") == placement:
            message = {"message": f"HALFSTEP_PLACEMENT={placement} needs it"}
            raise PydanticCustomError("needed", "{message}", message)
        return text

    @model_validator(mode="after")
    def _fill(self) -> Self:
        self.data = self.data.resolve()
        if not self.database_url:
            self.database_url = f"sqlite:///{self.data / 'halfstep.db'}"
        # The bare name means SQLAlchemy's default driver, psycopg 2, which is not the one we ship.
        if self.database_url.startswith(("postgresql://", "postgres://")):
            self.database_url = f"postgresql+psycopg://{self.database_url.split('://', 1)[1]}"
        return self

    @classmethod
    def read(cls) -> Self:
        """Read the environment. Raises Invalid, naming each variable, its value and the fault."""
        try:
            return cls()
        except ValidationError as error:
            wrong = error.errors()
            raise Invalid(
                {f"HALFSTEP_{e['loc'][0]}".upper(): f"{e['input']!r}: {e['msg']}" for e in wrong}
            ) from error

    @property
    def address(self) -> str:
        """Return what links begin with that leave the server."""
        return self.public_url.rstrip("/") or f"http://{self.host}:{self.port}"

    @property
    def path_prefix(self) -> str:
        """Return the path below which people open the server: "/halfstep", or "" for the root."""
        return urlsplit(self.public_url).path.rstrip("/")

    @property
    def per_user(self) -> dict[str, int]:
        """Return what may train at once for one user, as claims take it."""
        return {"runs_per_user": self.runs_per_user, "devices_per_user": self.devices_per_user}

    @property
    def proxies(self) -> list[str]:
        """Return the addresses and networks of proxies that are believed."""
        return [each for each in map(str.strip, self.trusted_proxies.split(",")) if each]

    @property
    def secrets_key(self) -> Path:
        """Return where the key of secrets lies, or shall lie once there is one."""
        return self.secrets_key_file or self.data / "secrets.key"

    @property
    def weights_folders(self) -> list[Path]:
        """Return the folders below which a run may name weights."""
        named = filter(None, map(str.strip, self.weights_dirs.split(",")))
        return [Path(each).expanduser().resolve() for each in named]

    @property
    def write_folders(self) -> list[Path]:
        """Return the folders outside of its own that a run in the sandbox may write."""
        named = filter(None, self.write_roots.split(os.pathsep))
        return [Path(each).expanduser().resolve() for each in named]

    @property
    def run_user_range(self) -> range:
        """Return the numbers of the users that runs have to themselves, if any."""
        first, _, last = self.run_users.partition("-")
        return range(int(first), int(last) + 1) if first else range(0)

    @property
    def private_paths(self) -> list[Path]:
        """Return what no run may read: all data, the database's files and the key of secrets."""
        paths = [self.data, self.secrets_key]
        url = make_url(self.database_url)
        if url.get_backend_name() == "sqlite" and url.database:
            file = Path(url.database).resolve()
            paths += [file.with_name(file.name + end) for end in ("", "-wal", "-shm", "-journal")]
        if self.storage_url.startswith("file://"):
            paths.append(Path(url2pathname(urlsplit(self.storage_url).path)))
        return [each.resolve() for each in paths]

    def run_folder(self, run_id: int, node: int = 0) -> Path:
        """Return where a run's job, spool and checkpoints lie on the machine that trains it.

        node: of several, which may share a disk.
        """
        folder = self.data / "runs" / str(run_id)
        return folder / f"node-{node}" if node else folder
