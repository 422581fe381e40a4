# expect: HOST_BOUND
import torch
from torch import nn

x, y = torch.randn(2048, 16), torch.randn(2048, 1)
deep = [part for _ in range(40) for part in (nn.Linear(8, 8), nn.ReLU())]
model = nn.Sequential(nn.Linear(16, 8), *deep, nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for step in range(600):
    rows = torch.randint(0, len(x), (32,))
    optimizer.zero_grad()
    loss = ((model(x[rows]) - y[rows]) ** 2).mean()
    loss.backward()
    optimizer.step()  # here
