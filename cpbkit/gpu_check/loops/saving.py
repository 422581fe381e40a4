# expect: PYTHON_OR_IO_IN_STEP
import os
import tempfile

import torch
from torch import nn

x, y = torch.randn(4096, 32), torch.randn(4096, 1)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
path = os.path.join(tempfile.mkdtemp(), "last.pt")
for epoch in range(24):
    for rows in torch.randperm(len(x)).split(128):
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # here
