"""The recipe `finetune` with transformers and peft, on a tiny model with random weights."""

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers

from halfstep.run_config import ConfigError, parse_config
from tests.frameworks.tiny_model import TEXT, write_model
from tests.trainer.conftest import CPU, assert_same_bits, run_loop  # noqa: F401 - a fixture
from tests.trainer.docs_made import LINES
from trainer.diagnosis.check import check
from trainer.recipes import token_file
from trainer.recipes.finetune import Finetune

Values = dict[str, Any]


@pytest.fixture(autouse=True)
def data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep token files in a folder of the tests."""
    monkeypatch.setenv("HALFSTEP_DATA", str(tmp_path_factory.getbasetemp() / "data"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder written by save_pretrained."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file."""
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text(TEXT)
    return path


def of(model: Path, text: Path, steps: int = 4, **changes: Any) -> Values:
    """Return a configuration with short windows."""
    own = {"model": str(model), "text": str(text), "context": 16, "learning_rate": 1e-2}
    training = {"steps": steps, "warmup_steps": 0, "schedule": "constant"}
    values: Values = {"training": training, "recipe": own | changes.pop("recipe", {})}
    return values | {"evaluation": {"at_start": True}} | changes


def made(model: Path, text: Path, **own: Any) -> Finetune:
    """Return the recipe's instance."""
    return Finetune(parse_config(Finetune, of(model, text, recipe=own)), CPU)


def unzip(run_folder: Path, step: int) -> Path:
    """Unzip the last artifact; return the folder."""
    with zipfile.ZipFile(run_folder / f"artifacts/step-{step:08}/huggingface.zip") as archive:
        archive.extractall(folder := run_folder / "unzipped")
    return folder


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_lora_learns_and_its_adapter_loads(
    run_loop: Any,  # noqa: F811
    model: Path,
    text: Path,
    tmp_path: Path,
    precision: str,
) -> None:
    """With LoRA the loss falls, frozen weights are unchanged, and the adapter gives the same
    logits.
    """
    values = of(model, text, 40, precision=precision)
    run = run_loop(Finetune, values, folder=tmp_path / "checkpoints")
    first, *_, last = [event["value"] for event in run.of("metric", name="val/loss")]
    assert last < first - 0.1
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    trained = run.recipe.network
    frozen = trained.get_base_model().model.embed_tokens.weight
    assert torch.equal(frozen, base.model.embed_tokens.weight)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(unzip(tmp_path, 40)).eval()
    ids = torch.arange(1, 17)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trained.eval()(ids).logits)
    assert "written by the model" in (tmp_path / "artifacts/step-00000040/sample.txt").read_text()


@pytest.mark.parametrize("is_tied", [True, False])
def test_whole_models_load_by_from_pretrained(
    run_loop: Any,  # noqa: F811
    text: Path,
    tmp_path: Path,
    is_tied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unzipped archive with the checkpoint's weights is a model with its tokenizer."""
    write_model(tmp_path / "model", is_tied=is_tied)
    values = of(tmp_path / "model", text, 5, recipe={"lora_rank": 0})
    run = run_loop(Finetune, values, folder=tmp_path / "checkpoints")
    folder = unzip(tmp_path, 5)
    shutil.copy(tmp_path / "checkpoints/step-00000005.safetensors", folder / "model.safetensors")
    _, result = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    folder = folder.rename(tmp_path / "huggingface")
    monkeypatch.chdir(tmp_path)
    exec(LINES[-1][1], names := {"transformers": transformers})
    loaded = names["model"]
    assert not any(result.values())
    assert_same_bits(dict(loaded.state_dict()), dict(run.recipe.network.state_dict()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("3 and 3")["input_ids"]) == "3 and 3"


def test_gradient_checkpoints_change_no_bit(run_loop: Any, model: Path, text: Path) -> None:  # noqa: F811
    """Gradient checkpointing changes no bit, with LoRA's dropout on."""
    runs = [
        run_loop(Finetune, of(model, text, recipe={"lora_dropout": 0.3} | own))
        for own in ({}, {"gradient_checkpointing": True})
    ]
    assert_same_bits(runs[0].weights(), runs[1].weights())


def test_it_resumes_exactly(run_loop: Any, model: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    """LoRA with dropout resumes exactly, with another number of data workers."""
    own = {"lora_dropout": 0.1}
    values = of(model, text, recipe=own, checkpoints={"every_steps": 2})
    whole = run_loop(Finetune, values, folder=tmp_path)
    resumed = run_loop(
        Finetune,
        values | {"data": {"workers": 0}},
        folder=tmp_path,
        resume=tmp_path / "step-00000002.pt",
    )
    assert resumed.of("resumed")[0]["notes"] == []
    assert_same_bits(resumed.weights(), whole.weights())


def test_documents_end_in_the_models_token(model: Path, tmp_path: Path) -> None:
    """Every line of JSONL is a document, and windows contain the token after it."""
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"body": f"{n} is {n}"}) + "\n" for n in range(200)))
    recipe = made(model, file, field="body")
    window = recipe.dataset[0]
    assert window.shape == (17,)
    assert torch.equal(recipe.dataset[1][0], window[-1])
    assert recipe.tokenizer.decode(window).startswith("0 is 0<end>1 is 1<end>2 is")


