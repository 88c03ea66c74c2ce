"""Batches of shared data sets by torch's own DataLoader, with row numbers that are public."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, Subset, TensorDataset

import sectorch
from sectorch import Session, SharedTensor
from sectorch.errors import SecretAccessError


def shared_set(session: Session) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    x, y = torch.arange(40.0).view(20, 2) / 64, torch.arange(20)
    shared = (sectorch.share(v, session=session, owner=owner) for v, owner in ((x, "A"), (y, "S")))
    return TensorDataset(*shared), x, y


@pytest.mark.parametrize("reference", [True, False])
def test_batches_are_those_of_the_plain_data(reference: bool):
    shared, x, y = shared_set(Session(reference=reference))
    loaders = [
        DataLoader(data, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3))
        for data in (shared, TensorDataset(x, y))
    ]
    with sectorch.profile() as seen:
        batches = list(loaders[0])
    assert not list(seen.ledger), "a batch by public rows takes no message"
    for (rows, labels), (plain, numbers) in zip(batches, loaders[1], strict=True):
        assert isinstance(rows, SharedTensor) and isinstance(labels, SharedTensor)
        assert torch.equal(rows.reveal(), plain) and torch.equal(labels.reveal(), numbers)


def test_whole_batches_at_once_and_joined_sets():
    """A sampler of batches takes a batch in one step instead of row by row; sets of several owners are joined."""
    first, x, _ = shared_set(session := Session(reference=True))
    second, *_ = shared_set(session)
    sampler = BatchSampler(RandomSampler(first, generator=torch.Generator().manual_seed(1)), 5, drop_last=False)
    found = [rows.reveal() for rows, _ in DataLoader(first, sampler=sampler, batch_size=None)]
    assert [len(rows) for rows in found] == [5, 5, 5, 5]
    assert torch.equal(torch.cat(found).sort(0).values, x)
    joined = list(DataLoader(ConcatDataset([first, Subset(second, range(4))]), batch_size=24))
    assert torch.equal(joined[0][0].reveal(), torch.cat((x, x[:4])))


def test_processes_that_would_copy_shares_are_refused():
    shared, *_ = shared_set(Session())
    with pytest.raises(SecretAccessError):
        pickle.dumps(shared)
