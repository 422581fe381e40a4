# expect: PYTHON_OR_IO_IN_STEP
import torch
from torch import nn

x, y = torch.randn(2048, 32), torch.randn(2048, 1)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.Adam(model.parameters())
norms = {}


def note(module, inputs, output):
    norms[module] = sorted(float(f"{value:.3f}") for value in output.flatten().tolist())[-10:]  # here


for layer in model:
    layer.register_forward_hook(note)
for step in range(250):
    rows = torch.randint(0, len(x), (64,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
