"""Precision diffs of models of every kind, their report, and models that cannot be diffed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import precision_diff
from halfstep.precision_lab.report import PrecisionReport
from halfstep.telemetry import event_codec
from halfstep.telemetry.events import PrecisionDiff
from tests.halfstep.precision_lab.models_made import (
    MODELS,
    WIDTH,
    Transformer,
    chain,
    classes,
    next_token,
    squared_error,
    tokens,
    vectors,
)
from tests.marks import extended, looped


def diff(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> PrecisionReport:
    """Return the report of one of MODELS."""
    make, make_batch, loss_fn = MODELS[name]
    return precision_diff(make(), make_batch(), loss_fn, dtype, **options)


def test_rows_are_in_the_order_of_calls() -> None:
    """A precision diff lists a module before its children, and parameters last."""
    names = [row.name for row in diff("chain").rows if row.direction == "forward"]
    assert names == ["(loss)", "Sequential", "0", "1", "2", "3"]
    directions = [row.direction for row in diff("transformer").rows]
    first = directions.index("parameter")
    assert set(directions[first:]) == {"parameter"}
    assert {"forward", "backward"} == set(directions[:first])


def test_calls_of_one_module_are_numbered() -> None:
    """A cell that is called four times has four rows, and one of each parameter."""
    rows = diff("recurrent").rows
    calls = [row.call for row in rows if (row.name, row.direction) == ("cell", "forward")]
    assert calls == [1, 2, 3, 4]
    assert [row.call for row in rows if row.name == "cell.weight_hh"] == [0]


def test_tied_weight_is_one_row_with_both_users() -> None:
    """The gradient of a tied weight is the sum of its uses."""
    report = diff("transformer")
    assert report.row("tokens.weight", "parameter").used_by == ["tokens", "head"]
    assert "head.weight" not in {row.name for row in report.rows}


def test_integer_inputs_have_no_gradient_row() -> None:
    """An embedding's input has no gradient, and its weight has one."""
    report = diff("transformer")
    assert report.row("tokens").error == 0
    with pytest.raises(KeyError):
        report.row("tokens", "backward")


def test_functions_between_modules_belong_to_their_container() -> None:
    """Attention without children of its own computes between them, with a local error."""
    report = diff("transformer")
    attention = report.row("blocks.0.attention")
    unit = 2.0**-8
    assert 0.1 * unit < float(attention.local or 0) < 3 * unit
    assert float(attention.inherited or 0) > 0
    assert report.row("(loss)").dtype == "float32"
    # Nothing but the rounding of what its last child hands over.
    assert float(diff("chain").row("Sequential").local or 0) < 0.6 * unit


def test_dropout_is_equal_in_both_passes() -> None:
    """A dropout that drops half of its input has no error but that of rounding."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    report = precision_diff(model, vectors(64), squared_error, torch.float16)
    assert float(report.row("1").error) < 1e-3
    assert float(report.row("1").local or 0) < 1e-3


def test_checkpointing_changes_nothing() -> None:
    """Activation checkpointing does not change the rows of a diff."""
    torch.manual_seed(3)
    plain = diff("transformer")
    torch.manual_seed(3)
    assert repr(diff("checkpointed").rows) == repr(plain.rows)


def test_calls_under_no_grad_have_forward_rows() -> None:
    """A network that runs without gradients has rows of the forward pass only."""

    def distill(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = model[0](batch[0])
        return (model[1](batch[0]) - target).square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    report = precision_diff(model, vectors(), distill, torch.bfloat16)
    assert float(report.row("0").local or 0) > 0
    assert {row.name for row in report.rows if row.direction == "parameter"} == {
        "1.weight",
        "1.bias",
    }


def test_side_channel_is_unknown_not_wrong() -> None:
    """A gradient that enters a module other than by its results leaves its local error unknown."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.inside = x * 3
            return self.linear(x)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0])
        return y.square().mean() + 10 * model[1].inside.square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Remembering())
    report = precision_diff(model, vectors(), loss, torch.bfloat16)
    row = report.row("1", "backward")
    assert row.local is None
    assert "more than its results is used" in str(row.unknown)
    assert not report.suggest()


class Once:
    """An argument that a module can use only once."""

    is_used = False

    def use(self) -> None:
        """Raise RuntimeError at the second use."""
        if self.is_used:
            raise RuntimeError("used twice")
        self.is_used = True


