"""Shared helpers of the tests of events."""

from typing import Any

from tests.db.telemetry.telemetry_made import (
    make_histogram,
    make_metric,
    make_module,
    make_precision_diff,
    make_precision_plan,
    make_replay,
    make_skip,
)

FILE = {"path": "artifacts/step-00000400/a.txt", "size_bytes": 3, "sha256": "ab" * 32}


STATE = {"kind": "checkpoint", **FILE, "path": "checkpoints/step-00000400.pt"}


#: One of each kind, as a training spools it.
HONEST: dict[str, dict[str, Any]] = {
    "scaler": make_skip(3, "head.weight"),
    "metric": make_metric(3, 0.5),
    "checkpoint": {
        "step": 400,
        "reason": "end",
        "request": None,
        "write_seconds": 1.25,
        "stall_seconds": 0.05,
        "files": [STATE, STATE | {"kind": "ema"}, STATE | {"kind": "ema.generator"}],
    },
    "resumed": {"step": 0, "exact": False, "notes": ["another device"]},
    "artifact": {"step": 400, "name": "a.txt", **FILE},
    "saved_artifact": {
        "name": "digits",
        "type": "dataset",
        "digest": "cd" * 32,
        "is_file": False,
        "aliases": ["best"],
        "files": [
            {"name": "sub/a.csv", "path": f"blobs/{'ab' * 32}", "size_bytes": 3}
            | {"sha256": "ab" * 32}
        ],
    },
    "used_artifact": {"project": "", "name": "digits", "digest": "cd" * 32},
    "obeyed": {"step": 4, "request": 7},
    "shapes": {"step": 0, "share": 0.5, "count": 1, "layers": ["head"], "batch_size": None},
    "retry": {"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "applied": False},
    "histogram": make_histogram(3, make_module("head", -14, [1, 2, 3])),
    "replay": make_replay(3, module=None, largest_input=None),
    "length": {"step": 0, "steps": 1200},
    "headroom": {
        "step": 50,
        "scale": 1024.0,
        "modules": [
            {"name": "head", "activation": float("inf"), "gradient": None},
            {"name": "body", "activation": 1.0, "gradient": 1.0, "smallest_activation": 2.0**-24}
            | {"smallest_gradient": None, "dtype": "float16"},
        ],
    },
    "precision_diff": make_precision_diff(50),
    "fp8": {
        "step": 50,
        "modules": [
            {"name": "head", "activation": 3.5, "weight": 0.5, "gradient": float("inf")}
            | {"activation_underflow": 0.0, "weight_underflow": 0.25, "gradient_underflow": 1.0},
            {"name": "body", "activation": 1.0, "weight": 1.0, "gradient": None}
            | {"activation_underflow": 0.0, "weight_underflow": 0.0, "gradient_underflow": None},
        ],
    },
    "layer_norms": {"step": 50, "layers": ["head"], "norms": [float("inf")]},
    "weights": {
        "step": 0,
        "source": "/data/models/net.safetensors",
        "loaded": 3,
        "count": 5,
        "missing": ["model.head.bias"],
        "unexpected": [],
        "mismatched": ["model.head.weight: 10 × 8, not 5 × 8"],
        "missing_count": 1,
        "unexpected_count": 0,
        "mismatched_count": 1,
    },
    "uncalled": {"step": 1, "modules": ["model.attention.out_proj"]},
    "updates": {
        "step": 7,
        "modules": [{"name": "model.0", "wanted": 768, "lost": 700, "saved": 9}],
    },
    "poison": {"step": 7, "count": 1, "buffers": ["model.1.running_mean"]},
    "schedule": {"step": 40, "advanced": 9, "skipped": 10, "scheduler": "LambdaLR"},
    "precision": {"step": 1, "dtype": "bfloat16"},
    "origin": {
        "step": 2,
        "scale": 65536.0,
        "direction": "backward",
        "kind": "singular",
        "operation": "SqrtBackward0",
        "dtype": "float32",
        "module": "head",
        "source": "train.py:12 in step",
    },
    "shadow_step": {
        "step": 22,
        "armed": 4,
        "defects": [
            {
                "step": 22,
                "kind": "overflow",
                "symptom": "loss",
                "site": {"operator": "mm", "file": "/work/train.py", "line": 12, "source": "a @ b"},
                "dtype": "float16",
                "value": 70000.0,
                "limit": 65504.0,
                "helps": ["fp32", "bf16"],
            }
        ],
    },
    "bad_inputs": {"step": 7, "inputs": [{"name": "batch['x']", "inf": 0, "nan": 3}]},
    "first_nonfinite": {
        "step": 7,
        "loss_nonfinite": False,
        "culprits": [{"name": "head.weight"}],
        "finite": 6,
    },
    "direct_step": {"step": 7, "count": 2, "optimizer": "SGD", "is_scaled": False},
    "not_stepped": {"step": 7, "count": 2},
    "mixed_scales": {"step": 7, "count": 2, "optimizer": "SGD"},
    "unscaled_loss": {"step": 7, "count": 2, "optimizer": "SGD"},
    "scaled_clip": {"step": 7, "count": 2, "optimizer": "SGD", "max_norm": 1.0},
    "bounded_norms": {"step": 40, "steps": 40, "norm": 1.0},
    "uncleared": {"step": 7, "count": 2, "optimizer": "SGD"},
    "accumulated_gradients": {"step": 9, "steps": 8, "optimizer": "SGD"},
    "scaler_replaced": {"step": 7, "scale_before": 4.0, "scale_after": 65536.0, "count": 1},
    "scaler_left_behind": {"step": 7, "optimizer": "SGD", "scale": 65536.0, "skipped": 8},
    "rounded_state": {"step": 7, "optimizer": "AdamW", "count": 54, "of": 100},
    "no_gradient": {
        "step": 10,
        "optimizer": "SGD",
        "parameters": ["head.weight"],
        "count": 1,
        "of": 4,
        "steps": 100,
    },
    "gradients_dropped": {"step": 31, "count": 8, "scale": 1024.0},
    "no_step": {"step": 1, "passes": 20, "is_by_hand": False},
    "outside_optimizers": {"step": 100, "count": 1, "parameters": ["head.weight"]},
    "call_order": {"step": 1, "method": "step", "error": "step() has already been called"},
    "no_inf_checks": {"step": 1, "method": "step", "optimizers": ["SGD"], "error": "No inf checks"},
    "fp16_gradients": {"step": 1, "count": 1, "parameters": ["head.weight"], "error": "Attempting"},
    "adam_eps": {"step": 1, "optimizer": "Adam", "eps": 1e-8, "count": 4},
    "precision_plan": make_precision_plan(),
    "workload": {
        "step": 0,
        "examples": 128,
        "tokens": None,
        "flops": 1e12,
        "peak_flops": None,
        "device": "cpu",
    },
    "spike": {"step": 7, "loss": float("nan"), "z": float("inf"), "rolled_back_to": 5},
    "rolled_back": {
        "step": 5,
        "from_step": 10,
        "spike": 7,
        "loss": 20.5,
        "z": 99.5,
        "examples": 320,
        "rollbacks": 1,
    },
    "described": {
        "name": "warm",
        "note": "first *try*",
        "tags": ["b"],
        "before": {"name": "cold", "tags": ["a"]},
        "step_metrics": {"val/*": "epoch"},
    },
    "alert": {"title": "Low accuracy", "text": "below 0.5", "level": "warn"},
    "configured": {"config": {"lr": 0.1, "model": {"width": [8, 4]}, "bound": float("inf")}},
    "line": {"time": 1.5, "stream": "stdout", "text": "epoch 1"},
    "log_part": {
        "path": "log/attempt-0001-000001.txt.gz",
        "size_bytes": 10,
        "sha256": "0" * 64,
    },
    "sample": {
        "elapsed_ms": 2000,
        "device": -1,
        "utilization": 0.5,
        "memory_bytes": 10**9,
        "power_watts": None,
        "temperature_celsius": None,
    },
    "left_out": {"step": 0, "diagnosis": "replay", "reason": "not with training.parallel fsdp"},
    "failed_diagnosis": {"step": 0, "diagnosis": "replay", "error": "KeyError: 'x'"},
}
for kind, made in HONEST.items():
    made["event"] = kind
