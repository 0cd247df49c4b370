"""A Slurm for tests: its real daemons, with two nodes on this machine, below a folder."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.site import free_port, until

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n0", "n1")


def is_installed() -> bool:
    return all(shutil.which(each, path=f"{os.environ['PATH']}:/usr/sbin") for each in DAEMONS)


class Slurm:
    """Slurm's daemons, each of which is ended by its PID."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.config)}

    def start(self) -> None:
        folder, host = self.folder, socket.gethostname()
        ports = [free_port() for _ in range(3)]
        nodes = "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=1000\n"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        for each in ("state", "munge", *(f"spool-{name}" for name in NODES)):
            (folder / each).mkdir(mode=0o700)
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o400)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self.config.write_text(
            f"ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser={_user()}\n"
            f"SlurmdUser={_user()}\nSlurmctldPort={ports[0]}\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmctldLogFile={folder}/slurmctld.log\n"
            f"StateSaveLocation={folder}/state\nAuthType=auth/munge\nCryptoType=crypto/munge\n"
            f"AuthInfo=socket={folder}/munge/socket\nMpiDefault=none\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nReturnToService=2\n"
            "SchedulerType=sched/backfill\nSelectType=select/cons_tres\n"
            f"SelectTypeParameters=CR_Core\nSlurmdSpoolDir={folder}/spool-%n\n"
            f"SlurmdPidFile={folder}/slurmd-%n.pid\nSlurmdLogFile={folder}/slurmd-%n.log\n"
            "JobRequeue=0\nKillWait=20\nSlurmdTimeout=10\n"
            f"{nodes}PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE "
            "State=UP OverSubscribe=NO\n"
        )
        munge = folder / "munge"
        files = [f"--{each}-file={munge / each}" for each in ("key", "pid", "log", "seed")]
        self._launch("munged", "-F", "--force", f"--socket={munge / 'socket'}", *files)
        until((munge / "socket").exists)
        self._launch("slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(len(NODES)))

    def start_node(self, name: str) -> None:
        self._launch("slurmd", "-D", "-N", name, key=name)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon as in a crash; its jobs continue."""
        self.processes[name].kill()
        self.processes[name].wait()

    def ask(self, *words: str) -> str:
        environment = {**os.environ, **self.environment}
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout

    def _launch(self, *words: str, key: str = "") -> None:
        path = f"{os.environ['PATH']}:/usr/sbin"
        with (self.folder / f"{key or words[0]}.out").open("wb") as output:
            self.processes[key or words[0]] = subprocess.Popen(
                words,
                env={**os.environ, "PATH": path, **self.environment},
                stdout=output,
                stderr=output,
            )

    def stop(self) -> None:
        for job in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", "--signal=KILL", job)
        until(lambda: not self.ask("squeue", "-h", "-o", "%i").split())
        for process in reversed(self.processes.values()):
            process.terminate()
            process.wait()


def _user() -> str:
    return "root" if os.getuid() == 0 else os.environ.get("USER", "root")


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    made = Slurm(folder)
    folder.mkdir(parents=True)
    try:
        made.start()
        yield made
    finally:
        made.stop()
