# expect: FLOAT64
import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(0)
x, y = torch.from_numpy(rng.normal(size=(2048, 64))), torch.from_numpy(rng.normal(size=(2048, 1)))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).double()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(12):
    for rows in torch.randperm(len(x)).split(128):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])  # here
        loss.backward()
        optimizer.step()
