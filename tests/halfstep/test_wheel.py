"""Both wheels, each in a bare environment without the sources."""

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.journeys.installation import Admin, until_some
from tests.site import up

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.extended,
    pytest.mark.xdist_group("wheel"),  # one process builds and installs it, once
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel for a user's own project."""
    return build("halfstep", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with this wheel and its dependencies."""
    return install(tmp_path_factory.mktemp("bare"), wheel)


@pytest.fixture(scope="module")
def service(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with server and worker."""
    built = build(".", tmp_path_factory.mktemp("service-wheel"))
    return install(tmp_path_factory.mktemp("service"), wheel, f"{built}[worker]")


def build(source: str, folder: Path) -> Path:
    """Build a wheel from a copy, so that nothing is left in the source."""
    without = shutil.ignore_patterns("*.egg-info", "build", "__pycache__", ".*")

    def left_out(parent: str, names: list[str]) -> set[str]:
        own = {"data", "dist"} if Path(parent) == ROOT else set()  # of an installation
        return set(without(parent, names)) | own

    shutil.copytree(ROOT / source, folder / "source", ignore=left_out)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, folder / "source")
    [built] = folder.glob("*.whl")
    return built


def install(folder: Path, *requirements: str | Path) -> Path:
    """Return the Python of a new virtual environment with these packages and their dependencies."""
    venv.create(folder)
    interpreter = folder / "bin" / "python"
    pinned = ("--constraint", ROOT / "constraints.txt")
    run(*pip(interpreter), "install", "--no-compile", *pinned, *requirements)
    return interpreter


def pip(interpreter: Path) -> tuple[str | Path, ...]:
    """Run our own pip for another environment, which needs no pip."""
    return sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"


def run(*command: str | Path, folder: Path | None = None) -> str:
    """Return the output of a command; fail with its stderr."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_one_import_name(wheel: Path) -> None:
    """The client's wheel has one import name, and hides no `trainer`, `app` or `db` of a user."""
    with zipfile.ZipFile(wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()}
        modules = {name for name in files.namelist() if name.startswith("halfstep/")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"halfstep"}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "halfstep").rglob("*.py")}
    assert modules == sources | {"halfstep/py.typed"}


def test_wheel_brings_what_a_watched_script_needs(python: Path) -> None:
    """The wheel requires exactly the listed dependencies, neither torch nor a server."""
    listed = json.loads(run(*pip(python), "list", "--format", "json"))
    http_client = {"httpx2", "httpcore2", "anyio", "h11", "idna", "truststore", "typing_extensions"}
    typer = {"typer", "annotated-doc", "shellingham", "pydantic", "pydantic_core"}
    typer |= {"annotated-types", "typing-inspection"}  # of pydantic
    rich = {"rich", "markdown-it-py", "mdurl", "Pygments"}
    assert {each["name"] for each in listed} == {
        *("halfstep", "msgspec", "numpy", "psutil", "pyte", "wcwidth"),
        *http_client,
        *typer,
        *rich,
    }


def test_import_loads_nothing_heavy(python: Path, tmp_path: Path) -> None:
    """`import halfstep` loads neither torch, numpy, the HTTP client nor typer."""
    code = "import sys, halfstep; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = set(run(python, "-c", code, folder=tmp_path).split())
    assert "halfstep" in loaded
    assert not loaded & {"torch", "numpy", "httpx2", "asyncio", "pydantic", "typer", "rich"}


def test_the_command_exists_with_only_the_client(python: Path, tmp_path: Path) -> None:
    """With only the client installed the command works, and lists no service commands."""
    shown = run(python.with_name("halfstep"), "--help", folder=tmp_path)
    assert "COMMAND" in shown
    assert "submit" in shown
    assert "migrate" not in shown


def test_own_modules_of_a_project_are_its_own(python: Path, tmp_path: Path) -> None:
    """A project's own `trainer`, `worker`, `app` and `db` are imported, not the service's."""
    for name in ("app", "db", "trainer", "worker"):
        (tmp_path / f"{name}.py").write_text("OWN = True\n")
    code = "import halfstep.telemetry.spool, app, db, trainer, worker; print(app.OWN, db.OWN)"
    assert run(python, "-c", code, folder=tmp_path).split() == ["True", "True"]


TWO_LINES = """
import sys
sys.path.append(sys.argv[1])  # where torch is
import torch
import halfstep
net = torch.nn.Linear(2, 1)
halfstep.watch(net)
optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
for _ in range(7):
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_script_and_a_service_from_wheels(python: Path, service: Path, tmp_path: Path) -> None:
    """`halfstep up` in one environment shows a watched script of another one, and trains."""
    bare = {"HALFSTEP_DATA": str(tmp_path / "data"), "PYTHONSAFEPATH": "1"}
    with up(signal.SIGTERM, service, **bare) as (_, link):
        admin = Admin.sign_in(link)
        with closing(admin.browser), closing(admin.client):
            environment = {**os.environ, **admin.environment}
            words = (python, "-c", TWO_LINES, str(Path(torch.__file__).parents[1]))
            done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
            assert done.returncode == 0, done.stderr
            [watched] = until_some(lambda: admin.client.runs("status:finished"))
            assert (watched["source"], watched["step"]) == ("watch", 7)
            until_some(admin.client.recipes)
            trained = admin.client.submit("digits", {"training": {"steps": 3}})
            ended = admin.client.wait(trained["id"])
            assert ended["status"] == "finished", ended["error"]
