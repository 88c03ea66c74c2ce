"""A party's models in training."""

from __future__ import annotations

import copy

from torch import nn

from ...federated.training import optimizer_of
from .settings import Party, Settings


class State:
    """A party's models and their optimisers, small first."""

    def __init__(self, party: Party, how: Settings):
        kept = [party.model] if party.large is None else [party.model, party.large]
        self.models = [copy.deepcopy(model).eval() for model in kept]
        self.steps = [optimizer_of(model, how.local) for model in self.models]

    def tensors(self) -> list:
        return [[m.state_dict(), o.state_dict()] for m, o in zip(self.models, self.steps, strict=True)]

    def load(self, tensors: list) -> None:
        for model, steps, (weights, moments) in zip(self.models, self.steps, tensors, strict=True):
            model.load_state_dict(weights)
            steps.load_state_dict(moments)

    def copied(self, party: Party, how: Settings) -> State:
        new = State(party, how)
        new.load(copy.deepcopy(self.tensors()))
        return new

    @property
    def small(self) -> nn.Module:
        return self.models[0]
