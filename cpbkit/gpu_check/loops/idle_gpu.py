# expect: NO_WORK_ON_GPU
# needs: gpu
import torch
from torch import nn

x, y = torch.randn(4096, 64), torch.randn(4096, 1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(30):
    for rows in torch.randperm(len(x)).split(128):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
