"""What users do to a model in half precision between its steps, drawn at random."""

import copy

import torch
from harness import Odd, Tied, mean_square, rank_data
from setups import SMALL_BUCKET_MB
from torch.distributed.fsdp import MixedPrecisionPolicy

import zero_ext

BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16)
# On which host a rank is.
HOSTS = {
    "each alone": lambda rank: rank,
    "pairs": lambda rank: rank // 2,
    "in turn": lambda rank: rank % 2,
    "one apart": lambda rank: int(rank == 1),
}
GROUP = 512  # elements, whose marks lie together


class MuonAndAdamW:
    """Each of the two steps its own parameters."""

    def __init__(self, model):
        muon, adamw, _ = zero_ext.optim.muon_groups(model)
        self.each = [zero_ext.optim.Muon(muon, lr=1e-4)] if muon else []
        self.each.append(zero_ext.optim.AdamW(adamw, lr=1e-4))
        self.param_groups = [group for each in self.each for group in each.param_groups]

    def step(self):
        for each in self.each:
            each.step()

    def zero_grad(self):
        for each in self.each:
            each.zero_grad()


OPTIMIZERS = {
    "AdamW": lambda m: zero_ext.optim.AdamW(m.parameters(), lr=1e-4),
    "int8": lambda m: zero_ext.optim.AdamW(m.parameters(), lr=1e-4, state_dtype="int8"),
    "bf16": lambda m: zero_ext.optim.AdamW(m.parameters(), lr=1e-4, state_dtype="bf16"),
    "SGD": lambda m: zero_ext.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
    "wrap": lambda m: zero_ext.optim.wrap(torch.optim.RMSprop, m.parameters(), lr=1e-5),
    "Muon": MuonAndAdamW,
}


def sharded(make, stage, mesh, optimizer="AdamW", bucket_mb=SMALL_BUCKET_MB, **options):
    torch.manual_seed(3)
    model = make()
    zero_ext.shard(model, stage, mesh=mesh, bucket_mb=bucket_mb, mp_policy=POLICY, **options)
    return model, OPTIMIZERS[optimizer](model)


def batch_of(model, rank):
    if isinstance(model, Tied):
        return (torch.arange(6).view(2, 3) + rank) % 13
    shape = (2, 3, 4, 4) if isinstance(model, Odd) else (4, 5)
    return rank_data(shape, rank, dtype=BF16)


def step(model, optimizer, rank):
    mean_square(model, batch_of(model, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


class Edits:
    """What a user may do between two steps, each on all ranks with the same values."""

    def __init__(self, model, optimizer, rank, generator, path):
        self.model, self.optimizer, self.rank, self.generator = model, optimizer, rank, generator
        self.path, self.is_saved = path, False
        self.saved = copy.deepcopy(model.state_dict())
        self.kept: dict[str, torch.Tensor] = {}

    def run(self, name: str) -> None:
        getattr(self, name)()

    def pick(self) -> str:
        return self.generator.choice([name for name, _ in self.model.named_parameters()])

    def step(self):
        step(self.model, self.optimizer, self.rank)

    def skip(self):
        """A step without gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def write(self):
        with zero_ext.summon_full_params(self.model), torch.no_grad():
            parameter = self.model.get_parameter(self.pick())
            some = torch.arange(parameter.numel()).view(parameter.shape) % 5 == 0
            parameter.mul_(1 + 2 * some)

    def write_and_restore(self):
        name = self.pick()
        with zero_ext.summon_full_params(self.model), torch.no_grad():
            parameter = self.model.get_parameter(name)
            if name in self.kept:
                parameter.copy_(self.kept.pop(name))
            else:
                self.kept[name] = parameter.clone()
                parameter.zero_()

    def set(self):
        name = self.pick()
        parameter = self.model.get_parameter(name)
        zero_ext.set_full_param(parameter, torch.full(parameter.shape, 0.125))

    def load(self):
        self.model.load_state_dict(self.saved)

    def checkpoint(self):
        """Saved at the first call, loaded at others: masters, states and parameters."""
        if self.is_saved:
            zero_ext.checkpoint.load(self.path, self.model)
        else:
            zero_ext.checkpoint.save(self.path, self.model)
        self.is_saved = True

    def lr(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.generator.choice([0.0, 1e-6, 1e-3])


ACTIONS = ["step", "skip", "write", "write_and_restore", "set", "load", "checkpoint", "lr"]
