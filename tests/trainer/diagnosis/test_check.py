"""Checks of broken recipes: for each finding, the template with one mistake."""

from functools import partial
from pathlib import Path

import pytest

from halfstep.check import session
from halfstep.shadow.sanitizer import Sanitizer
from tests.marks import extended, sampled
from trainer.diagnosis import recipe_checks
from trainer.diagnosis.check import main
from trainer.recipes import gpt

pytestmark = pytest.mark.slow

TEMPLATE = Path("docs/how-to/recipe_template.py")
STEP = 'yield Loss(F.mse_loss(outputs, targets), optimizer="adamw")'
OUTPUTS = 'outputs = self.modules["model"](inputs).squeeze(1)  # (B,), fp16 in an fp16 run'
BATCH = "rows = indices.to(self.device, non_blocking=True)"
PENALTY = """inputs = inputs.clone().requires_grad_()
        outputs = self.modules["model"](inputs).squeeze(1)
        scale = {scale}
        [inner] = torch.autograd.grad(outputs.float().mean() * scale, inputs, create_graph=True)
        penalty = ((inner * {inverse}).norm(dim=1) - 1).square().mean()
        yield Loss(F.mse_loss(outputs, targets) + penalty, optimizer="adamw")"""


def run_check(tmp_path, capsys, *changes, arguments=()):
    """Check the template after these changes; return exit code and text."""
    text = TEMPLATE.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "mine.py"
    file.write_text(text)
    code = 0
    try:
        main(str(file), arguments)
    except SystemExit as left:
        code = left.code
    return code, capsys.readouterr().out


def line_of(tmp_path, part):
    """Return the line number of the first line in the checked file that contains a text."""
    lines = (tmp_path / "mine.py").read_text().splitlines()
    return next(f"mine.py:{n}" for n, line in enumerate(lines, 1) if part in line)


def test_the_template_passes(tmp_path, capsys):
    """The recipe template has no errors or warnings, and its steps are shown by precision."""
    code, text = run_check(tmp_path, capsys)
    assert code == 0
    assert "No mistakes found." in text
    assert "error" not in text
    assert "warning" not in text
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["fp32", "fp16", "bf16"]


@pytest.mark.parametrize("name", ["digits", "wgan-gp", *extended(["gpt"])])
def test_recipes_that_come_along_pass(capsys, monkeypatch, name):
    """Built-in recipes have no findings."""
    monkeypatch.setattr(gpt, "SAMPLE_BYTES", 8)  # of 400, which every evaluation writes
    monkeypatch.setattr(gpt, "EVALUATION_WINDOWS", 4)  # of 64
    settings = {
        "gpt": ["recipe.width=32", "recipe.context=16", "recipe.layers=1", "recipe.max_bytes=65536"]
    }.get(name, [])
    main(name, settings)
    text = capsys.readouterr().out
    assert "error" not in text
    assert "warning" not in text


