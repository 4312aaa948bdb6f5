"""A word model with an LSTM: its hidden state outlives a step, the rate falls by evaluation. It
knows nothing of zero_ext."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, words, length = dist.get_rank(), 29, 6


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(words, 12)
        self.rnn = nn.LSTM(12, 12, 2, batch_first=True)
        self.decoder = nn.Linear(12, words)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.decoder.weight = self.encoder.weight

    def forward(self, rows, hidden):
        output, hidden = self.rnn(self.encoder(rows), hidden)
        return F.log_softmax(self.decoder(output), -1), hidden


torch.manual_seed(1111)
model = RNNModel()
model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
text = torch.randint(0, words, (2, 4, 61), generator=torch.Generator().manual_seed(9))
losses = []
for _ in range(2):
    model.train()
    hidden = None
    for begin in range(0, 60, length):
        rows = text[rank % 2, :, begin : begin + length + 1]
        hidden = hidden and tuple(h.detach() for h in hidden)
        output, hidden = model(rows[:, :-1], hidden)
        loss = F.nll_loss(output.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        output, _ = model(text[0, :, :-1], None)
        scheduler.step(F.nll_loss(output.flatten(0, 1), text[0, :, 1:].flatten()).item())
losses = [torch.tensor(losses).mean().item(), *losses]
