# expect: DEVICE_BOUND
import torch
from torch import nn

x, y = torch.randn(8192, 64), torch.randn(8192, 1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(40):
    total = 0.0
    for rows in torch.randperm(len(x)).split(128):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total:.3f}")