ERRORS = {
    "an exit": (STEP, "raise SystemExit(3)", "raise SystemExit", "SystemExit: 3"),
    "loss outside autocast": (
        STEP,
        """with torch.autocast(self.device.type, enabled=False):
            yield Loss(F.mse_loss(outputs, targets.to(outputs.dtype)), optimizer="adamw")""",
        "F.mse_loss(outputs",
        "mse_loss is computed outside autocast, in float16",
    ),
    "loss in half precision": (
        STEP,
        'yield Loss((outputs - targets.to(outputs.dtype)).relu().max(), optimizer="adamw")',
        None,
        'the loss of "adamw" is torch.float16',
    ),
    "everything outside autocast": (
        OUTPUTS,
        """with torch.autocast(self.device.type, enabled=False):
            outputs = self.modules["model"](inputs).squeeze(1)""",
        None,
        "every matrix product ran with autocast off: fp16 has no effect",
    ),
    "forward in batch": (
        "return self.train_inputs[rows], self.train_targets[rows]",
        'return self.modules["model"](self.train_inputs[rows]), self.train_targets[rows]',
        'return self.modules["model"]',
        "batch() computes with weights, but runs outside autocast",
    ),
    "own autocast that is always on": (
        OUTPUTS,
        """with torch.autocast(self.device.type, dtype=torch.bfloat16):
            outputs = self.modules["model"](inputs).squeeze(1)""",
        'outputs = self.modules["model"]',
        "the recipe enables autocast in an fp32 run",
    ),
    "sum for a mean": (
        STEP,
        'yield Loss(F.mse_loss(outputs, targets, reduction="sum"), optimizer="adamw")',
        None,
        'the loss of "adamw" doubles with the batch size, so it is a sum',
    ),
    "divided twice": (
        STEP,
        "loss = F.mse_loss(outputs, targets) / self.accumulation\n"
        '        yield Loss(loss, optimizer="adamw")',
        None,
        'the loss of "adamw" is divided by training.accumulation_steps',
    ),
    "scaled twice": (
        STEP,
        'yield Loss(self.scaler.scale(F.mse_loss(outputs, targets)), optimizer="adamw")',
        None,
        "training_step scales the loss, which the loop does",
    ),
    "fp16 parameters": (
        "        ).to(device)\n        self.modules",
        "        ).to(device).half()\n        self.modules",
        None,
        "leave the model in torch.float32 (no .half())",
    ),
    "steps by itself": (
        STEP,
        """loss = F.mse_loss(outputs, targets)
        loss.backward()
        self.optimizers["adamw"].step()
        yield Loss(F.mse_loss(self.modules["model"](inputs).squeeze(1), targets), "adamw")""",
        "loss.backward()",
        "training_step calls backward() or changes weights or gradients itself",
    ),
    "weights written to before the loss": (
        STEP,
        """with torch.no_grad():
            self.modules["model"][2].bias.add_(1)
        yield Loss(F.mse_loss(outputs, targets), "adamw")""",
        None,
        "training_step calls backward() or changes weights or gradients itself",
    ),
    "backward after the yield": (
        STEP,
        f"""{STEP}
        F.mse_loss(self.modules["model"](inputs).squeeze(1), targets).backward()""",
        "targets).backward()",
        "training_step calls backward() or changes weights or gradients itself",
    ),
    "a step after the yield": (
        STEP,
        f"""{STEP}
        self.optimizers["adamw"].step()""",
        'self.optimizers["adamw"].step()',
        "training_step calls backward() or changes weights or gradients itself",
    ),
    "a scaler of its own": (
        STEP,
        """self.own = torch.amp.GradScaler(self.device.type, init_scale=1.0)
        yield Loss(F.mse_loss(outputs, targets), optimizer="adamw")""",
        "self.own =",
        "the recipe's own GradScaler is enabled in an fp32 run",
    ),
    "a penalty that is not unscaled": (
        STEP,
        PENALTY.format(scale="self.scaler.scale(torch.ones(()))", inverse="1"),
        "penalty = ",
        "is computed from values that are still multiplied by the loss scale",
    ),
    "a hook that clips scaled gradients": (
        'self.modules = {"model": model}',
        """self.modules = {"model": model}
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))""",
        "gradient.clamp(-1, 1)",
        "computes with gradients that are still multiplied by the loss scale",
    ),
    "a hook on an activation": (
        STEP,
        f"""outputs.register_hook(lambda gradient: gradient / gradient.norm())
        {STEP}""",
        "outputs =",
        "computes with gradients that are still multiplied by the loss scale",
    ),
    "no deterministic kernel on CUDA": (
        STEP,
        'yield Loss(outputs.cumsum(0).square().mean(), optimizer="adamw")',
        "outputs.cumsum",
        "cumsum of floating-point numbers has no deterministic implementation on CUDA",
    ),
    "a tensor left on the CPU": (
        STEP,
        """weights = torch.linspace(0.5, 1.5, len(inputs))
        yield Loss((outputs * weights - targets).square().mean(), optimizer="adamw")""",
        "outputs * weights",
        "a tensor or a module of the step is on the CPU",
    ),
    "a module left on the CPU": (
        "        ).to(device)\n        self.modules",
        "        )\n        self.modules",
        None,
        'module "model" is on the CPU',
    ),
    "momentum that is dropped": (
        STEP,
        f"""self.optimizers["adamw"].state.clear()
        {STEP}""",
        None,
        'optimizer "adamw" is a fused SGD whose momentum was deleted',
    ),
    "item": (
        STEP,
        """loss = F.mse_loss(outputs, targets)
        self.last = loss.item()
        yield Loss(loss, optimizer="adamw")""",
        "self.last = loss.item()",
        "the step reads a value from the device",
    ),
    "cpu": (
        STEP,
        """loss = F.mse_loss(outputs, targets)
        self.last = loss.detach().cpu()
        yield Loss(loss, optimizer="adamw")""",
        "self.last = loss.detach()",
        "the step reads a value from the device",
    ),
    "if on a tensor": (
        STEP,
        """loss = F.mse_loss(outputs, targets)
        if loss > 100:
            loss = loss * 0
        yield Loss(loss, optimizer="adamw")""",
        "if loss > 100",
        "the step reads a value from the device",
    ),
    "no scalar": (
        STEP,
        'yield Loss(F.mse_loss(outputs, targets, reduction="none"), optimizer="adamw")',
        None,
        'the loss of "adamw" has shape (8,): yield a scalar',
    ),
    "log of what fp16 flushes": (
        STEP,
        """chance = torch.sigmoid(outputs - 20)
        yield Loss(-torch.log(chance).mean(), optimizer="adamw")""",
        "torch.log",
        "a value that is 3.291e-9 in fp32 becomes 0 by rounding in `torch.sigmoid(outputs - 20)`",
    ),
    "division by what fp16 flushes": (
        STEP,
        """chance = torch.sigmoid(outputs - 20).float()
        yield Loss((1 / chance).mean(), optimizer="adamw")""",
        "1 / chance",
        "a value that is 3.291e-9 in fp32 becomes 0 by rounding in `torch.sigmoid(outputs - 20)`",
    ),
    "an epsilon that fp16 rounds to 0": (
        STEP,
        """chance = torch.relu(outputs - 20) + 1e-8
        yield Loss(-torch.log(chance).mean(), optimizer="adamw")""",
        "torch.log",
        "a value that is 1e-8 in fp32 becomes 0 by rounding in `torch.relu(outputs - 20) + 1e-8`",
    ),
    "a forward pass that overflows": (
        OUTPUTS,
        'outputs = self.modules["model"](inputs * 1e6).squeeze(1) / 1e6',
        'self.modules["model"](inputs * 1e6)',
        "is 3.262e6, beyond fp16's 65,504; in fp32 this step's loss is 0.5628",
    ),
    "binary cross-entropy": (
        STEP,
        """chance = torch.sigmoid(outputs.float())
        yield Loss(F.binary_cross_entropy(chance, (targets > 0).float()), optimizer="adamw")""",
        "F.binary_cross_entropy(chance",
        "Use binary_cross_entropy_with_logits",
    ),
    "a custom Function that does not cast": (
        OUTPUTS,
        """outputs = Product.apply(inputs, self.modules["model"][0].weight).mean(dim=1)""",
        "x.T @ gradient",
        "RuntimeError: expected m",
    ),
    "a loader with an order of its own": (
        BATCH,
        """if not hasattr(self, "order"):
            self.order = iter(torch.randperm(self.train_size).tolist())
        rows = torch.tensor([next(self.order) for _ in indices])""",
        None,
        "batch() returns other examples for the same indices",
    ),
    "a counter that is not in the state": (
        STEP,
        """self.calls = getattr(self, "calls", 0) + 1
        yield Loss(F.mse_loss(outputs, targets) / self.calls, optimizer="adamw")""",
        None,
        "4 steps in a row, and 2, a resume and 2 more, differ in modules.model.0.weight",
    ),
    "a state that cannot be saved": (
        "    def evaluate(self)",
        """    def state_dict(self):
        return {"calls": {1, 2}}

    def evaluate(self)""",
        None,
        "it cannot be resumed: RecipeError: Recipe.state_dict()['calls'] is a set",
    ),
    "metrics that are tensors": (
        "1 - unexplained.item()",
        "1 - unexplained",
        None,
        'evaluate returns Tensor as "val/r2": return a float, with .item()',
    ),
}  # fmt: skip
BESIDES = {
    "momentum that is dropped": [("torch.optim.AdamW(", "torch.optim.SGD(momentum=0.9, params=")],
    "divided twice": [
        (
            "        self.device = device\n",
            "        self.device = device\n        self.accumulation = "
            "config.training.accumulation_steps\n",
        )
    ],
    "a custom Function that does not cast": [
        (
            "class DiabetesConfig",
            """class Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x.half() if torch.is_autocast_enabled("cpu") else x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return None, (x.T @ gradient).T


class DiabetesConfig""",
        )
    ],
}


