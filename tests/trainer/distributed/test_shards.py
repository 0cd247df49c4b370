"""Two ranks with sharded weights, compared with two with whole weights from sharded.py."""

import errno
import fcntl
import hashlib
import os
import pickle
import select
import shutil
import signal
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from halfstep.run_config import ConfigError, parse_config
from tests.marks import looped
from tests.trainer.conftest import Regression, assert_same_bits
from tests.trainer.distributed.sharded import DIGITS, FUSED, OVERFLOWS_AT, UNFUSED, Overflowing
from tests.trainer.process_made import finish, read, run_ranks, start, write_job
from trainer.checkpoints.checkpoint import CheckpointError, load
from trainer.checkpoints.snapshot import room
from trainer.recipes.digits import Digits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("shards"),  # one process trains them all, once
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the trainings of both ranks by sharded.py."""
    place = tmp_path_factory.mktemp("ranks")
    run_ranks(place, Path(__file__).with_name("sharded.py").read_text())
    return place


@pytest.fixture(scope="module")
def found(folder):
    """The results of each training on both ranks."""
    return [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]


def events(story, kind, *, without=()):
    return [
        {name: value for name, value in event.items() if name not in without}
        for event in story["events"]
        if event["event"] == kind
    ]


def assert_alike(story, other):
    """Assert that two trainings are equal, except for the last bits of a norm, which a clip
    multiplies."""
    for name in ("loss", "grad_norm", "scale"):
        np.testing.assert_allclose(story[name], other[name], rtol=1e-5)
    assert story["flags"] == other["flags"]
    for module, weights in story["weights"].items():
        for name, weight in weights.items():
            torch.testing.assert_close(weight, other["weights"][module][name], rtol=1e-4, atol=1e-6)


def both(found, name):
    """Return each rank's result of a sharded training, and rank 0's with whole weights."""
    first, second = (each[f"{name} fsdp"] for each in found)
    assert first["units"]
    assert_same_bits(first["weights"], second["weights"])
    assert first["scaler"] == second["scaler"]
    return first, found[0][f"{name} ddp"]


def test_shards_train_what_whole_weights_train(found):
    """Shards train like whole weights, with dropout, clip, evaluation and averaged weights."""
    shards, whole = both(found, "digits")
    assert_alike(shards, whole)
    assert min(shards["grad_norm"]) > DIGITS["training"]["max_grad_norm"]  # so all are clipped
    for one, other in zip(events(shards, "metric"), events(whole, "metric"), strict=True):
        assert one["name"] == other["name"]
        if one["name"].startswith(("val", "ema")):
            assert one["value"] == pytest.approx(other["value"], rel=1e-5)
    assert shards["units"] == ["", "0", "3", "6"]


def test_shards_train_to_the_same_bits_again(found):
    """Two equal sharded runs have equal weights."""
    one, other = found[0]["digits fsdp"], found[0]["digits again"]
    assert_same_bits(one["weights"], other["weights"])
    assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])


def test_diagnoses_look_at_whole_gradients(found):
    """Diagnoses of shards count each gradient once, all lost updates, and whole modules'
    headroom.
    """
    shards, whole = both(found, "digits")
    for one, other in zip(events(shards, "histogram"), events(whole, "histogram"), strict=True):
        sums = [
            [sum(module["counts"]) + module["zeros"] for module in each["modules"]]
            for each in (one, other)
        ]
        assert sums[0] == sums[1] == [64 * 16 + 16, 16 * 16 + 16, 16 * 10 + 10]
    names = [[m["name"] for m in e["modules"]] for e in events(shards, "headroom")]
    assert names == [[m["name"] for m in e["modules"]] for e in events(whole, "headroom")]
    assert names
    shards, whole = both(found, "bf16")
    wanted = [[m["wanted"] for m in e["modules"]] for e in events(shards, "updates")]
    assert wanted == [[56, 9], [56, 9]]
    assert all(m["lost"] for e in events(shards, "updates") for m in e["modules"])


def test_blocks_of_a_transformer_are_shards_of_their_own(found):
    """Each block is a shard, with a tied weight, accumulation and activation checkpoints."""
    shards, whole = both(found, "gpt")
    assert_alike(shards, whole)
    assert shards["units"] == ["", "blocks.0", "blocks.1"]
    weights = shards["weights"]["model"]
    assert weights["head.weight"] is not None
    assert weights["head.weight"].data_ptr() == weights["bytes.weight"].data_ptr()


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks(found):
    """An overflow in one shard is named with its counts, and all ranks keep a common scale."""
    shards, whole = both(found, "overflow")
    assert_alike(shards, whole)
    without = ("elapsed_ms",)
    skips = events(shards, "scaler", without=without)
    assert skips == events(whole, "scaler", without=without)
    assert [(e["step"], e["kind"]) for e in skips] == [
        (OVERFLOWS_AT, "skip"),
        (OVERFLOWS_AT, "backoff"),
    ]
    assert skips[0]["culprits"] == [{"name": "model.8.bias", "inf": 1, "nan": 0}]


def test_a_replay_is_left_out_and_says_so(found):
    """A replay of shards is reported as left out, and its request acknowledged."""
    shards = found[0]["overflow fsdp"]
    [result] = events(shards, "left_out")
    assert result["diagnosis"] == "replay"
    assert "training.parallel fsdp" in result["reason"]
    assert [each["request"] for each in events(shards, "obeyed")] == [7]
    assert not events(shards, "replay")


def test_skipped_steps_are_retried_in_fp32(found):
    """With shards all ranks retry skipped steps in fp32, and have the same losses."""
    shards, whole = both(found, "retry")
    assert_alike(shards | {"grad_norm": []}, whole | {"grad_norm": []})
    retries = events(shards, "retry"), events(whole, "retry")
    assert [e["applied"] for e in retries[0]] == [True] * 6
    losses, norms = (
        [[each[name] for each in of_run] for of_run in retries] for name in ("loss", "grad_norm")
    )
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)


def test_shards_cast_as_they_are_gathered_train_as_torchs_own_loop(found):
    """Weights and scale of shards with a cast policy equal torch's own loop, with skips."""
    for rank in found:
        ours, bare = rank["policy"], rank["policy bare"]
        assert_same_bits(ours["weights"], bare["weights"])
        assert ours["scaler"] == bare["scaler"]
    assert 0 < sum(flags & 1 for flags in found[0]["policy"]["flags"]) < 8


