# expect: GRAPH_KEPT
import torch
from torch import nn

x, y = torch.randn(4096, 64), torch.randn(4096, 1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
total = 0
for epoch in range(60):
    for rows in torch.randperm(len(x)).split(128):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss  # here
