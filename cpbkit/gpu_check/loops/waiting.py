# expect: SYNC_BOUND
# needs: gpu
import torch
from torch import nn

x, y = torch.randn(8192, 64, device="cuda"), torch.randn(8192, 1, device="cuda")
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
history = []
for epoch in range(40):
    for rows in torch.randperm(len(x), device="cuda").split(128):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        history.append(loss.item())  # here
