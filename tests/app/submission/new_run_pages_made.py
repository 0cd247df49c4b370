"""Shared helpers of the tests of new run pages."""

FORM = {
    "recipe": "digits",
    "precision": "fp16",
    "training.steps": "400",
    "training.batch_size": "64",
    "training.max_grad_norm": "1",
    "training.fused": "true",
    "scaler.enabled": "true",
    "scaler.init_scale": "16777216",
    "priority": "0",
    "devices_per_node": "1",
}