#: Mistakes that have another mistake's message.
ALIKE = {
    *("weights written to before the loss", "backward after the yield", "a step after the yield"),
    *("a hook on an activation", "cpu", "if on a tensor", "a module left on the CPU"),
    *("division by what fp16 flushes", "an epsilon that fp16 rounds to 0"),
}


@pytest.mark.parametrize("mistake", sampled(ERRORS, ERRORS.keys() - ALIKE))
def test_a_mistake_is_named(tmp_path, capsys, mistake):
    """Each mistake is an error in words, with its line if possible, and the exit code is 1."""
    old, new, part, message = ERRORS[mistake]
    code, text = run_check(tmp_path, capsys, (old, new), *BESIDES.get(mistake, []))
    assert code == 1
    [line] = [line for line in text.splitlines() if message in line]
    assert line.startswith("error: ")
    if part:
        assert line.startswith(f"error: {line_of(tmp_path, part)}: ")


WARNINGS = {
    "shapes": ("int = Field(64", "int = Field(60", "multiples of 8: model.0 (10 to 60), model.2"),
    "no metrics": ('return {"val/r2": 1 - unexplained.item()}', "return {}", "returns no metrics"),
    "a metric that is NaN": (
        "1 - unexplained.item()", "float('nan')", 'evaluate returns nan as "val/r2"'
    ),
    "no gradient": (
        OUTPUTS,
        'outputs = self.modules["model"](inputs).squeeze(1).detach() '
        '+ self.modules["model"][2].bias',
        'parameter model.0.weight of "adamw" received no gradient',
    ),
    "no optimizer": (
        "model.parameters(), lr", "model[2].parameters(), lr",
        "parameter model.0.weight is in no optimizer",
    ),
    "DataParallel": (
        'self.modules = {"model": model}', 'self.modules = {"model": nn.DataParallel(model)}',
        'module "model" is a DataParallel',
    ),
    "not fused": ("fused=config.training.fused", "fused=False", '"adamw" is not fused'),
    "a name that cannot be recorded": (
        STEP, 'self.log({"x" * 400: 1.0})\n        ' + STEP, "a logged value is dropped: ",
    ),
    "indices that decide nothing": (BATCH, "rows = torch.arange(8)", "ignores its indices"),
    "cannot be made on meta": (
        "self.train_size = TRAIN_SIZE",
        "self.train_size = TRAIN_SIZE if inputs.to(device).sum().item() else 0",
        "device synchronizations were not checked",
    ),
}  # fmt: skip