@looped(
    "values, message",
    [
        ({"training": {"parallel": "ddp"}}, "training.parallel ddp"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"modules": {"fp32": ["model.0"]}}, "modules.fp32"),
        ({"scaler": {"retry_in_fp32": True}}, "scaler.retry_in_fp32"),
    ],
)
def test_a_policy_goes_with_fewer_settings_than_autocast(values, message):
    """Settings for parts of a network are rejected with a policy, which casts whole networks."""
    training = {"parallel": "fsdp", "shard_casts": "policy"} | values.get("training", {})
    with pytest.raises(ConfigError, match=f"cannot be combined with {message}; allowed: autocast"):
        parse_config(Digits, {"precision": "fp16"} | values | {"training": training})


def test_shards_go_back_from_a_spike(found):
    """Shards roll back from the same steps, to the same ones, as often as whole weights."""
    shards, whole = both(found, "spiking")
    assert events(shards, "rolled_back")
    places = [
        [(e["from_step"], e["step"], e["examples"]) for e in events(each, "rolled_back")]
        for each in (shards, whole)
    ]
    assert places[0] == places[1]
    assert_alike(shards, whole)


def test_ranks_on_other_machines_go_back_as_well(found, folder):
    """Ranks on other machines roll back to a checkpoint that only the first has on disk."""
    for parallel in ("ddp", "fsdp"):
        for rank in found:
            apart, together = rank[f"apart {parallel}"], rank[f"spiking {parallel}"]
            assert_same_bits(apart["weights"], together["weights"])
            assert apart["loss"] == together["loss"]
    assert not list(folder.glob("spiking * of rank 1/*.pt"))  # fetched files are deleted again


def test_shards_resume_from_a_checkpoint_to_the_same_bits(found, folder):
    """Shards resume a checkpoint with moments, averages and scale, and end with the same one."""
    ends = [load(folder / name) for name in ("uninterrupted.pt", "checkpoints/step-00000006.pt")]
    for part in ("modules", "optimizers", "scaler", "parts", "random", "progress", "next_batch"):
        assert_same_bits(ends[0][part], ends[1][part])
    [resumed] = events(found[0]["resumed"], "resumed")
    assert (resumed["exact"], resumed["notes"]) == (True, [])
    assert found[0]["resumed"]["step"] == [4, 5, 6]


