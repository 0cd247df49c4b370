"""Box regression and classification of proposals with an AMP trainer; the job is restarted once with --resume."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3686)
CLASSES, FEATURES, PROPOSALS = 5, 32, 96


class FastRCNNOutputLayers(nn.Module):
    def __init__(self, d=56):
        super().__init__()
        self.box_head = nn.Sequential(nn.Linear(FEATURES, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.cls_score, self.bbox_pred = nn.Linear(d, CLASSES + 1), nn.Linear(d, 4)

    def forward(self, proposals):
        x = self.box_head(proposals["features"])
        scores, deltas = self.cls_score(x).float(), self.bbox_pred(x).float()
        foreground = proposals["gt_classes"] < CLASSES
        loss_cls = F.cross_entropy(scores, proposals["gt_classes"], reduction="sum")
        loss_box = F.smooth_l1_loss(deltas[foreground], proposals["gt_deltas"][foreground], beta=5.0, reduction="sum")
        return {"loss_cls": loss_cls, "loss_box_reg": loss_box}


def mapper(iteration):
    """Pooled features of proposals; box targets in pixels."""
    gen = torch.Generator().manual_seed(500 + iteration)
    centres = torch.randn(CLASSES + 1, FEATURES, generator=torch.Generator().manual_seed(1))
    where = torch.randn(FEATURES, 4, generator=torch.Generator().manual_seed(2))
    classes = torch.randint(0, CLASSES + 1, (PROPOSALS,), generator=gen)
    features = 3 * centres[classes] + 2 * torch.randn(PROPOSALS, FEATURES, generator=gen)
    return {"features": features, "gt_classes": classes, "gt_deltas": features @ where}


class Checkpointer:
    def __init__(self, save_dir, **checkpointables):
        self.path, self.checkpointables = os.path.join(save_dir, "model_final.pth"), checkpointables

    def save(self, **extra):
        torch.save({name: obj.state_dict() for name, obj in self.checkpointables.items()} | extra, self.path)

    def resume_or_load(self, resume):
        if not (resume and os.path.exists(self.path)):
            return {}
        data = torch.load(self.path)
        for name, obj in self.checkpointables.items():
            obj.load_state_dict(data.pop(name))
        return data


class AMPTrainer:
    def __init__(self, model, data_loader, optimizer):
        self.model, self.data_loader, self.optimizer = model, data_loader, optimizer
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)

    def run_step(self, iteration):
        with torch.autocast("cpu", dtype=torch.float16):
            loss_dict = self.model(self.data_loader(iteration))
        loss = sum(loss_dict.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        losses.append(loss.item() / PROPOSALS)

    def state_dict(self):
        return {"grad_scaler": self.grad_scaler.state_dict()}

    def load_state_dict(self, state):
        self.grad_scaler.load_state_dict(state["grad_scaler"])


class DefaultTrainer:
    def __init__(self, model, output_dir, max_iter, resume):
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 60, 0.5)
        self._trainer = AMPTrainer(model, mapper, optimizer)
        self.checkpointer = Checkpointer(output_dir, model=model, optimizer=optimizer, scheduler=self.scheduler)  # CAUSE
        self.start_iter = self.checkpointer.resume_or_load(resume).get("iteration", -1) + 1
        self.max_iter = max_iter

    def train(self):
        for iteration in range(self.start_iter, self.max_iter):
            self._trainer.run_step(iteration)
            self.scheduler.step()
            if (iteration + 1) % 10 == 0:
                scale = self._trainer.grad_scaler.get_scale()
                print(f"iter: {iteration}  total_loss: {losses[-1]:.4f}  loss_scale: {scale:g}")
        self.checkpointer.save(iteration=self.max_iter - 1)


losses = []
model = FastRCNNOutputLayers()
watch(model)
with tempfile.TemporaryDirectory() as output_dir:
    DefaultTrainer(model, output_dir, max_iter=50, resume=False).train()
    DefaultTrainer(model, output_dir, max_iter=90, resume=True).train()
MODULES = (model,)