#: Warnings that do not affect each other.
TOGETHER = ("shapes", "no metrics", "not fused", "a name that cannot be recorded")


@pytest.mark.parametrize(
    "doubts", [TOGETHER, *((name,) for name in WARNINGS if name not in TOGETHER)], ids=", ".join
)
def test_a_doubt_is_a_warning(tmp_path, capsys, doubts):
    """A possible mistake is a warning, and the exit code stays 0."""
    changes = [WARNINGS[each][:2] for each in doubts]
    code, text = run_check(tmp_path, capsys, *changes)
    assert code == 0
    warnings = [line for line in text.splitlines() if line.startswith("warning: ")]
    for message in (WARNINGS[each][2] for each in doubts):
        assert any(message in line for line in warnings)
    assert text.splitlines()[-1] == "No errors. Review the warnings above."


@pytest.mark.parametrize("guard", ["+ 1e-6", *extended([".clamp(min=1e-6)"])])
def test_a_value_kept_away_from_zero_is_no_doubt(tmp_path, capsys, guard):
    """A logarithm of a value kept above 0 by a floor that fp16 can represent has no warning."""
    step = f"chance = (torch.sigmoid(outputs) {guard})" if "+" in guard else (
        f"chance = torch.sigmoid(outputs){guard}")  # fmt: skip
    changed = f'{step}\n        yield Loss(-torch.log(chance).float().mean(), optimizer="adamw")'
    code, text = run_check(tmp_path, capsys, (STEP, changed))
    assert code == 0
    assert "warning" not in text


