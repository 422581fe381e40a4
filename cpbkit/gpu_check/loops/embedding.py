# expect: DENSE_EMBEDDING
import torch
from torch import nn

users, ratings = torch.randint(0, 100_000, (20_000,)), torch.rand(20_000)
table, head = nn.Embedding(100_000, 32), nn.Linear(32, 1)  # here
optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()])
for epoch in range(2):
    for rows in torch.randperm(len(users)).split(256):
        optimizer.zero_grad()
        nn.functional.mse_loss(head(table(users[rows]))[:, 0], ratings[rows]).backward()
        optimizer.step()
