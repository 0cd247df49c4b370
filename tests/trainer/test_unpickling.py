"""No file of a user runs code: pickles are read for their tensors, or rejected."""

import ast
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from tests.marks import looped
from tests.trainer.conftest import Regression
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.checkpoints.weight_files import WeightsError

OURS = (
    "app",
    "benchmarks",
    "db",
    "deploy",
    "examples",
    "halfstep",
    "migrations",
    "trainer",
    "worker",
)
#: Modules whose functions create objects from bytes.
TRUSTING = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
READING = {"load", "loads", "Unpickler", "open"}
SWITCHES = {"weights_only", "allow_pickle"}
#: Between processes of a run, by a pipe; and a reader that makes only tensors.
KNOWN = {
    ("trainer/data/examples.py", "pickle.loads"),
    ("trainer/checkpoints/shard_files.py", "pickle.Unpickler"),
}


class Evil:
    """A class that would write a file if a pickle was trusted."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.fixture
def evil(tmp_path):
    """Return a torch.save file with code, and the file that the code would write."""
    path, trace = tmp_path / "step-00000002.pt", tmp_path / "executed"
    torch.save({"format": 1, "state_dict": {"0.weight": torch.ones(1)}, "more": Evil(trace)}, path)
    torch.load(path, weights_only=False)
    assert trace.exists()  # it would
    trace.unlink()
    return path, trace


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_checkpoint_with_code_is_rejected(run_loop, evil, is_checked):
    """A checkpoint with code is rejected even if its digest matches."""
    path, trace = evil
    with pytest.raises(CheckpointError, match=r"step-00000002\.pt cannot be read"):
        run_loop(Regression, resume=path, is_checked=is_checked)
    assert not trace.exists()


def test_weights_with_code_are_rejected(run_loop, evil):
    """Weights with code are rejected, from a path or an upload."""
    path, trace = evil
    uploaded = {"upload": f"{sha256(path.read_bytes()).hexdigest()}/{path.name}"}
    for wanted, brought in (({"path": str(path)}, None), (uploaded, {"": path})):
        with pytest.raises(WeightsError, match=r"step-00000002\.pt .* holds more than tensors"):
            run_loop(Regression, {"weights": wanted}, weights=brought)
        assert not trace.exists()


@pytest.mark.slow
def test_no_source_of_ours_trusts_a_pickle():
    """No source trusts a pickle: torch.load has weights_only=True, and nothing else unpickles."""
    sources = [path for folder in OURS for path in Path(folder).rglob("*.py")]
    assert len(sources) > 200
    found = {(str(path), name) for path in sources for name in trusting(path.read_text())}
    assert found == KNOWN


@looped(
    "source",
    [
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch as t\nt.load(path, weights_only=wish)",
        "from torch import load\nload(path)",
        "import torch\nread = torch.load\nread(path)",
        "import pickle\npickle.load(file)",
        "import pickle as p\np.loads(data)",
        "from pickle import loads\nloads(data)",
        "import joblib\njoblib.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
    ],
)
def test_what_trusts_a_pickle_is_found(source):
    """Every way to load a pickle without weights_only is detected, under any name."""
    assert list(trusting(source))
    assert not list(trusting("import torch\ntorch.load(path, weights_only=True)"))


def trusting(source):
    """Yield the calls in a source that load pickles as code."""
    if not any(word in source for word in (*TRUSTING, "load")):
        return
    tree = ast.parse(source)
    modules, sound = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if (node.module == "torch" and each.name == "load") or (
                    node.module in TRUSTING and each.name in READING
                ):
                    yield f"{node.module}.{each.name}"
        elif isinstance(node, ast.Call):
            named = (each for each in node.keywords if each.arg in SWITCHES)
            given = {each.arg: ast.unparse(each.value) for each in named}
            if given.get("weights_only") == "True":
                sound.add(node.func)
            if given.get("allow_pickle", "False") != "False":
                yield f"{ast.unparse(node.func)}, allow_pickle"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module in TRUSTING and node.attr in READING:
                yield f"{module}.{node.attr}"
            if module == "torch" and node.attr == "load" and node not in sound:
                yield "torch.load"