class Own(nn.Module):
    """A layer with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, once: Once | None = None) -> Tensor:
        if once:
            once.use()
        self.strength = self.weight.square().mean()
        y = x @ self.weight
        self.cubes = y.pow(3).mean()
        return y


class OwnTwice(nn.Module):
    """A module that calls its layer several times, where some calls cannot be repeated."""

    def __init__(self, onces: int) -> None:
        super().__init__()
        self.own, self.onces = Own(), onces

    def forward(self, x: Tensor) -> Tensor:
        for number in range(2):
            x = self.own(x, Once() if number < self.onces else None)
        return x


def cubed(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that also uses an attribute that a layer has set."""
    loss: Tensor = squared_error(model, batch) + 20 * model[0].cubes.float()
    return loss


def penalized(model: nn.Module, batch: Any) -> Tensor:
    """Return a loss that contains the gradient of a gradient."""
    x = batch[0].clone().requires_grad_()
    loss = squared_error(model, (x, batch[1]))
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 1e4 * gradient.square().mean()


@looped(
    "make, loss_fn, name",
    [
        (lambda: OwnTwice(1), squared_error, "own.weight"),
        (lambda: OwnTwice(2), squared_error, "own.weight"),
        (lambda: nn.Sequential(Own(), nn.Linear(WIDTH, WIDTH)), cubed, "0.weight"),
        (lambda: nn.Sequential(Own(), nn.Linear(WIDTH, WIDTH)), penalized, "0.weight"),
    ],
)
def test_parameter_with_other_uses_is_unknown(
    make: Callable[[], nn.Module], loss_fn: Any, name: str
) -> None:
    """The local error of a parameter is unknown if some of its uses could not be repeated."""
    report = precision_diff(make(), vectors(), loss_fn, torch.bfloat16)
    row = report.row(name, "parameter")
    assert row.error < 0.05
    assert (row.local, row.inherited) == (None, None)
    assert row.unknown
    assert not report.suggest()


def test_parameter_whose_uses_are_all_repeated_is_known() -> None:
    """A penalty on a weight keeps local errors known, in the loss function and in a module."""
    model = nn.Sequential(Own(), nn.Linear(WIDTH, WIDTH))
    for strength in (0.0, 100.0):
        report = precision_diff(
            model,
            vectors(),
            lambda m, b, strength=strength: squared_error(m, b) + strength * m[0].strength,
            torch.bfloat16,
        )
        row = report.row("0.weight", "parameter")
        assert row.unknown is None
        assert 0 < float(row.local or 0) < 0.02


class Repeating(nn.Module):
    """Returns the same results several times."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.order = order

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = torch.tanh(self.first(x)), torch.tanh(self.second(x)), x
        return tuple(made[index] for index in self.order)


@looped("order", [(0, 0), (0, 1, 0), (0, 0, 0, 1, 1), (2, 0, 2), (0, 2, 0)])
def test_results_that_are_returned_twice_have_local_errors(order: tuple[int, ...]) -> None:
    """Equal results that a module returns twice each have the gradient of their own uses."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        results = model[1](model[0](batch[0]))
        weighted = [(index + 1) * model[2](result) for index, result in enumerate(results)]
        return torch.stack(weighted).float().sum(0).square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Repeating(order), nn.Linear(WIDTH, WIDTH))
    report = precision_diff(model, vectors(), loss, torch.bfloat16)
    assert [row.name for row in report.rows if row.unknown] == []
    assert max(float(row.local or 0) for row in report.rows) < 0.02


