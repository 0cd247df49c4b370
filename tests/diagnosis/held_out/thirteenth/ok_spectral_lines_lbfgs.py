"""Unmixing of emission spectra: Adam in fp16 first, then a polish with LBFGS in full precision, where no loss is scaled."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)

CHANNELS, ELEMENTS, SPECTRA = 90, 4, 80


def observations(gen):
    axis = torch.linspace(0, 1, CHANNELS)
    centre = torch.tensor([[0.15, 0.55], [0.3, 0.8], [0.42, 0.6], [0.7, 0.9]])
    lines = torch.exp(-0.5 * ((axis - centre[..., None]) / 0.02).square()).sum(1)
    lines = lines * torch.tensor([1.0, 3.0, 2.0, 1.5])[:, None]
    share = torch.distributions.Dirichlet(torch.ones(ELEMENTS)).sample((SPECTRA,))
    background = 0.2 + 0.1 * axis
    return share @ lines + background + 0.01 * torch.randn(SPECTRA, CHANNELS, generator=gen)


class Unmixer(nn.Module):
    """Encoder of shares; the decoder's rows are the spectra of the pure elements."""

    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(CHANNELS, width), nn.SiLU(), nn.Linear(width, ELEMENTS))
        self.pure = nn.Parameter(0.3 + 0.1 * torch.rand(ELEMENTS, CHANNELS))
        self.background = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, y):
        share = torch.softmax(self.encoder(y), 1)
        return nn.functional.linear(share, self.pure.T, self.background)


def rough(model, y, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 17, growth_interval=20)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            fit = model(y)
        loss = (fit.float() - y).square().sum(1).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 9:
            print(f"adam {step:3d} loss {loss.item():.5f} scale {scaler.get_scale():g}")


def polish(model, y, steps):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=6, history_size=8, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad(set_to_none=True)
        loss = (model(y) - y).square().sum(1).mean()
        loss.backward()
        return loss

    for step in range(steps):
        loss = optimizer.step(closure)
        if step % 5 == 4:
            print(f"lbfgs {step:2d} loss {loss.item():.5f}")


def main():
    y = observations(torch.Generator().manual_seed(20))
    model = Unmixer()
    watch(model)
    rough(model, y, steps=60)
    polish(model, y, steps=20)


if __name__ == "__main__":
    main()
