# expect: DEVICE_BOUND
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


def train(model, loader, optimizer):
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def validate(model, x, y):
    model.eval()
    return nn.functional.mse_loss(model(x), y).item()


model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(2048, 40, 8), torch.randn(2048, 1)), batch_size=64, shuffle=True)
for epoch in range(15):
    train(model, loader, optimizer)
    validate(model, torch.randn(256, 40, 8), torch.randn(256, 1))