class Unusual(nn.Module):
    """A complex parameter, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, sparse=True)
        self.phases = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.out = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.embedding(x).to(torch.complex64) * self.phases
        return self.out(torch.view_as_real(turned).flatten(1))


def test_complex_and_sparse_gradients_are_compared_whole() -> None:
    """Errors of complex and sparse gradients equal those of a plain script."""
    model = Unusual()
    batch = torch.randint(0, 9, (6,)), torch.randint(0, 4, (6,))
    model.zero_grad()
    gradients: list[dict[str, Tensor]] = []
    for is_low in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
            loss = classes(model, batch)
        values = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        gradients.append(dict(zip(names, values, strict=True)))
    report = precision_diff(model, batch, classes, torch.bfloat16)
    for name in ("phases", "embedding.weight"):
        low, right = (
            each[name].to_dense() if each[name].is_sparse else each[name] for each in gradients
        )
        row = report.row(name, "parameter")
        assert row.error == pytest.approx(float((low - right).norm() / right.norm()), rel=1e-5)
        assert row.unknown is None
        assert float(row.local or 0) < 0.02
    assert 0 < report.error < 0.05


def test_gradient_penalty_is_not_blamed_on_a_module() -> None:
    """The gradient of a gradient belongs to no single call, so local errors are unknown."""

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        y = model(x).float().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y.square() * 1e-3 + (gradient.float().norm(dim=1) - 1).square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    report = precision_diff(model, vectors(), penalty, torch.bfloat16)
    assert report.error < 0.05
    assert not report.suggest()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_in_half_precision_is_compared_with_fp32_copies(dtype: torch.dtype) -> None:
    """A half-precision model keeps its weights; the reference uses fp32 copies, no autocast."""
    model = Transformer().to(dtype)
    parameters = list(model.parameters())
    batch = tokens()
    report = precision_diff(model, batch, next_token, dtype)
    assert report.row("norm").dtype == str(dtype).removeprefix("torch.")
    assert 0 < report.error < 0.05
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.dtype == dtype and p.grad is None for p in parameters)


def test_default_scale_is_one_that_does_not_overflow() -> None:
    """If 65,536 overflows, the default loss scale is lowered as a scaler would lower it."""
    model, batch = chain(2), vectors()
    report = precision_diff(model, batch, lambda m, b: 1e3 * squared_error(m, b).sum() * WIDTH)
    assert report.event.scale < 65536
    assert any("the gradients overflow, as a scaler would find" in n for n in report.event.notes)
    assert not report.suggest()
    assert report.error < 1e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_is_measured_uncompiled() -> None:
    """A compiled model has the rows of the uncompiled one, and a note."""
    model, batch = chain(2), vectors()
    plain = precision_diff(model, batch, squared_error, torch.bfloat16)
    compiled = precision_diff(torch.compile(model), batch, squared_error, torch.bfloat16)
    assert repr(compiled.rows) == repr(plain.rows)
    assert any("torch.compile" in note for note in compiled.event.notes)


class Gated(nn.Module):
    """A module that calls a function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate: Callable[[Tensor], Tensor] = lambda x: x * torch.sigmoid(1.7 * x) + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("name", ["gate", *extended(["forward"])])
def test_compiled_code_of_a_model_stays_compiled(name: str, is_warm: bool) -> None:
    """A diff compiles nothing, and the training compiles no more often than without a diff."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def compile_model() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Gated()
        setattr(model, name, torch.compile(getattr(model, name), backend=backend))
        return model, vectors()

    model, batch = compile_model()
    squared_error(model, batch).backward()
    expected = len(graphs)
    assert expected > 0

    model, batch = compile_model()
    graphs.clear()
    if is_warm:
        squared_error(model, batch)
    before = len(graphs)
    report = precision_diff(model, batch, squared_error, torch.bfloat16)
    assert len(graphs) == before
    squared_error(model, batch).backward()
    assert len(graphs) == expected
    plain = Gated()
    plain.load_state_dict(model.state_dict())
    assert repr(report.rows) == repr(
        precision_diff(plain, batch, squared_error, torch.bfloat16).rows
    )
    assert any("torch.compile" in note for note in report.event.notes) == (name == "forward")


def test_many_calls_are_bounded() -> None:
    """Calls beyond a module's first 64 belong to its container."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(70):
                x = torch.tanh(self.cell(x))
            return x

    report = precision_diff(Long(), vectors(4), squared_error, torch.bfloat16)
    assert max(row.call for row in report.rows) == 64
    assert "6 calls of modules beyond the first 64 of each are left out." in report.event.notes
    assert report.row("Long").unknown is None


def test_report_is_an_event_that_can_be_recorded() -> None:
    """A diff's event is valid for the spool, also with infinite errors."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    report = precision_diff(model, vectors(), lambda m, b: squared_error(m, b) * 1e9, scale=65536.0)
    assert report.error == float("inf")
    decoded = event_codec.decode(event_codec.encode(report.event))
    assert isinstance(decoded, PrecisionDiff)
    assert len(decoded.rows) == len(report.rows)
    assert decoded.error == "Infinity"


def test_report_in_a_notebook() -> None:
    """A diff's HTML has a row per call, escapes names, and shows the suggestions."""
    html = diff("chain")._repr_html_()
    assert html.count("<tr>") == len(diff("chain").rows) + 1
    assert "No module needs fp32" in html


def test_frame_needs_pandas() -> None:
    """Without pandas a diff lacks only its data frame."""
    with pytest.raises(ImportError, match="pandas"):
        diff("chain").frame()


