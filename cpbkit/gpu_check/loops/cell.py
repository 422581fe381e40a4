# expect: HOST_BOUND
import torch
from torch import nn


class WrittenLSTM(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.hidden = hidden
        self.inner = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(4))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(4))
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), self.hidden)
        for t in range(x.shape[1]):
            i, f, g, o = (a(x[:, t]) + b(h) for a, b in zip(self.inner, self.outer, strict=True))  # here
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h)


x, y = torch.randn(512, 40, 8), torch.randn(512, 1)
model = WrittenLSTM(8, 16)
optimizer = torch.optim.Adam(model.parameters())
for step in range(150):
    rows = torch.randint(0, len(x), (32,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
