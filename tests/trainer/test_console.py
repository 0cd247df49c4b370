import json
import re

import pytest

from halfstep.run_config import config_model
from halfstep.run_settings import Training
from tests.trainer.conftest import Regression
from trainer.console import main
from trainer.registry import load_recipe


def test_help_lists_recipes_and_fields(capsys):
    """`--help` says what can be trained and what can be set, with defaults."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    for part in ("recipe digits", "recipe mlp", "training.steps = ", "recipe.dropout = 0.0"):
        assert part in text
    assert "scaler.init_scale=16777216.0" in text
    assert f"training.max_grad_norm = {json.dumps(Training().max_grad_norm)}\n" in text


@pytest.mark.parametrize("name", ["digits", "gpt", "wgan-gp"])
def test_help_of_a_recipe_tells_its_own_defaults(capsys, name):
    """Of every field, one that all share too, and of no other recipe."""
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.strip().split(" = ") for line in lines if re.match(r"  [a-z_.0-9]+ = ", line))
    recipe = load_recipe(name)
    config = config_model(recipe).model_construct().model_dump(mode="json")
    expected = {"precision": config["precision"]} | {
        f"{group}.{field}": value
        for group, fields in config.items()
        if isinstance(fields, dict)
        for field, value in fields.items()
    }
    assert {name: json.loads(text) for name, text in told.items()} == expected
    for group, fields in recipe.defaults.items():
        for field, value in fields.items():
            assert expected[f"{group}.{field}"] == value
    assert not [line for line in lines if line.startswith("recipe ")][1:]


def test_help_of_a_recipe_that_overrides_a_single_value(capsys, monkeypatch):
    """A precision of its own stands among its defaults, and an unknown name is a sentence."""
    monkeypatch.setattr("trainer.console.known_recipes", lambda: ["tests.Regression"])
    monkeypatch.setattr("trainer.console.load_recipe", lambda name: Regression)
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert (
        "precision=fp32, training.steps=5, training.batch_size=8, training.max_grad_norm=null"
        in text
    )


def test_a_run_tells_its_story_as_json(capsys):
    """One object a line, with words for floats that JSON lacks; what is wrong is one on stderr."""
    main(["digits", "--precision", "fp16", "--set", "training.steps=30", "--json"])
    told = [
        json.loads(line, parse_constant=pytest.fail)
        for line in capsys.readouterr().out.splitlines()
    ]
    assert {"steps", "scaler", "metric"} <= {each["event"] for each in told}
    drained = [each["step"] for each in told if each["event"] == "steps"]
    assert (drained[-1], drained) == (30, sorted(drained))
    assert told[-1] == {"event": "ended", "status": "finished", "step": 30}
    for wrong, message in (("training.steps=x", "training.steps"), ("steps", "FIELD=VALUE")):
        with pytest.raises(SystemExit, match="2"):
            main(["digits", "--set", wrong, "--json"])
        assert message in json.loads(capsys.readouterr().err)["error"]
    with pytest.raises(SystemExit, match="2"):
        main(["--json"])
    assert "recipe" in json.loads(capsys.readouterr().err)["error"]


def test_a_run_prints_its_story(capsys, tmp_path):
    """Steps, skips, metrics, checkpoint and totals come out without server or database."""
    folder = str(tmp_path / "out")
    main(["digits", "--precision", "fp16", "--set", "training.steps=30", "--checkpoints", folder])
    text = capsys.readouterr().out
    for part in (
        "step     30/30  loss ",
        "step      1  skipped: gradients not finite in ",
        "backoff: 1.67772e+07 → 8.38861e+06",
        "val/accuracy 0.",
        "saved out/step-00000030.pt",
        "Total execution time = ",
        "Max memory used by tensors = ",
        "finished after 30 steps",
    ):
        assert part in text
    main(["digits", "--set", "training.steps=31", "--resume", f"{tmp_path}/out/step-00000030.pt"])
    assert "resumed after step 30: training.steps was 30, is 31" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["digit"],
            'there is no recipe "digit"; known are digits, erfnet, finetune, gpt, images, mlp',
        ),
        (["digit", "--help"], 'there is no recipe "digit"; known are digits'),
        (["digits", "--set", "training.steps=0"], "training.steps is 0: Input should be greater"),
        (["digits", "--set", "training.stepz=1"], "training.stepz is 1: Extra inputs"),
        (["digits", "--set", "training.steps"], "write it as FIELD=VALUE"),
        (["digits", "--set", "training.batch_size=5000"], "choose at most 1437"),
        (["digits", "--resume", "none.pt"], "none.pt does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_traceback(capsys, arguments, message):
    """What the user can put right is said in words, with exit code 2."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_for_checkpoints_is_tried_before_training(capsys, tmp_path):
    """One that cannot be made, or is a file, is refused at the start, and nothing trained."""
    (tmp_path / "file").write_text("")
    for folder in ("/proc/x", f"{tmp_path}/file", f"{tmp_path}/file/below"):
        with pytest.raises(SystemExit, match="2"):
            main(["digits", "--set", "training.steps=2", "--checkpoints", folder])
        told = capsys.readouterr()
        assert told.out == ""
        assert re.fullmatch(rf"error: --checkpoints is {folder}; allowed: a folder .*\n", told.err)
    with pytest.raises(SystemExit, match="2"):
        main(["digits", "--set", "training.steps=0", "--checkpoints", f"{tmp_path}/new"])
    assert not (tmp_path / "new").exists()
