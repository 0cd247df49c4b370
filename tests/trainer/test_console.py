import pytest

from trainer.console import main


def test_help_lists_recipes_and_fields(capsys):
    """`--help` says what can be trained and what can be set, with defaults."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    for part in ("recipe digits", "recipe mlp", "training.steps = ", "recipe.dropout = 0.0"):
        assert part in text
    assert "scaler.init_scale=16777216.0" in text


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