COVERED = """if not hasattr(self, "place"):
            self.place = 0
        order = torch.randperm(self.train_size, generator=torch.Generator().manual_seed(7))
        rows = order[torch.arange(self.place, self.place + len(indices))]
        self.place += len(indices)"""
STATE = """    def state_dict(self):
        return {"place": getattr(self, "place", 0)}

    def load_state_dict(self, state):
        self.place = state["place"]

    def evaluate(self)"""


def test_an_order_of_its_own_that_its_state_covers_is_fine(tmp_path, capsys):
    """A recipe that ignores its indices but saves its own order resumes to the last bit."""
    code, text = run_check(tmp_path, capsys, (BATCH, COVERED), ("    def evaluate(self)", STATE))
    assert code == 0
    assert "warning" not in text


FP32_ON_CUDA = {
    "pow": "outputs.pow(2).mean()",
    "softmax, clamped, and its logarithm": (
        "-torch.stack([outputs, -outputs]).softmax(0).clamp(min=1e-8).log().mean()"
    ),
    "log_softmax and gather": (
        "-torch.stack([outputs, -outputs], 1).log_softmax(1)"
        ".gather(1, (targets > 0).long()[:, None]).mean()"
    ),
    "multilabel_soft_margin_loss": (
        "F.multilabel_soft_margin_loss(outputs[:, None], targets.sign().to(outputs)[:, None])"
    ),
    "a sum that is divided": "outputs.sum() / len(outputs)",
    "types that CUDA promotes": "torch.dot(outputs, targets) / len(outputs)",
}


@pytest.mark.parametrize("loss", sampled(FP32_ON_CUDA, ["pow", "types that CUDA promotes"]))
def test_losses_are_judged_by_cudas_autocast(tmp_path, capsys, loss):
    """Operations that CUDA runs in fp32 are no mistake, though a CPU runs them in fp16."""
    changed = f'yield Loss({FP32_ON_CUDA[loss]}, optimizer="adamw")'
    code, text = run_check(tmp_path, capsys, (STEP, changed))
    assert "error" not in text
    assert "warning" not in text
    assert code == 0


def test_a_recurrent_network_is_no_mistake_in_fp16(tmp_path, capsys):
    """A recurrent network in fp16 is no mistake: CUDA supports it, though a CPU does not."""
    lstm = """model = nn.Sequential(
            Last(10, config.recipe.width), nn.ReLU(), nn.Linear(config.recipe.width, 1)"""
    linear = lstm.replace("Last", "nn.Linear")
    layer = """class Last(nn.LSTM):
    def forward(self, inputs):
        return super().forward(inputs[None])[0][0]


class DiabetesConfig"""
    code, text = run_check(tmp_path, capsys, (linear, lstm), ("class DiabetesConfig", layer))
    assert "error" not in text
    assert code == 0


def test_a_gradient_penalty_as_documented_is_no_mistake(tmp_path, capsys):
    """A gradient penalty that is scaled, and divided by the scale again, is no mistake."""
    one = "torch.ones((), device=inputs.device)"
    penalty = PENALTY.format(scale=f"self.scaler.scale({one})", inverse="(1 / scale)")
    code, text = run_check(tmp_path, capsys, (STEP, penalty))
    assert "error" not in text
    assert code == 0


