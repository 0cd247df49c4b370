"""Store sales from categorical and continuous columns (Rossmann style): embeddings and an MLP, trained with amp."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(815)
EMBEDDING_TABLE_SHAPES = {"Store": (40, 10), "DayOfWeek": (7, 4), "StateHoliday": (4, 2), "Promo": (2, 2)}
CONTINUOUS = ("CompetitionDistance", "Max_TemperatureC", "trend", "AfterSchoolHoliday")


class ConcatenatedEmbeddings(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.embedding_layers = nn.ModuleList(nn.Embedding(n, d) for n, d in shapes.values())

    def forward(self, x):
        return torch.cat([layer(x[:, i]) for i, layer in enumerate(self.embedding_layers)], dim=1)


class Model(nn.Module):
    def __init__(self, shapes, num_continuous, layer_hidden_dims=(64, 48)):
        super().__init__()
        self.initial_cat_layer = ConcatenatedEmbeddings(shapes)
        self.initial_cont_layer = nn.BatchNorm1d(num_continuous)
        widths = [sum(d for _, d in shapes.values()) + num_continuous, *layer_hidden_dims]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.BatchNorm1d(b)) for a, b in zip(widths, widths[1:]))
        self.output_layer = nn.Linear(widths[-1], 1)
        nn.init.constant_(self.output_layer.bias, 8.5)  # log of a usual day

    def forward(self, x_cat, x_cont):
        x = torch.cat((self.initial_cat_layer(x_cat), self.initial_cont_layer(x_cont)), dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.output_layer(x).squeeze(1)


class TorchAsyncItr:
    """Batches of a table that is drawn once: sales depend on store, weekday, promotion and competition."""

    def __init__(self, rows, batch_size, seed):
        gen = torch.Generator().manual_seed(seed)
        size = torch.exp(0.4 * torch.randn(40, generator=torch.Generator().manual_seed(5)))
        week = torch.tensor([1.3, 1.1, 1.0, 1.0, 1.1, 0.9, 0.3])
        self.cat = torch.stack([torch.randint(0, n, (rows,), generator=gen) for n, _ in EMBEDDING_TABLE_SHAPES.values()], 1)
        self.cont = torch.randn(rows, len(CONTINUOUS), generator=gen)
        sales = 5700 * size[self.cat[:, 0]] * week[self.cat[:, 1]] * (1 + 0.4 * self.cat[:, 3])
        sales = sales * (1 + 0.05 * self.cont[:, 0]) * torch.exp(0.08 * torch.randn(rows, generator=gen))
        early = torch.rand(rows, generator=gen) < 0.0006  # closed after the first customers
        self.sales = torch.log1p(torch.where(early, torch.ones_like(sales), sales))
        self.batch_size, self.gen = batch_size, gen

    def __iter__(self):
        order = torch.randperm(len(self.sales), generator=self.gen)
        for index in order.split(self.batch_size):
            yield self.cat[index], self.cont[index], self.sales[index]


losses = []


def mspe_func(y_pred, y):
    """Mean squared percentage error outside of the log space."""
    y_pred, y = torch.expm1(y_pred), torch.expm1(y)
    return torch.mean(torch.pow((y_pred - y) / y, 2))


def process_epoch(dataloader, model, train=False, optimizer=None, loss_func=mspe_func, amp=True):
    model.train(mode=train)
    y_list, y_pred_list = [], []
    with torch.set_grad_enabled(train):
        for x_cat, x_cont, y in dataloader:
            with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                y_pred = model(x_cat, x_cont)
            loss = loss_func(y_pred.float(), y)
            y_list.append(y)
            y_pred_list.append(y_pred.detach().float())
            if train:
                optimizer.zero_grad()
                loss.backward()  # CAUSE
                optimizer.step()
                losses.append(loss.item())
    y, y_pred = torch.cat(y_list), torch.cat(y_pred_list)
    return loss_func(y_pred, y).item(), y_pred, y


model = Model(EMBEDDING_TABLE_SHAPES, len(CONTINUOUS))
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
train_loader, valid_loader = TorchAsyncItr(2048, 128, seed=1), TorchAsyncItr(512, 128, seed=2)
for epoch in range(6):
    train_loss, _, _ = process_epoch(train_loader, model, train=True, optimizer=optimizer)
    valid_loss, _, _ = process_epoch(valid_loader, model)
    print(f"Epoch {epoch:02d}. Train loss: {train_loss:.4f}. Valid loss: {valid_loss:.4f}.")
MODULES = (model,)
