"""TorchRL's Trainer trains with these collectors in place of its own."""

from __future__ import annotations

from typing import Any

import pytest

import distcollect as dc

pytestmark = pytest.mark.filterwarnings("ignore:The .* hook stage:FutureWarning")


@pytest.fixture(scope="module")
def training() -> Any:
    """Imported late: it sets multiprocessing to spawn, and AsyncVectorEnvs start slowly then."""
    pytest.importorskip("torchrl", reason="the torchrl extra is not installed")
    from helpers import torchrl_training  # noqa: PLC0415

    return torchrl_training


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (dc.Collector, {"init_random_frames": 20}),
        (dc.MultiSyncCollector, {"num_workers": 2}),
        (dc.MultiAsyncCollector, {"num_workers": 1, "track_policy_version": True}),
    ],
)
def test_trains(training: Any, kind: Any, settings: dict[str, Any]) -> None:
    policy = training.make_policy()
    collector = kind(training.make_env, policy, frames_per_batch=20, total_frames=80, **settings)
    # Trainers that are made from a configuration ask for this.
    assert isinstance(collector, training.BaseCollector)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    trainer = training.make_trainer(collector, policy, 80)
    trainer.train()
    assert trainer.collected_frames == 80
    assert collector.closed
    assert collector.policy_version >= 3
    assert any(not before[name].equal(value) for name, value in policy.state_dict().items())
    assert trainer.state_dict()["collector"]["frames"] == 80


@pytest.mark.parametrize("kind", [dc.AsyncCollector, dc.MultiAsyncCollector])
def test_trains_while_the_buffer_is_filled_in_the_background(training: Any, kind: Any) -> None:
    policy = training.make_policy()
    collector = kind(
        [training.make_env] if kind is dc.MultiAsyncCollector else training.make_env,
        policy,
        frames_per_batch=20,
        total_frames=-1,
        replay_buffer=training.make_buffer(),
    )
    trainer = training.make_trainer(collector, policy, 10**9, async_collection=True)
    # A run that ends after a number of frames may end before its first training step.
    trainer.register_op(
        "post_steps", lambda: collector.policy_version >= 3 and trainer.request_stop()
    )
    trainer.train()
    assert collector.closed
    assert collector.policy_version >= 3
    assert collector.replay_buffer.write_count >= 20