def test_a_penalty_without_half_precision_needs_no_scale(tmp_path, capsys):
    """A gradient penalty in a region without autocast is in fp32 and needs no scale."""
    step = """penalised, model = inputs.clone().requires_grad_(), self.modules["model"]
        with torch.autocast(self.device.type, enabled=False):
            score = model(penalised).mean()
            [inner] = torch.autograd.grad(score, penalised, create_graph=True)
        yield Loss(F.mse_loss(outputs, targets) + inner.norm(dim=1).mean(), optimizer="adamw")"""
    code, text = run_check(tmp_path, capsys, (STEP, step))
    assert "error" not in text
    assert code == 0


REFUSED_ON_CUDA = {
    "ctc_loss": """F.ctc_loss(
            outputs[:4].view(4, 1, 1).expand(4, 1, 2).log_softmax(2).float(),
            torch.ones(1, 2).long(), torch.full((1,), 4), torch.full((1,), 2)
        )""",
    "grid_sample": """F.grid_sample(
            outputs[:4].view(1, 1, 2, 2), torch.zeros(1, 2, 2, 2), align_corners=False
        ).float().mean()""",
    "adaptive_avg_pool2d": "F.adaptive_avg_pool2d(outputs[:4].view(1, 1, 1, 4), 2).float().mean()",
    "nll_loss (or cross_entropy) of images": """F.cross_entropy(
            outputs[:4].view(1, 2, 1, 2), torch.zeros(1, 1, 2).long()
        )""",
    'pad(mode="reflect")': 'F.pad(outputs[None], (1, 1), mode="reflect").float().mean()',
    "median along a dimension": "outputs.float().median(dim=0).values",
}


@pytest.mark.parametrize(
    "operation",
    ["grid_sample", *extended(each for each in REFUSED_ON_CUDA if each != "grid_sample")],
)
def test_nondeterministic_operations_on_cuda_are_named(tmp_path, capsys, operation):
    """Operations without a deterministic CUDA kernel are errors in a deterministic run."""
    step = f'yield Loss({REFUSED_ON_CUDA[operation]}, optimizer="adamw")'
    message = f"{operation} has no deterministic implementation on CUDA"
    code, text = run_check(tmp_path, capsys, (STEP, step))
    assert code == 1
    assert message in text
    off = ["training.deterministic=false"]
    assert message not in run_check(tmp_path, capsys, (STEP, step), arguments=off)[1]


@pytest.mark.parametrize(
    "value",
    [
        "F.adaptive_avg_pool2d(outputs[:4].view(1, 1, 2, 2), 1)",  # a mean
        *extended(
            [
                'F.interpolate(outputs[:4].view(1, 1, 2, 2), scale_factor=2, mode="bilinear")',
                "outputs * (targets > 0).long().cumsum(0)",  # whole numbers
                "F.cross_entropy(torch.stack([outputs, -outputs], 1), (targets > 0).long())",
            ]
        ),
    ],
)
def test_what_determinism_allows_is_no_mistake(tmp_path, capsys, value):
    """Variants of such operations that have a deterministic kernel are allowed."""
    step = f'yield Loss(({value}).float().mean(), optimizer="adamw")'
    assert "deterministic" not in run_check(tmp_path, capsys, (STEP, step))[1]


def test_an_attack_on_the_inputs_is_no_step_of_its_own(tmp_path, capsys):
    """backward() with inputs, as in an adversarial attack, is no optimizer step."""
    step = f"""attacked = inputs.clone().requires_grad_()
        missed = F.mse_loss(self.modules["model"](attacked).squeeze(1), targets)
        missed.backward(inputs=[attacked])
        outputs = self.modules["model"](inputs + attacked.grad.sign() / 100).squeeze(1)
        {STEP}"""
    code, text = run_check(tmp_path, capsys, (STEP, step))
    assert "error" not in text
    assert code == 0


