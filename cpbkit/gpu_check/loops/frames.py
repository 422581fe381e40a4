# expect: DATA_STARVED
import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self):
        self.bars = pd.DataFrame(np.random.default_rng(0).normal(size=(6000, 8)), columns=list("abcdefgh"))

    def __len__(self):
        return len(self.bars) - 41

    def __getitem__(self, i):
        window = self.bars.iloc[i : i + 41].to_numpy("float32", copy=True)  # here
        return window[:40], window[40:, 0]


model = nn.Sequential(nn.Flatten(), nn.Linear(320, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(12):
    for xb, yb in DataLoader(Windows(), batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = (model(xb) - yb).abs().mean()
        loss.backward()
        optimizer.step()
