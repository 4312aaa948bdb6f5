"""torchdata's StatefulDataLoader over global batches: ``make test-packages``."""

import pytest
from torch.utils.data import Dataset

from zero_ext.data import GlobalBatches


class Indices(Dataset):
    def __len__(self):
        return 83

    def __getitem__(self, i):
        return i


def loader_of(world: int, rank: int, num_workers: int):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    batches = GlobalBatches(Indices(), 2, 12, num_replicas=world, rank=rank, seed=3)
    return batches, stateful.StatefulDataLoader(
        Indices(), batch_sampler=batches, num_workers=num_workers
    )


def read(batches, loader, first: int, steps: int) -> dict[tuple[int, int], list[int]]:
    """The samples by step and micro-batch."""
    iterator = iter(loader)
    return {
        (step, k): next(iterator).tolist()
        for step in range(first, first + steps)
        for k in batches.numbers(step)
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_state_goes_on_at_a_step_on_any_number_of_ranks(num_workers):
    expected = read(*loader_of(1, 0, 0), 0, 4)
    found = {}
    for rank in range(2):
        batches, loader = loader_of(2, rank, num_workers)
        found |= read(batches, loader, 0, 2)
        state = loader.state_dict()
    for rank in range(3 if num_workers == 0 else 2):
        batches, loader = loader_of(3 if num_workers == 0 else 2, rank, num_workers)
        loader.load_state_dict(state)
        iter(loader)
        assert (batches.epoch, batches.step) == (0, 2)
        loader.load_state_dict(state)
        found |= read(batches, loader, 2, 2)
    assert found == expected


def test_a_state_inside_a_step_is_an_error():
    _, loader = loader_of(2, 0, 0)
    next(iter(loader))
    state = loader.state_dict()
    _, loader = loader_of(2, 0, 0)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="inside step 0 of epoch 0, after 1 micro-batches"):
        iter(loader)
