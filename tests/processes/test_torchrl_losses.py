"""Batches go unchanged through TorchRL's value estimators, losses and replay buffers."""

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tensordict.nn import TensorDictModule as Mod
from torch import nn

import distcollect as dc


@pytest.fixture(scope="module")
def torchrl():
    """Imported late: it sets multiprocessing to spawn, and AsyncVectorEnvs start slowly then."""
    return pytest.importorskip("torchrl", reason="the torchrl extra is not installed")


@pytest.fixture(scope="module")
def actor():
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    return ProbabilisticTensorDictSequential(
        Mod(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


@pytest.fixture(scope="module", params=["in-process", "rpc sync", "rpc async"])
def batch(request, actor):
    kind = {"frames_per_batch": 256, "envs_per_worker": 4}
    if request.param == "in-process":
        collector = dc.SyncDataCollector("CartPole-v1", actor, **kind)
    else:
        collector = dc.RPCDataCollector(
            "CartPole-v1", actor, num_workers=2, sync=request.param == "rpc sync", **kind
        )
    with collector:
        return collector.next()


def test_ppo(torchrl, batch, actor):
    from torchrl.objectives import ClipPPOLoss  # noqa: PLC0415
    from torchrl.objectives.value import GAE  # noqa: PLC0415

    critic = Mod(nn.Linear(4, 1), in_keys=["observation"], out_keys=["state_value"])
    batch = GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch.clone())
    losses = ClipPPOLoss(actor, critic)(batch)
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    assert all(parameter.grad is not None for parameter in actor.parameters())
    # The same weights chose the actions, so every importance ratio is 1.
    assert losses["kl_approx"].abs() < 1e-5
    assert losses["clip_fraction"] == 0
