# expect: DEVICE_BOUND
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = nn.Sequential(nn.Linear(8, 64), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(64 * 32, 1))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
loader = DataLoader(TensorDataset(torch.randn(1024, 32, 8), torch.randn(1024, 1)), batch_size=32, shuffle=True)
for epoch in range(6):
    for xb, yb in loader:
        loss = nn.functional.huber_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
