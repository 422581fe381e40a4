# expect: GPU_IDLE_OUTSIDE_STEPS
import time

import torch
from torch import nn

x, y = torch.randn(2048, 64), torch.randn(2048, 1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())


def draw(history):
    time.sleep(0.2)  # here


history = []
for epoch in range(8):
    for rows in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    history.append(loss.item())
    draw(history)
