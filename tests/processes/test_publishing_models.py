"""Models that are published along with the policy."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from helpers.publishing import Env
from torch import nn

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


class TestWhatTravels:
    def test_models_and_what_refers_to_them(self) -> None:
        """Policy and env maker see the published modules, and all have one version."""
        scale, shift, net = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 2)
        models = {"scale": scale, "shift": shift, "net": net}

        class Shifted(Env):
            def step(self, action: Any) -> Any:
                return np.full(1, float(shift.bias)), float(shift.weight), False, False, {}

        def policy(observation: torch.Tensor) -> Any:
            seen = {name: m.bias[:1].expand(len(observation)) for name, m in models.items()}
            return net(observation.float()).argmax(-1), seen

        with dc.RPCDataCollector(
            Shifted, policy, num_workers=2, frames_per_batch=8, sync=True, models=models
        ) as collector:
            for value in (3.0, 4.0):
                for model in models.values():
                    model.weight.data.fill_(value)
                    model.bias.data.fill_(value)
                collector.update_policy_weights_()
                batch = collector.next()
                assert all((batch[name] == value).all() for name in models)
                assert (batch["next", "observation"] == value).all()
                assert (batch["next", "reward"] == value).all()
            new = {name: nn.Linear(1, 2 if name == "net" else 1) for name in models}
            collector.update_policy_weights_(new)
            assert (collector.next()["scale"] == float(new["scale"].bias.detach())).all()
            with pytest.raises(dc.WeightsError, match=r"missing key 'shift.weight'"):
                collector.update_policy_weights_({"scale": scale, "net": net})
