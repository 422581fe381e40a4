# expect: DATA_STARVED
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

windows = TensorDataset(torch.randn(1024, 40, 8), torch.randn(1024, 1))
loader = DataLoader(windows, batch_size=32, shuffle=True, num_workers=2)
model = nn.Sequential(nn.Flatten(), nn.Linear(320, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(12):
    for xb, yb in loader:  # here
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