@looped(
    "options, message",
    [
        ({"dtype": torch.float32}, "dtype = torch.float32: must be torch.float16 or torch.bfloat1"),
        ({"scale": 0.0}, "scale = 0.0: must be a finite number greater than 0"),
        ({"scale": float("nan")}, "scale = nan: must be"),
        ({"reference": torch.float16}, "reference = torch.float16: must be torch.float32 or"),
        ({"loss_fn": lambda _m, _b: 1.0}, "loss_fn returned float: return the loss as a tensor"),
        ({"loss_fn": lambda m, b: m(b[0])}, r"shape \(16, 32\): return its mean or sum"),
        ({"loss_fn": lambda m, b: m(b[0]).sum().detach()}, "no parameter that requires a gradient"),
        ({"model": nn.ReLU()}, "the model has no parameter that requires a gradient"),
        ({"model": nn.DataParallel(chain(1))}, "DataParallel copies its module: pass model.module"),
        ({"model": chain(1).half(), "dtype": torch.bfloat16}, "weights of type torch.float16; pa"),
    ],
)
def test_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    """An invalid argument of a diff is rejected with the allowed values."""
    given = {"model": chain(1), "batch": vectors(), "loss_fn": squared_error} | options
    with pytest.raises((ValueError, TypeError), match=message):
        precision_diff(**given)


def test_reentrant_checkpointing_is_rejected() -> None:
    """Reentrant checkpointing, which computes gradients only into .grad, is rejected."""

    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.linear, x, use_reentrant=True)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reentrant())
    with pytest.raises(ValueError, match="set use_reentrant=False"):
        precision_diff(model, vectors(), squared_error, scale=1.0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_import_of_halfstep_loads_no_torch() -> None:
    """`import halfstep` loads no torch, and the lab's functions load on first use."""
    code = "import halfstep, sys; assert 'torch' not in sys.modules; halfstep.precision_diff"
    subprocess.run([sys.executable, "-c", f"{code}; halfstep.precision_plan"], check=True)


RANK = """
import sys
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.precision_lab.comparison import UnsupportedModel
from tests.halfstep.precision_lab.models_made import Convolutions, classes, images

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def train(diffs):
    torch.manual_seed(0)
    model = DistributedDataParallel(Convolutions())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        batch = images()
        if diffs and rank == step:  # on one rank only: no collective operation is waited for
            report = halfstep.precision_diff(model, batch, classes, torch.bfloat16)
            assert report.row("first").local and not report.suggest(), report
        optimizer.zero_grad()
        classes(model, batch).backward()
        if diffs and rank == 0:
            halfstep.precision_diff(model, batch, classes, torch.bfloat16)
        optimizer.step()
    return [*model.state_dict().values()]


without, with_diffs = train(False), train(True)
assert all(map(torch.equal, without, with_diffs))

from torch.distributed.fsdp import fully_shard

original = torch.nn.Module.__call__
all_of_it, one_module = fully_shard, lambda model: fully_shard(model.first)
for shard, is_gathered in ((all_of_it, False), (one_module, False), (all_of_it, True)):
    torch.manual_seed(0)
    model, batch = Convolutions(), images()
    shard(model)
    if is_gathered:  # as an evaluation leaves the model
        with torch.no_grad():
            model(batch[0])
        assert not any(hasattr(p, "to_local") for p in model.parameters())
    before = torch.get_rng_state(), model.norm.running_mean.clone()
    for refuse in (
        lambda: halfstep.precision_diff(model, batch, classes, causes=3),
        lambda: halfstep.precision_plan(model, [batch], classes),
    ):
        try:
            refuse()
        except UnsupportedModel as error:
            assert "sharded parameters (FSDP2 or tensor parallelism): a diff needs" in str(error)
        else:
            raise AssertionError("a sharded model was accepted")
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(model.norm.running_mean, before[1])
        assert all(p.grad is None for p in model.parameters())
        assert torch.nn.Module.__call__ is original
    classes(model, batch).backward()  # it trains as before
dist.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.slow
def test_ddp_is_unchanged_and_fsdp_is_rejected(tmp_path: Path) -> None:
    """A diff on one rank of DDP waits for no other, and changes no step.

    FSDP2 is rejected before anything is changed, also of a part of the model.
    """
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    root = Path(__file__).parents[3]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path / "store"],
            cwd=root,
            env={"PYTHONPATH": str(root), "PATH": "", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate()[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
