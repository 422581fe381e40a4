# expect: SAMPLE_BY_SAMPLE
import torch
from torch import nn

x, y = torch.randn(1024, 64), torch.randn(1024, 1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(20):
    for xb, yb in zip(x.split(32), y.split(32), strict=True):
        optimizer.zero_grad()
        loss = 0.0
        for i in range(len(xb)):
            loss = loss + nn.functional.mse_loss(model(xb[i]), yb[i])  # here
        (loss / len(xb)).backward()
        optimizer.step()
