"""Runner with callbacks for classification: criterion, optimizer with accumulation and clipping, AMP engine."""
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1319)
N_FEATURES, N_CLASSES = 24, 10


class AMPEngine:
    def __init__(self, **scaler_kwargs):
        self.scaler = torch.amp.GradScaler("cpu", **scaler_kwargs)

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.float16)

    def zero_grad(self, loss, model, optimizer):
        model.zero_grad()

    def backward_loss(self, loss, model, optimizer):
        self.scaler.scale(loss).backward()

    def optimizer_step(self, loss, model, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()


class Callback:
    def on_batch_end(self, runner): ...

    def on_epoch_end(self, runner): ...


class CriterionCallback(Callback):
    def on_batch_end(self, runner):
        with runner.engine.autocast():
            runner.batch_metrics["loss"] = F.cross_entropy(runner.batch["logits"].float(), runner.batch["targets"])


class OptimizerCallback(Callback):
    def __init__(self, metric_key="loss", accumulation_steps=1, grad_clip_fn=None, grad_clip_params=None):
        self.metric_key, self.accumulation_steps, self._accumulation_counter = metric_key, accumulation_steps, 0
        self.grad_clip_fn = partial(grad_clip_fn, **grad_clip_params) if grad_clip_fn else None

    def on_batch_end(self, runner):
        self._accumulation_counter += 1
        need_gradient_step = self._accumulation_counter % self.accumulation_steps == 0
        loss = runner.batch_metrics[self.metric_key] / self.accumulation_steps
        runner.engine.backward_loss(loss, runner.model, runner.optimizer)
        if self.grad_clip_fn is not None:
            self.grad_clip_fn(runner.model.parameters())  # CAUSE
        if need_gradient_step:
            runner.engine.optimizer_step(loss, runner.model, runner.optimizer)
            runner.engine.zero_grad(loss, runner.model, runner.optimizer)
        runner.batch_metrics["lr"] = runner.optimizer.param_groups[0]["lr"]


class AccuracyCallback(Callback):
    def __init__(self):
        self.history = []

    def on_batch_end(self, runner):
        self.history.append((runner.batch["logits"].argmax(1) == runner.batch["targets"]).float().mean().item())

    def on_epoch_end(self, runner):
        runner.epoch_metrics["accuracy01"] = sum(self.history) / len(self.history)
        self.history = []


class SupervisedRunner:
    def __init__(self, engine):
        self.engine, self.batch, self.batch_metrics, self.epoch_metrics = engine, {}, {}, {}

    def train(self, model, optimizer, loader, callbacks, num_epochs):
        self.model, self.optimizer = model, optimizer
        for epoch in range(1, num_epochs + 1):
            losses = []
            for features, targets in loader():
                with self.engine.autocast():
                    logits = self.model(features)
                self.batch = {"features": features, "targets": targets, "logits": logits}
                for callback in callbacks:
                    callback.on_batch_end(self)
                losses.append(self.batch_metrics["loss"].item())
            for callback in callbacks:
                callback.on_epoch_end(self)
            print(f"train ({epoch}/{num_epochs}) accuracy01: {self.epoch_metrics['accuracy01']:.4f} | loss: "
                  f"{sum(losses) / len(losses):.4f} | lr: {self.batch_metrics['lr']} | scale: {self.engine.scaler.get_scale():g}")


gen = torch.Generator().manual_seed(6)
centres = torch.randn(N_CLASSES, N_FEATURES, generator=torch.Generator().manual_seed(1))


def loader(batches=40, batch_size=32):
    for _ in range(batches):
        targets = torch.randint(0, N_CLASSES, (batch_size,), generator=gen)
        yield centres[targets] + 0.9 * torch.randn(batch_size, N_FEATURES, generator=gen), targets


model = nn.Sequential(nn.Linear(N_FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, N_CLASSES))
watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
runner = SupervisedRunner(AMPEngine(init_scale=2.0 ** 14))
runner.train(model, optimizer, loader, num_epochs=5, callbacks=[
    CriterionCallback(),
    OptimizerCallback(accumulation_steps=2, grad_clip_fn=nn.utils.clip_grad_norm_, grad_clip_params={"max_norm": 1.0}),
    AccuracyCallback(),
])

MODULES = (model,)
