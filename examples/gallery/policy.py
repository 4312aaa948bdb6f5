"""Reinforcement learning: after each step the policy's weights go to a plain copy that samples.

torchrun --standalone --nproc-per-node 2 examples/gallery/policy.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_ext

STEPS, SAMPLES, ACTIONS = 60, 64, 4


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ACTIONS, 32), nn.Tanh(), nn.Linear(32, ACTIONS))


@torch.no_grad()
def sample(sampler: nn.Module, step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions, and rewards: 1 for the action that the state names, else 0."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    states = torch.eye(ACTIONS)[torch.randint(ACTIONS, (SAMPLES,), generator=draw)]
    actions = torch.multinomial(sampler(states).softmax(1), 1, generator=draw).squeeze(1)
    return states, actions, (actions == states.argmax(1)).float()


def loss_of(policy: nn.Module, states: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """Of REINFORCE, with the mean reward as the baseline."""
    chosen = policy(states).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
    return -(chosen * (rewards - rewards.mean())).mean()


def main() -> nn.Module:
    dist.init_process_group("gloo")
    policy = zero_ext.shard(make_policy(), stage=3)
    optimizer = zero_ext.optim.SGD(policy.parameters(), lr=1.0)
    sampler = make_policy()  # stands for an inference engine, in this process or another one
    for step in range(STEPS):
        states, actions, rewards = sample(sampler, step, dist.get_rank())
        loss_of(policy, states, actions, rewards).backward()
        optimizer.step()
        optimizer.zero_grad()
        # On every rank. Two buckets of whole parameters are the most that exists at once.
        for name, tensor in zero_ext.iter_full_params(policy):
            sampler.get_parameter(name).data.copy_(tensor)
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: mean reward {rewards.mean().item():.3f}")
    dist.destroy_process_group()
    return policy


if __name__ == "__main__":
    main()
