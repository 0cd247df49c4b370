"""The basic digits example with mixed precision and gradient clipping."""
from __future__ import print_function
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout2d(0.1)
        self.dropout2 = nn.Dropout(0.2)
        self.fc1 = nn.Linear(256, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        output = F.log_softmax(x, dim=1)
        return output


class Digits(torch.utils.data.Dataset):
    """Ten stroke patterns of 12 x 12 pixels, shifted and noisy."""

    def __init__(self, n, seed):
        shapes = torch.Generator().manual_seed(0)
        proto = (F.interpolate(torch.rand(10, 1, 5, 5, generator=shapes), size=12, mode="bilinear") > 0.55).float()
        gen = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 10, (n,), generator=gen)
        shift = torch.randint(-1, 2, (n, 2), generator=gen)
        self.x = torch.stack([torch.roll(proto[y], tuple(s.tolist()), (1, 2)) for y, s in zip(self.y, shift)])
        self.x += 0.25 * torch.randn(n, 1, 12, 12, generator=gen)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def train(args, model, train_loader, optimizer, scaler, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(data)
            loss = F.nll_loss(output, target)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), args.clip)  # CAUSE
        scaler.step(optimizer)
        scaler.update()
        if batch_idx % args.log_interval == 0:
            print('Train Epoch: {} [{}/{}]\tLoss: {:.6f}'.format(
                epoch, batch_idx * len(data), len(train_loader.dataset), loss.item()))


def test(model, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction='sum').item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    n = len(test_loader.dataset)
    print('\nTest set: Average loss: {:.4f}, Accuracy: {}/{}\n'.format(test_loss / n, correct, n))


def main():
    parser = argparse.ArgumentParser(description='Digits example')
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--lr', type=float, default=1.0)
    parser.add_argument('--gamma', type=float, default=0.7)
    parser.add_argument('--clip', type=float, default=12)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--log-interval', type=int, default=10)
    args = parser.parse_args([])

    torch.manual_seed(args.seed)
    train_loader = torch.utils.data.DataLoader(Digits(960, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = torch.utils.data.DataLoader(Digits(200, 2), batch_size=100)
    model = Net()
    watch(model)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, scaler, epoch)
        test(model, test_loader)
        scheduler.step()


if __name__ == '__main__':
    main()
