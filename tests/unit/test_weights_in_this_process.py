"""Weights of a collector that has no workers."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from helpers.envs import SamplingEnv
from helpers.revealing_policy import Revealing, check_whole

import distcollect as dc

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules


def test_in_process_weights_are_copied_in_or_shared() -> None:
    policy = Revealing()
    with dc.SyncDataCollector(SamplingEnv, policy, frames_per_batch=4) as collector:
        policy.fill(0)
        check_whole(collector.next().unsqueeze(0))
        collector.update_policy_weights_(Revealing(value=1))
        assert policy.first == 1
        check_whole(collector.next().unsqueeze(0))
        policy.fill(2)
        collector.update_policy_weights_()
        check_whole(collector.next().unsqueeze(0))
        assert collector.policy_version == 2
        with pytest.raises(TypeError, match="no workers"):
            collector.update_policy_weights_(policy, worker_ids=0)
        with pytest.raises(dc.WeightsError, match="missing key 'first'"):
            collector.update_policy_weights_({"large": policy.large})
        assert policy.first == 2