def test_another_tokenizer_or_text_has_other_tokens(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """An equal text with an equal tokenizer is tokenized once, wherever both are."""
    folder = token_file.folder()
    made(model, text)
    before = set(folder.glob("*.tokens"))
    shutil.copytree(model, tmp_path / "copy")
    copied = shutil.copy(text, tmp_path)
    assert torch.equal(made(tmp_path / "copy", copied).dataset[3], made(model, text).dataset[3])
    assert set(folder.glob("*.tokens")) == before
    tokenizer = json.loads((tmp_path / "copy/tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:1]
    (tmp_path / "copy/tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = made(tmp_path / "copy", copied)
    assert recipe.tokenizer.decode(recipe.dataset[0]) in TEXT
    assert not torch.equal(recipe.dataset[0], made(model, text).dataset[0])
    assert len(set(folder.glob("*.tokens")) - before) == 1


def test_the_operations_of_lora_are_fewer(model: Path, text: Path) -> None:
    """LoRA takes fewer operations, since frozen weights get no gradients."""
    lora, whole = made(model, text).flops(), made(model, text, lora_rank=0).flops()
    assert 0 < lora < whole


def test_a_folder_that_is_no_model_is_reported(model: Path, text: Path, tmp_path: Path) -> None:
    """A missing folder, missing weights and a missing tokenizer have separate messages."""
    with pytest.raises(ConfigError, match=r"recipe.model is empty: name a path"):
        Finetune(parse_config(Finetune, {}), CPU)
    with pytest.raises(ConfigError, match=r"there is no config.json on this worker"):
        made(tmp_path, text)
    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no language model can be loaded from it: .*no file"):
        made(folder, text)
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer can be loaded from it"):
        made(folder, text)


def test_weights_that_do_not_fit_are_reported(model: Path, text: Path, tmp_path: Path) -> None:
    """finetune's weights that are missing, unknown or mismatched are reported by name."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    weights = safetensors.torch.load_file(file := tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.extra.weight"] = torch.ones(1)
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"its weights do not fit its config.json") as result:
        made(tmp_path, text)
    for part in (
        "1 weights are missing (model.layers.1.mlp.up_proj.weight)",
        "1 have a shape that differs from config.json (model.norm.weight)",
        "1 are unknown to it (model.extra.weight)",
    ):
        assert part in str(result.value)


def test_other_settings_that_do_not_fit_are_reported(
    model: Path, text: Path, tmp_path: Path
) -> None:
    """Modules that do not exist, and a text that is too short, are reported by finetune."""
    with pytest.raises(
        ConfigError, match=r"recipe.lora_modules is 'query'.*linear layers are .*q_p"
    ):
        made(model, text, lora_modules="query")
    (short := tmp_path / "short.txt").write_text("1 and 1")
    with pytest.raises(ConfigError, match=r"too few for recipe.context 16"):
        made(model, short)


def test_the_check_finds_no_mistake(model: Path, text: Path) -> None:
    """`halfstep recipe check` of finetune finds no mistake for CUDA."""
    assert check(Finetune, {"recipe": of(model, text)["recipe"]}).errors == []
