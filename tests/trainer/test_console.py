import json
import re
from pathlib import Path

import pytest

from halfstep.config_groups import Training
from halfstep.run_config import config_model
from tests.marks import looped
from tests.site import type_train as main
from tests.trainer.conftest import Regression
from trainer.registry import load_recipe

TEMPLATE = (Path(__file__).parents[2] / "docs" / "how-to" / "recipe_template.py").read_text()


@pytest.mark.slow
def test_help_lists_recipes_and_fields(capsys):
    """`--help` lists recipes and settings, with defaults."""
    main(["--help"])
    text = capsys.readouterr().out
    assert "--precision" in text
    for part in ("recipe digits", "recipe mlp", "training.steps = ", "recipe.dropout = 0.0"):
        assert part in text
    assert "scaler.init_scale=16777216.0" in text
    assert f"training.max_grad_norm = {json.dumps(Training().max_grad_norm)}\n" in text


@pytest.mark.parametrize("name", ["digits", "gpt", "wgan-gp"])
def test_help_of_a_recipe_has_its_own_defaults(capsys, name):
    """Help of a recipe has the default of each of its fields, and no other recipe's."""
    main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    result = dict(
        line.strip().split(" = ") for line in lines if re.match(r"  [a-z_.0-9]+ = ", line)
    )
    recipe = load_recipe(name)
    config = config_model(recipe).model_construct().model_dump(mode="json")
    expected = {"precision": config["precision"]} | {
        f"{group}.{field}": value
        for group, fields in config.items()
        if isinstance(fields, dict)
        for field, value in fields.items()
    }
    assert {name: json.loads(text) for name, text in result.items()} == expected
    for group, fields in recipe.defaults.items():
        for field, value in fields.items():
            assert expected[f"{group}.{field}"] == value
    assert not [line for line in lines if line.startswith("recipe ")][1:]


def test_help_of_a_recipe_that_overrides_a_single_value(capsys, monkeypatch):
    """Help of a recipe that overrides only its precision shows it; an unknown name is reported."""
    monkeypatch.setattr("trainer.console.list_recipes", lambda: ["tests.Regression"])
    monkeypatch.setattr("trainer.console.load_recipe", lambda name: Regression)
    main(["--help"])
    text = capsys.readouterr().out
    assert (
        "precision=fp32, training.steps=5, training.batch_size=8, training.max_grad_norm=null"
        in text
    )


def test_help_of_recipes_of_users(capsys, monkeypatch, tmp_path):
    """A user's recipe needs no field descriptions; one with an error affects no other."""
    plain, broken = tmp_path / "plain.py", tmp_path / "broken.py"
    config = "class C(RecipeConfig):\n    width: int = 16\n"
    body = config + 'class R(Recipe):\n    name = "plain"\n    description = "x"\n    Config = C\n'
    plain.write_text(f"from halfstep.recipe import Recipe, RecipeConfig\n{body}")
    broken.write_text("import nowhere_at_all\n")
    names = [f"{plain}:R", f"{broken}:R", "digits"]
    monkeypatch.setattr("trainer.console.list_recipes", lambda: names)
    for words in (["--help"], [names[0], "--help"]):
        main(words)
        text = capsys.readouterr().out
        assert "  recipe.width = 16\n" in text
    main(["--help"])
    text = capsys.readouterr().out
    assert f"recipe {broken}:R cannot be loaded: broken.py:1: ModuleNotFoundError" in text
    assert "recipe digits: " in text


def test_a_runs_history_is_json(capsys):
    """With --json each record is one object per line, with texts for NaN, and errors on stderr."""
    main(["digits", "--precision", "fp16", "--set", "training.steps=30", "--json"])
    result = [
        json.loads(line, parse_constant=pytest.fail)
        for line in capsys.readouterr().out.splitlines()
    ]
    assert {"steps", "scaler", "metric"} <= {each["event"] for each in result}
    drained = [each["step"] for each in result if each["event"] == "steps"]
    assert (drained[-1], drained) == (30, sorted(drained))
    assert result[-1] == {"event": "ended", "status": "finished", "step": 30, "outcome": None}
    for wrong, message in (("training.steps=x", "training.steps"), ("steps", "FIELD=VALUE")):
        with pytest.raises(SystemExit, match="2"):
            main(["digits", "--set", wrong, "--json"])
        assert message in json.loads(capsys.readouterr().err)["error"]
    with pytest.raises(SystemExit, match="2"):
        main(["--json"])
    assert json.loads(capsys.readouterr().err)["error"] == "RECIPE is missing"


