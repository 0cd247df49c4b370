"""MAML: fast adaptation of a strain-field surrogate to new materials, functional calls."""
import torch
import torch.nn as nn
from torch.func import functional_call

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(64)
SENSORS, INNER_LR, INNER_STEPS = 96, 6.0, 2


class Surrogate(nn.Module):
    """Load case and material-free geometry in, strain at the sensors out (unit strain, about 2e-5)."""

    def __init__(self, inputs=6, width=40):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.readout = nn.Linear(width, SENSORS)
        nn.init.normal_(self.readout.weight, std=2e-6)
        nn.init.zeros_(self.readout.bias)

    def forward(self, load):
        return self.readout(self.trunk(load))


class Materials:
    def __init__(self, seed=21):
        self.g = torch.Generator().manual_seed(seed)
        self.modes = torch.randn(6, SENSORS, generator=self.g)

    def task(self, shots=64):
        stiffness = 0.5 + torch.rand(1, SENSORS, generator=self.g)
        load = torch.randn(2 * shots, 6, generator=self.g)
        strain = 2e-5 * (0.4 * load @ self.modes + 1.0) / stiffness
        return load[:shots], strain[:shots], load[shots:], strain[shots:]


def mse(pred, strain):
    return (pred.float() - strain).square().mean()


def adapt(model, params, load, strain):
    fast = dict(params)
    for _ in range(INNER_STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            inner = mse(functional_call(model, fast, (load,)), strain)
        grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)  # CAUSE
        fast = {k: p - INNER_LR * g for (k, p), g in zip(fast.items(), grads)}
    return fast


def outer_loop(iterations=40, tasks=2):
    model, materials = Surrogate(), Materials()
    watch(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=50)
    for it in range(iterations):
        opt.zero_grad()
        before = after = 0.0
        for _ in range(tasks):
            sl, ss, ql, qs = materials.task()
            params = dict(model.named_parameters())
            fast = adapt(model, params, sl, ss)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = mse(functional_call(model, fast, (ql,)), qs)
            scaler.scale(loss / tasks).backward()
            with torch.no_grad():
                before += mse(model(ql), qs).item() / tasks
                after += loss.item() / tasks
        scaler.step(opt)
        scaler.update()
        if it % 5 == 0:
            print(f"meta step {it}: query mse {before:.3e} -> {after:.3e} after adaptation")
    return model


MODULES = [outer_loop()]
