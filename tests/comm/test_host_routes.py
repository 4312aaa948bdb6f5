"""Gathers after an update, where several ranks share a host: each part goes once to each host."""

from itertools import product

import pytest
import torch
from harness import (
    MLP,
    ONE_UNIT_EACH,
    assert_bits,
    mean_square,
    rank_batches,
    reference_gradients,
)
from reference import OneProcess

import zero_ext
from zero_ext import _C

# Of each rank: hosts of one size, of several sizes, with ranks in turn, of one rank each.
HOSTS = [
    [0, 0, 1, 1],
    [0, 0, 0, 3, 3, 5],
    [0, 1, 0, 1, 0, 1, 0],
    [0, 1, 1, 1, 1, 5, 6, 6],
    [0, 1, 2, 3, 4],
    [0, 0, 0],
]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_each_part_reaches_every_rank_and_enters_each_host_once(hosts):
    routes = _C.HostRoutes(hosts)
    ranks = range(len(hosts))
    entries = []
    for start, to in product(ranks, ranks):
        source = routes.source(start, to)
        if hosts[start] == hosts[to]:
            assert source == start
        elif source == start:
            entries.append((start, hosts[to]))
        else:  # from a rank of the same host, which gets it from where it begins
            assert hosts[source] == hosts[to] and routes.source(start, source) == start
    assert sorted(entries) == sorted((r, h) for r in ranks for h in set(hosts) - {hosts[r]})


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_the_parts_of_a_host_go_to_different_ranks_of_another(hosts):
    routes = _C.HostRoutes(hosts)
    for here, there in product(set(hosts), set(hosts)):
        if here == there:
            continue
        members = [r for r, host in enumerate(hosts) if host == there]
        parts = [r for r, host in enumerate(hosts) if host == here]
        received = [sum(routes.source(part, to) == part for part in parts) for to in members]
        assert max(received) - min(received) <= 1


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("arrangement", ["pairs", "in turn", "one apart"])
def test_parameters_have_the_bits_of_one_process(
    stage, arrangement, mesh, rank, world, monkeypatch
):
    host = {"pairs": rank // 2, "in turn": rank % 2, "one apart": int(rank == 1)}[arrangement]
    monkeypatch.setenv("ZERO_EXT_CROSS_MEMORY", str(1 + host))
    model = zero_ext.shard(MLP(7), stage, mesh=mesh, bucket_mb=ONE_UNIT_EACH)
    model.set_gradient_divide_factor(1.0)
    optimizer = zero_ext.optim.SGD(model.parameters(), lr=0.1)
    plain = OneProcess(MLP(7), lambda masters: torch.optim.SGD(masters, lr=0.1))
    for step in range(3):
        batches = rank_batches((4, 5), world, step)
        mean_square(model, batches[0][rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.step(reference_gradients(lambda: plain.model, batches, world))
    with model.summon_full_params():
        for name, parameter in model.named_parameters():
            assert_bits(parameter, plain.parameters[name], name)