def test_a_run_prints_its_story(capsys, tmp_path):
    """A run without a server prints steps, skips, metrics, checkpoint and totals in order."""
    folder = str(tmp_path / "out")
    main(["digits", "--precision", "fp16", "--set", "training.steps=30", "--checkpoints", folder])
    text = capsys.readouterr().out
    for part in (
        "step     30/30  loss ",
        "step      1  skipped: gradients not finite in ",
        "backoff: 2^24 → 2^23",
        "val/accuracy 0.",
        "saved out/step-00000030.pt",
        "Total execution time = ",
        "Max memory used by tensors = ",
        "finished after 30 steps",
    ):
        assert part in text
    lines = [line for line in text.splitlines() if "replayed" not in line]  # by another thread
    steps = [int(found[1]) for line in lines if (found := re.match(r"step +(\d+)", line))]
    assert len(steps) > 10
    assert steps == sorted(steps)
    main(["digits", "--set", "training.steps=31", "--resume", f"{tmp_path}/out/step-00000030.pt"])
    assert "resumed after step 30: training.steps was 30, is 31" in capsys.readouterr().out


@looped(
    "arguments, message",
    [
        (
            ["digit"],
            'there is no recipe "digit"; allowed: digits, erfnet, finetune, gpt, images, mlp',
        ),
        (["digit", "--help"], 'there is no recipe "digit"; allowed: digits'),
        (["digits", "--set", "training.steps=0"], "training.steps is 0: allowed: at least 1"),
        (
            ["digits", "--set", "training.stepz=1"],
            "training.stepz is 1: there is no such field; did you mean training.steps? allowed: ",
        ),
        (
            ["digits", "--set", "recipe.nope=1"],
            "recipe.nope is 1: there is no such field; allowed: learning_rate, width",
        ),
        (
            ["digits", "--set", "lr=1"],
            "lr is 1: there is no such field; did you mean recipe.learning_rate? allowed: ",
        ),
        (["digits", "--set", "nope=1"], "no such field; allowed: precision, training, data,"),
        (
            ["digits", "--set", "training=5"],
            "training is 5: it is a group; allowed: training.FIELD, of steps",
        ),
        (["digits", "--set", "=5"], "--set =5: write it as FIELD=VALUE"),
        (["digits", "--set", "training.=5"], "--set training.=5: write it as FIELD=VALUE"),
        (
            ["digits", "--set", "training=5", "--set", "training.steps=1"],
            "--set training.steps=1: training is already set to 5",
        ),
        (["digits", "--set", "training.steps"], "write it as FIELD=VALUE"),
        (["digits", "--set", "training.batch_size=5000"], "choose at most 1437"),
        (["digits", "--set", "lab.task=precision_plan"], "halfstep recipe plan"),
        (["digits", "--set", "lab.task=precision_diff", "--precision", "fp16"], "lab.task is"),
        (["digits", "--resume", "none.pt"], "none.pt does not exist"),
        (["digits", "--device", "nope"], '--device is "nope"; allowed here: cpu'),
        (["digits", "--device", ""], '--device is ""; allowed here: cpu'),
        (["digits", "--device", "meta"], '--device is "meta"; allowed here: cpu'),
        (["digits", "--device", "cpu:99"], '--device is "cpu:99"; allowed here: cpu'),
    ],
)
def test_a_mistake_is_one_sentence_and_no_traceback(capsys, arguments, message):
    """A usage error prints one sentence without a traceback, and exits with 2."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_for_checkpoints_is_tried_before_training(capsys, tmp_path):
    """A checkpoint folder that cannot be created, or is a file, is refused before training."""
    (tmp_path / "file").write_text("")
    for folder in ("/proc/x", f"{tmp_path}/file", f"{tmp_path}/file/below"):
        with pytest.raises(SystemExit, match="2"):
            main(["digits", "--set", "training.steps=2", "--checkpoints", folder])
        result = capsys.readouterr()
        assert result.out == ""
        assert re.fullmatch(
            rf"error: --checkpoints is {folder}; allowed: a writable folder .*\n", result.err
        )
    with pytest.raises(SystemExit, match="2"):
        main(["digits", "--set", "training.steps=0", "--checkpoints", f"{tmp_path}/new"])
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_artifacts_lie_with_the_checkpoints_of_their_run(capsys, tmp_path):
    """A second run in a folder is rejected, and a resumed one writes its artifacts there."""
    file = tmp_path / "drawing.py"
    file.write_text(
        "from trainer.recipes.digits import Digits\n\n\nclass Drawing(Digits):\n"
        '    name = "drawing"\n\n    def artifacts(self):\n        return {"a.txt": "text"}\n'
    )
    one, other = tmp_path / "one", tmp_path / "other"
    words = [str(file), "--precision", "fp32", "--set", "evaluation.every_steps=2"]
    for folder in (one, other):
        main([*words, "--set", "training.steps=2", "--checkpoints", str(folder)])
        assert [*folder.rglob("a.txt")] == [folder / "artifacts" / "step-00000002" / "a.txt"]
    made = {path.name for path in tmp_path.iterdir()} - {file.name, "__pycache__"}
    assert made == {"one", "other"}
    kept = {path: path.read_bytes() for path in one.rglob("*.*")}
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--set", "training.steps=4", "--checkpoints", str(one)])
    assert f"--checkpoints is {one}, which holds " in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--checkpoints", str(one), "--resume", f"{other}/step-00000002.pt"])
    assert {path: path.read_bytes() for path in one.rglob("*.*")} == kept
    resumed = ["--checkpoints", str(one), "--resume", f"{one}/step-00000002.pt"]
    main([*words, "--set", "training.steps=4", *resumed])
    assert len([*one.glob("artifacts/step-*")]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said", "code", "frames"),
    [
        ("self.modules = ", "1 / 0; self.modules = ", "ZeroDivisionError: division", 3, 1),
        ("yield Loss(", "yield LOSS(", "NameError: name 'LOSS'", 3, 1),
        ("import torch\n", "import torch\nfrom here import (\n", "SyntaxError: ", 1, 0),
        ("import torch\n", "import torch\nimport not_there\n", "ModuleNotFoundError: ", 1, 0),
    ],
)
def test_an_exception_of_a_recipe_is_reported_with_its_line(
    capsys, tmp_path, old, new, said, code, frames
):
    """A recipe's exception prints one line below its file's frames, or one JSON object."""
    file = tmp_path / "mine.py"
    assert old in TEMPLATE
    file.write_text(TEMPLATE.replace(old, new, 1))
    with pytest.raises(SystemExit) as left:
        main([str(file), "--precision", "fp32"])
    assert left.value.code == code
    *traced, line = capsys.readouterr().err.splitlines()
    assert re.match(rf"error: mine\.py:\d+: {re.escape(said)}", line)
    files = [each for each in traced if each.startswith("  File ")]
    assert len(files) == frames
    assert all(str(file) in each for each in files)
    with pytest.raises(SystemExit, match=str(code)):
        main([str(file), "--precision", "fp32", "--json"])
    assert json.loads(capsys.readouterr().err)["error"] == line.removeprefix("error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "factor", "outcome", "why"),
    [
        ("fp32", "torch.nan", "diverged", "the loss is nan"),
        ("fp16", "torch.inf", "no_updates", "all were skipped"),
    ],
)
def test_a_run_that_learned_nothing_ends_as_a_servers_does(
    capsys, tmp_path, precision, factor, outcome, why
):
    """A run that learned nothing ends with exit code 5, and the outcome that a server shows."""
    file = tmp_path / "mine.py"
    file.write_text(TEMPLATE.replace("yield Loss(", f"yield Loss({factor} * ", 1))
    words = [str(file), "--precision", precision, "--set", "training.steps=4"]
    with pytest.raises(SystemExit, match="5"):
        main(words)
    assert capsys.readouterr().out.splitlines()[-1] == f"{outcome} after 4 steps: {why}"
    with pytest.raises(SystemExit, match="5"):
        main([*words, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == {"event": "ended", "status": "finished", "step": 4, "outcome": outcome}


def test_a_metric_of_each_step_is_printed_only_with_the_progress(capsys, tmp_path):
    """Only the latest value of a metric logged in each step is printed; with --json all are."""
    file = tmp_path / "mine.py"
    text = '        self.log({"train/own": 1.0})\n        yield Loss('
    file.write_text(TEMPLATE.replace("        yield Loss(", text, 1))
    words = [str(file), "--precision", "fp32", "--set", "training.steps=60"]
    main(words)
    lines = [each for each in capsys.readouterr().out.splitlines() if "train/own" in each]
    assert len(lines) < 10
    assert lines[-1] == "step     60  train/own 1"
    main([*words, "--json"])
    assert capsys.readouterr().out.count('"train/own"') == 60