def test_a_batch_that_is_an_object_is_no_other_each_time(tmp_path, capsys):
    """A batch that is an object does not differ by its address in memory."""
    unpack = """rows, self.kept = batch.rows, batch
        inputs, targets = self.train_inputs[rows], self.train_targets[rows]"""
    code, text = run_check(
        tmp_path,
        capsys,
        ("class DiabetesConfig", "class Rows:\n    rows = None\n\n\nclass DiabetesConfig"),
        (
            "return self.train_inputs[rows], self.train_targets[rows]",
            "batch = Rows()\n        batch.rows = rows\n        return batch",
        ),
        ("inputs, targets = batch", unpack),
    )
    assert "error" not in text
    assert "indices" not in text
    assert code == 0


def test_an_operation_without_a_meta_kernel_is_no_wait(tmp_path, capsys):
    """An operation without a meta kernel is a warning, and not taken for a wait."""
    step = f'yield Loss({REFUSED_ON_CUDA["ctc_loss"]}, optimizer="adamw")'
    off = ["training.deterministic=false"]
    code, text = run_check(tmp_path, capsys, (STEP, step), arguments=off)
    assert code == 0
    assert "reads a value from the device" not in text
    assert "torch has no ctc_loss on its meta device" in text


def test_a_recipe_of_one_batch_size_is_a_doubt(tmp_path, capsys):
    """If a recipe works with one batch size only, the check is skipped with a warning."""
    step = 'yield Loss(F.mse_loss(outputs.view(8), targets), optimizer="adamw")'
    code, text = run_check(tmp_path, capsys, (STEP, step))
    assert code == 0
    place = line_of(tmp_path, "view(8)")
    assert f"warning: {place}: it raised when the check tried other batches: RuntimeError" in text


def test_a_shape_that_the_values_decide_is_a_wait(tmp_path, capsys):
    """An operation whose shape depends on values, such as unique(), waits for the device."""
    step = 'yield Loss(F.mse_loss(outputs, targets) * targets.unique().numel(), "adamw")'
    code, text = run_check(tmp_path, capsys, (STEP, step))
    assert code == 1
    assert "the step reads a value from the device" in text


def test_a_compiler_under_a_path_with_a_space_is_named(tmp_path, capsys, monkeypatch):
    """A compiler in a path with a space is named, since torch would split that path."""
    monkeypatch.setattr(recipe_checks, "TORCH_LIB_PATH", "/home/a b/torch/lib")
    code, text = run_check(tmp_path, capsys, arguments=["training.compile=true"])
    assert code == 1
    assert "-L/home/a b/torch/lib to the linker unquoted, and the path has a space" in text
    assert run_check(tmp_path, capsys)[0] == 0


def test_what_holds_in_one_precision_only_says_so(tmp_path, capsys):
    """A finding in fp16 only is marked with fp16."""
    old, new, _, message = ERRORS["log of what fp16 flushes"]
    _, text = run_check(tmp_path, capsys, (old, new))
    [line] = [line for line in text.splitlines() if message in line]
    assert line.endswith("[fp16]")


def test_what_was_not_examined_is_said(tmp_path, capsys, monkeypatch):
    """Steps without shadows are named, and a lost loss stays an error without an operator."""
    monkeypatch.setattr(session, "Sanitizer", partial(Sanitizer, budget_bytes=1))
    old, new, _, _ = ERRORS["a forward pass that overflows"]
    code, text = run_check(tmp_path, capsys, (old, new))
    assert code == 1
    assert "warning: Not examined: 5 steps with too many operators or too large tensors" in text
    assert "the loss is NaN at step 1 in fp16, 0.5628 in fp32; the operator was not found" in text


def test_settings_reach_the_recipe(tmp_path, capsys):
    """`--set` works as in training; an invalid value is reported in one sentence."""
    assert run_check(tmp_path, capsys, arguments=["recipe.width=8"])[0] == 0
    assert run_check(tmp_path, capsys, arguments=["recipe.width=0"])[0] == 2


def test_a_file_with_two_recipes_wants_a_name(tmp_path, capsys):
    """A single recipe in a file is found by itself; of two the class must be named."""
    two = ("class Diabetes(Recipe):", "class Other(Recipe): ...\n\n\nclass Diabetes(Recipe):")
    assert run_check(tmp_path, capsys, two)[0] == 2
    main(f"{tmp_path}/mine.py:Diabetes")
    assert "No mistakes found." in capsys.readouterr().out
