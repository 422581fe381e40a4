# expect: DEBUG_MODE_ON
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", message="Anomaly Detection")
x, y = torch.randn(2048, 32), torch.randn(2048, 1)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(1500):
    rows = torch.randint(0, len(x), (64,))
    with torch.autograd.detect_anomaly():  # here
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
