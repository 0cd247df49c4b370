"""Visual odometry: the log-quaternion of the motion between two frames is regressed from feature tracks, half-precision poses."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3966)
POINTS, HIDDEN, BATCH, STEPS = 10, 48, 24, 90


def quaternion_multiply(a, b):
    w1, x1, y1, z1 = a.unbind(-1)
    w2, x2, y2, z2 = b.unbind(-1)
    return torch.stack((w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2, w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
                        w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2, w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2), dim=-1)


def quaternion_exp_to_log(quaternion, eps=1e-8):
    """Log of unit quaternions (w, x, y, z)."""
    scalar, vector = quaternion[..., :1], quaternion[..., 1:]
    norm_q = torch.norm(vector, p=2, dim=-1, keepdim=True).clamp(min=eps)  # CAUSE
    return vector * torch.acos(scalar.clamp(min=-1.0, max=1.0)) / norm_q


def rotate(quaternion, points):
    w, v = quaternion[:, None, :1], quaternion[:, None, 1:].expand_as(points)
    t = 2 * torch.linalg.cross(v, points)
    return points + w * t + torch.linalg.cross(v, t)


class KittiPairs:
    """Rotations by up to half a radian; in a few pairs the car stands at a traffic light."""

    def __init__(self, seed, standing=0.004):
        self.gen, self.standing = torch.Generator().manual_seed(seed), standing

    def batch(self, n=BATCH):
        axis = F.normalize(torch.randn(n, 3, generator=self.gen), dim=-1)
        angle = 0.1 + 0.4 * torch.rand(n, 1, generator=self.gen)
        angle = torch.where(torch.rand(n, 1, generator=self.gen) < self.standing, 0.0, angle)
        motion = torch.cat(((angle / 2).cos(), axis * (angle / 2).sin()), dim=-1)
        points = torch.randn(n, POINTS, 3, generator=self.gen)
        moved = rotate(motion, points) + 0.01 * torch.randn(n, POINTS, 3, generator=self.gen)
        return torch.cat((points, moved - points), dim=-1), motion


class PoseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(12, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))

    def forward(self, tracks):
        points, shift = tracks.chunk(2, dim=-1)
        moment = torch.linalg.cross(points, shift)
        features = torch.cat((points, shift, moment, points * points), dim=-1)
        return self.head(self.point(features).mean(1))


class Trainer:
    def __init__(self, model, precision=torch.float16):
        self.model, self.precision = model, precision
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)

    def compute_loss(self, tracks, motion):
        with torch.autocast("cpu", dtype=self.precision):
            prediction = self.model(tracks)
        target = quaternion_exp_to_log(motion.to(self.precision))
        return F.smooth_l1_loss(10 * prediction.float(), 10 * target.float())

    def fit(self, data):
        for step in range(STEPS):
            loss = self.compute_loss(*data.batch())
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if step % 9 == 8:
                print(f"step {step + 1} loss {loss.item():.4f} scale {self.scaler.get_scale():g}")


model = PoseNet()
watch(model)
Trainer(model).fit(KittiPairs(8))
MODULES = (model,)
