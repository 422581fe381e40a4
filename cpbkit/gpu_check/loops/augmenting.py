# expect: PYTHON_OR_IO_IN_STEP
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(30):
    for xb, yb in loader:
        frame = pd.DataFrame(xb.numpy())
        smooth = frame.rolling(5, min_periods=1).mean()  # here
        xb = torch.from_numpy(smooth.to_numpy("float32", copy=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        optimizer.step()