def test_a_checkpoint_of_shards_is_whole(found, folder, run_loop):
    """A sharded checkpoint can be resumed by two ranks or one process, and its .safetensors file
    has all weights and averages.
    """
    [with_ddp] = events(found[0]["resumed ddp"], "resumed")
    assert with_ddp["notes"] == ["training.parallel was fsdp, is ddp"]
    assert_alike(found[0]["resumed ddp"], found[0]["resumed"])

    path = folder / "checkpoints/step-00000003.pt"
    state = load(path)
    weights = safetensors.torch.load_file(path.with_suffix(".safetensors"))
    assert_same_bits(weights, dict(state["modules"]["model"]))
    averages = safetensors.torch.load_file(path.with_suffix(".ema.safetensors"))
    assert averages.keys() == weights.keys()
    assert averages["0.weight"].shape == weights["0.weight"].shape == (16, 64)

    values = DIGITS | {"training": DIGITS["training"] | {"parallel": "fsdp", "steps": 3}}
    alone = run_loop(Overflowing, values, resume=path)  # there is nothing left to train
    assert_same_bits(dict(alone.recipe.modules["model"].state_dict()), weights)
    [resumed] = alone.of("resumed")
    assert "devices was 2, is 1" in resumed["notes"]


def test_a_save_holds_a_ranks_share_and_no_more(found, folder):
    """A save copies each rank's share only; the first rank also has unsharded tensors."""
    state = load(folder / "checkpoints/step-00000003.pt")
    shards = {"modules": state["modules"], "optimizers": state["optimizers"]}
    shards["ema"] = state["parts"]["ema"]
    whole_bytes, rest_bytes = room(shards), room(state) - room(shards)
    first, second = (each["saved"]["staged"] for each in found)
    assert len(first) == len(second) == 2
    # A bias of ten is five and five, in 64 bytes each.
    assert 0.4 * whole_bytes < max(second) <= 0.55 * whole_bytes
    assert max(first) <= 0.55 * whole_bytes + rest_bytes


def test_shards_are_read_with_another_layout(found, folder):
    """A checkpoint is read with another number of ranks, each from several files."""
    state = load(folder / "checkpoints/step-00000003.pt")
    for rank in (0, 1):
        assert_same_bits(found[rank]["cut otherwise"]["model"], dict(state["modules"]["model"]))


def test_the_last_save_is_one_file_and_those_before_are_shards(found, folder):
    """The last save is one file, and earlier ones are shards; those of an unfinished save are
    deleted.
    """
    kinds = [[file["kind"] for file in e["files"]] for e in events(found[0]["saved"], "checkpoint")]
    shards = ["shard.0", "shard.metadata", "shard.1"]
    assert kinds == [["checkpoint", *shards, "weights", "ema"], ["checkpoint", "weights", "ema"]]
    assert "shards" not in torch.load(folder / "uninterrupted.pt")
    place = folder / "checkpoints"
    folders = [path.name for path in place.iterdir() if path.is_dir() or path.name[0] == "."]
    assert folders == ["step-00000003"]
    for event in events(found[0]["saved"], "checkpoint")[:1]:
        for file in event["files"]:
            saved = (folder / file["path"]).read_bytes()
            assert hashlib.sha256(saved).hexdigest() == file["sha256"]
            assert len(saved) == file["size_bytes"]


