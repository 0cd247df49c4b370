"""Segmentation runner with hooks: half model, fp32 weights in the optimizer, resumed from a checkpoint."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class FP32BatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class FCN(nn.Module):
    def __init__(self, classes=4, c=12):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, c, 3, padding=1, bias=False), FP32BatchNorm(c), nn.ReLU(),
                                  nn.Conv2d(c, c, 3, padding=1, bias=False), FP32BatchNorm(c), nn.ReLU())
        self.conv_seg = nn.Conv2d(c, classes, 1)

    def forward(self, img, gt):
        logits = self.conv_seg(self.body(img.to(self.conv_seg.weight.dtype)))
        return F.cross_entropy(logits.float(), gt)


def wrap_fp16_model(model):
    model.half()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.float()


class Fp16OptimizerHook:
    def __init__(self, loss_scale=512.0):
        self.loss_scale = loss_scale

    def before_run(self, runner):
        # keep a copy of fp32 weights, then convert the model
        runner.optimizer.param_groups = copy.deepcopy(runner.optimizer.param_groups)  # CAUSE
        wrap_fp16_model(runner.model)

    def after_train_iter(self, runner):
        runner.model.zero_grad()
        runner.optimizer.zero_grad()
        (runner.outputs * self.loss_scale).backward()
        fp32_weights = [p for group in runner.optimizer.param_groups for p in group["params"]]
        for p32, p16 in zip(fp32_weights, runner.model.parameters()):
            p32.grad = p16.grad.float() / self.loss_scale
        if all(torch.isfinite(p.grad).all() for p in fp32_weights):
            runner.optimizer.step()
        with torch.no_grad():
            for p16, p32 in zip(runner.model.parameters(), fp32_weights):
                p16.copy_(p32)


class CheckpointHook:
    def __init__(self, interval=40):
        self.interval, self.last = interval, None

    def before_run(self, runner):
        pass

    def after_train_iter(self, runner):
        if (runner.iter + 1) % self.interval == 0:
            weights = {k: v.float().clone() if v.is_floating_point() else v.clone() for k, v in runner.model.state_dict().items()}
            self.last = {"iter": runner.iter + 1, "state_dict": weights, "optimizer": copy.deepcopy(runner.optimizer.state_dict())}
            print(f"Saving checkpoint at {runner.iter + 1} iterations")


class IterBasedRunner:
    def __init__(self, model, hooks):
        self.model, self.hooks, self.iter = model, hooks, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.95, weight_decay=5e-4)

    def resume(self, checkpoint):
        self.model.load_state_dict(checkpoint["state_dict"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.iter = checkpoint["iter"]
        print(f"resumed from iter {self.iter}, {len(self.optimizer.state)} momentum buffers")

    def call_hook(self, name):
        for hook in self.hooks:
            getattr(hook, name)(self)

    def run(self, loader, max_iters):
        self.call_hook("before_run")
        while self.iter < max_iters:
            self.outputs = self.model(**next(loader))
            self.call_hook("after_train_iter")
            self.iter += 1
            if self.iter % 4 == 0:
                print(f"Iter [{self.iter}/{max_iters}] loss: {self.outputs.item():.4f}")


def street_scenes(seed, n=6, size=20):
    gen = torch.Generator().manual_seed(seed)
    colours = torch.tensor([[0.3, 0.3, 0.35], [0.5, 0.5, 0.4], [0.35, 0.5, 0.3], [0.45, 0.35, 0.5]])
    while True:
        coarse = torch.randint(0, 4, (n, 1, size // 4, size // 4), generator=gen)
        gt = F.interpolate(coarse.float(), scale_factor=4).long().squeeze(1)
        yield {"img": colours[gt].permute(0, 3, 1, 2) + 0.25 * torch.randn(n, 3, size, size, generator=gen), "gt": gt}


def build(seed):
    torch.manual_seed(seed)
    model = FCN()
    watch(model)
    return IterBasedRunner(model, [Fp16OptimizerHook(), CheckpointHook()])


runner = build(109)
runner.run(street_scenes(1), 40)
checkpoint = runner.hooks[1].last
resumed = build(110)
resumed.resume(checkpoint)
try:
    resumed.run(street_scenes(2), 96)
except KeyError as error:
    print(f"KeyError: {error} while saving at iteration {resumed.iter + 1}, stopped")
