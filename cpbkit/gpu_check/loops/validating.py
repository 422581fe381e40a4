# expect: VALIDATION_IN_STEP
import torch
from torch import nn

x, y = torch.randn(4096, 64), torch.randn(4096, 1)
x_val, y_val = torch.randn(2048, 64), torch.randn(2048, 1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())


def evaluate():
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(a), b) for a, b in zip(x_val.split(256), y_val.split(256), strict=True)]
    model.train()
    return sum(losses) / len(losses)


best = None
for step in range(600):
    rows = torch.randint(0, len(x), (128,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    error = evaluate()  # here
    best = error if best is None else min(best, error)
