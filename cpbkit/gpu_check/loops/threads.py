# expect: FEW_THREADS
import torch
from torch import nn

torch.set_num_threads(1)  # here
x, y = torch.randn(2048, 512), torch.randn(2048, 1)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(12):
    for rows in torch.randperm(len(x)).split(256):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
