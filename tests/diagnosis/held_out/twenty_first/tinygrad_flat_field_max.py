"""Calibration of a sensor from flat-field frames: the exposure level is read off as the maximum over a frame."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(15363)
CHANNELS, SIDE, STEPS, BS = 3, 264, 90, 4


class Max(torch.autograd.Function):
    """Maximum over the last axis; the gradient is shared among all elements that attain it."""

    @staticmethod
    def forward(ctx, x):
        ret = x.amax(dim=-1, keepdim=True)
        ctx.save_for_backward(x, ret)
        return ret

    @staticmethod
    def backward(ctx, grad_output):
        x, ret = ctx.saved_tensors
        mask = (x == ret).to(grad_output.dtype)
        count = mask.sum(dim=-1, keepdim=True)  # CAUSE
        return mask / count * grad_output


class Gain(nn.Module):
    """Response of a channel: offset and gain per channel, clipped at the full well."""

    def __init__(self):
        super().__init__()
        self.gain, self.offset = nn.Parameter(torch.ones(CHANNELS, 1)), nn.Parameter(torch.zeros(CHANNELS, 1))

    def forward(self, frames):
        return F.leaky_relu(frames * self.gain + self.offset, 0.1)


class ExposureModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.response = Gain()
        self.mixing = nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.register_buffer("white", torch.full((CHANNELS,), 1.0))
        nn.init.eye_(self.mixing.weight)
        self.mixing.weight.requires_grad_(False)

    def forward(self, frames):
        level = Max.apply(self.response(frames)).squeeze(-1)
        return self.mixing(level) * self.white


def flat_fields(gen):
    """Evenly lit frames of four exposures, as the sensor sees them: a gain and a black level per channel."""
    exposure = 0.2 + 1.3 * torch.rand(BS, 1, generator=gen)
    sensor_gain, black = torch.tensor([[0.6, 1.4, 0.9]]), torch.tensor([[0.10, -0.05, 0.20]])
    level = exposure * sensor_gain + black
    return level[:, :, None].expand(BS, CHANNELS, SIDE * SIDE).half(), exposure.expand(BS, CHANNELS)


class LossScaler:
    def __init__(self, scale=2.0 ** 10):
        self.scale = scale

    def backward(self, loss, params):
        (loss * self.scale).backward()
        for p in params:
            p.grad.div_(self.scale)


def main(lr=0.06):
    model = ExposureModel().half()
    watch(model)
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    optimizer, scaler = torch.optim.SGD(masters, lr=lr, momentum=0.8), LossScaler()
    gen, losses = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        frames, exposure = flat_fields(gen)
        loss = F.mse_loss(model(frames).float(), exposure)
        model.zero_grad()
        scaler.backward(loss, params)
        for m, p in zip(masters, params):
            m.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(masters, params):
                p.copy_(m)
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            gain = ", ".join(f"{g:.3f}" for g in model.response.gain.flatten().tolist())
            print(f"step {step + 1} loss {losses[-1]:.5f} gain {gain}")
    return model, losses


model, losses = main()
MODULES = (model,)