def test_torchs_own_tools_read_the_folder(folder, tmp_path):
    """torch's own tool assembles the shards to one file with all tensors' names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs in a single process
        dcp_to_torch_save(folder / "checkpoints/step-00000003", tmp_path / "whole.pt")
    state = load(folder / "checkpoints/step-00000003.pt")
    weights = {f"modules.model.{n}": w for n, w in state["modules"]["model"].items()}
    theirs = torch.load(tmp_path / "whole.pt")  # what is no shard, such as buffers, is in the .pt
    shared = {name: weights[name] for name in weights if name in theirs}
    assert "modules.model.0.weight" in shared
    assert_same_bits(shared, {name: theirs[name] for name in shared})


class Bomb:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return print, ("it ran",)


def test_altered_shards_are_rejected(folder, tmp_path, capsys):
    """Shards that are altered, missing, or hold code under an altered hash are rejected."""
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    path = tmp_path / "checkpoints/step-00000003.pt"
    shard, index = path.with_suffix("") / "__1_0.distcp", path.with_suffix("") / ".metadata"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is altered: its SHA-256 is"):
        load(path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp does not exist"):
        load(path)
    index.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"builtins\.print is not allowed in the metadata"):
        load(path, is_checked=True)
    assert "it ran" not in capsys.readouterr().out


def test_a_full_disk_of_one_rank_is_reported_by_all(found, folder):
    """If one rank's disk is full, all ranks report it, and no part of the save is left."""
    for rank in (0, 1):
        assert os.strerror(errno.ENOSPC) in found[rank]["full disk"]
    assert list((folder / "full").iterdir()) == []


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    """After a kill during a save the next attempt resumes from the earlier one, bit for bit."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    training = DIGITS["training"] | {"parallel": "fsdp", "steps": 21}
    config = DIGITS | {"training": training, "checkpoints": {"every_steps": 10}}
    write_job(tmp_path, config=config)
    # A pipe for the file that a save ends with: its shards have been written by then.
    pipe = place / ".step-00000020.pt.partial"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, 4096)  # less than is written
        process = start(tmp_path, devices=2)
        assert select.select([file], [], [], 120)[0]
        for rank in psutil.Process(process.pid).children():
            rank.kill()
        assert finish(process)[0] == -signal.SIGKILL
    pipe.unlink()
    assert not (place / "step-00000020.pt").exists()
    torn = (place / "step-00000020").rename(tmp_path / "torn")

    write_job(tmp_path, attempt=2, config=config, resume="checkpoints/step-00000010.pt")
    assert finish(start(tmp_path, attempt=2, devices=2))[0] == 0
    _, _, result = read(tmp_path, attempt=2)
    assert [(e["step"], e["exact"]) for e in result if e["event"] == "resumed"] == [(10, True)]
    for path in torn.iterdir():
        assert path.read_bytes() == (place / "step-00000020" / path.name).read_bytes()


def test_a_network_that_no_device_holds_is_drawn_by_one_rank(found):
    """Each rank gets the weights, masks and data that one rank draws, as with ddp."""
    shards, whole = both(found, "placed")
    assert_alike(shards, whole)
    assert [each["placed fsdp"]["made_on"] for each in found] == [["cpu"], ["meta"]]
    assert [each["placed ddp"]["made_on"] for each in found] == [["cpu"], ["cpu"]]


@pytest.mark.parametrize(
    ("kind", "is_fused"),
    [(kind, False) for kind in UNFUSED] + [(kind, True) for kind in FUSED],
)
def test_optimizers_update_shards_as_they_update_whole_weights(found, kind, is_fused):
    """All supported optimizers update shards like whole weights, also with initial state."""
    assert_alike(*both(found, f"{kind} {is_fused}"))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("SGD", 'optimizer "sgd" is a fused SGD, which torch cannot shard'),
        ("Muon", 'optimizer "sgd" is Muon, which is not known to be elementwise'),
        ("Tied", "model.0.weight and model.1.weight are one weight, and lie in two shards"),
        ("Sparse", "model.3 has sparse gradients, which cannot be sharded"),
        ("Penalty", "training_step differentiates a gradient"),
        ("Pair", "one loss per step for all optimizers (sgd, adam)"),
        ("Routed", "the ranks called modules in different orders"),
        ("Mixed", "the weights of model are of several types, torch.bfloat16, torch.float32"),
    ],
)
def test_unsupported_settings_of_shards_are_rejected_with_a_reason(found, what, words):
    """All ranks reject unsupported settings, as early as possible before a weight changes."""
    first, second = (each[f"refused {what}"] for each in found)
    assert first == second
    assert first.startswith("RecipeError: ")
    assert words in first


@looped(
    "values, words",
    [
        ({"training": {"compile": True}}, "parallel fsdp cannot be combined with compile"),
        (
            {"training": {"static_graph": True, "channels_last": True}},
            "parallel fsdp cannot be combined with channels_last or static_graph; allowed: ddp",
        ),
        (
            {"training": {"weights": "bf16", "rounding": "stochastic"}},
            "parallel fsdp cannot be combined with rounding stochastic",
        ),
        ({"precision": "fp8"}, "precision is fp8, but training.parallel is fsdp; allowed: ddp"),
    ],
)
def test_settings_that_conflict_with_shards_are_rejected(values, words):
    """A setting that conflicts with shards is rejected at submission by its name."""
    training = values.get("training", {}) | {"parallel": "fsdp"}
    with pytest.raises(ConfigError, match=words):
        parse_config(Regression, values | {"training": training})
