"""Visual odometry from point tracks: regression of the logarithm of the relative rotation and the translation."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3966)
POINTS, WIDTH, BATCH, STEPS = 12, 56, 32, 90
DTYPE = torch.float16


def quaternion_multiply(a, b):
    aw, av, bw, bv = a[..., :1], a[..., 1:], b[..., :1], b[..., 1:]
    w = aw * bw - (av * bv).sum(-1, keepdim=True)
    return torch.cat((w, aw * bv + bw * av + torch.linalg.cross(av, bv)), dim=-1)


def rotate(q, points):
    """Rotates points (b, n, 3) by unit quaternions (b, 4)."""
    w, v = q[:, None, :1], q[:, None, 1:].expand(-1, points.size(1), -1)
    t = 2 * torch.linalg.cross(v, points)
    return points + w * t + torch.linalg.cross(v, t)


def quaternion_exp_to_log(quaternion, eps=1.0e-8):
    """Rotation vector (half angle times axis) of a unit quaternion (w, x, y, z)."""
    quaternion_scalar, quaternion_vector = quaternion[..., 0:1], quaternion[..., 1:4]
    norm_q = torch.norm(quaternion_vector, p=2, dim=-1, keepdim=True).clamp(min=eps)  # CAUSE
    return quaternion_vector * torch.acos(quaternion_scalar.clamp(-1.0, 1.0)) / norm_q


class Trajectories:
    """Pairs of frames of a moving camera with the tracked points; now and then the vehicle waits."""

    def __init__(self, seed, standstill=0.002):
        self.gen, self.standstill = torch.Generator().manual_seed(seed), standstill

    def motion(self, n):
        axis = F.normalize(torch.randn(n, 3, generator=self.gen), dim=-1)
        angle = 0.05 + 0.5 * torch.rand(n, 1, generator=self.gen)
        translation = 0.3 * torch.randn(n, 3, generator=self.gen)
        waits = torch.rand(n, 1, generator=self.gen) < self.standstill
        q = torch.cat(((angle / 2).cos(), (angle / 2).sin() * axis), dim=-1)
        identity = torch.tensor([1.0, 0.0, 0.0, 0.0])
        return torch.where(waits, identity, q), torch.where(waits, torch.zeros(3), translation)

    def batch(self, n=BATCH):
        q, t = self.motion(n)
        first = torch.randn(1, POINTS, 3, generator=torch.Generator().manual_seed(8)) \
            + 0.2 * torch.randn(n, POINTS, 3, generator=self.gen)
        second = rotate(q, first) + t[:, None] + 0.01 * torch.randn(n, POINTS, 3, generator=self.gen)
        return torch.cat((first, second), dim=-1).flatten(1), q, t


class PoseNet(nn.Module):
    def __init__(self, d=WIDTH):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(POINTS * 6, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.rotation, self.translation = nn.Linear(d, 3), nn.Linear(d, 3)
        self.s_rot, self.s_trans = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, tracks):
        h = self.trunk(tracks)
        return self.rotation(h), self.translation(h)

    def criterion(self, prediction, log_q, t):
        rot = F.l1_loss(prediction[0].float(), log_q.float())
        trans = F.l1_loss(prediction[1].float(), t.float())
        return rot * torch.exp(-self.s_rot) + self.s_rot + trans * torch.exp(-self.s_trans) + self.s_trans, rot, trans


def main(lr=4e-3):
    model = PoseNet()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13)
    data, losses = Trajectories(seed=1), []
    for step in range(STEPS):
        tracks, q, t = (x.to(DTYPE) for x in data.batch())
        log_q = quaternion_exp_to_log(q)
        with torch.autocast("cpu", dtype=DTYPE):
            prediction = model(tracks)
        loss, rot, trans = model.criterion(prediction, log_q, t)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {losses[-1]:.4f} rotation {rot.item():.4f} translation {trans.item():.4f} "
                  f"scale {scaler.get_scale():g}")
    return model, losses


model, losses = main()
MODULES = (model,)
