"""Weight updaters and weight-sync schemes of TorchRL: taken, or refused with what to write."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from helpers.envs import ProcessIdEnv
from helpers.publishing import Collect, Telling, collect, told
from tensordict import TensorDict

import distcollect as dc

__all__ = ["collect"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers can't import test modules

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    updaters = pytest.importorskip("torchrl.collectors.weight_update")
    schemes = pytest.importorskip("torchrl.weight_update")
    from torchrl.collectors.distributed import generic, rpc

SCHEMES = (
    schemes.SharedMemWeightSyncScheme,
    schemes.MultiProcessWeightSyncScheme,
    schemes.DistributedWeightSyncScheme,
    schemes.RPCWeightSyncScheme,
)
pytestmark = pytest.mark.filterwarnings("ignore:Creating .* is deprecated:DeprecationWarning")


def policy_weights(value: float) -> TensorDict:
    return TensorDict.from_module(Telling(value)).data


def own_updater(**methods: Any) -> Any:
    """A user's updater: as in TorchRL's documentation, it writes to the pipes of the workers."""

    def _sync_weights_with_worker(self: Any, *, worker_id: Any = None, server_weights: Any) -> None:
        self.collector.pipes[worker_id].send((server_weights, "update"))

    methods = {"_sync_weights_with_worker": _sync_weights_with_worker, **methods}
    return type("Mine", (updaters.WeightUpdaterBase,), methods)()


class TestTaken:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: updaters.VanillaWeightUpdater(
                weight_getter=lambda: policy_weights(7), policy_weights=policy_weights(0)
            ),
            lambda: updaters.MultiProcessedWeightUpdater(
                get_server_weights=lambda: policy_weights(7),
                policy_weights={"cuda:0": policy_weights(0)},
            ),
        ],
    )
    @pytest.mark.parametrize("called", [False, True])
    def test_where_the_weights_come_from(
        self, collect: Collect, make: Callable[[], Any], called: bool
    ) -> None:
        policy = Telling(1)
        collector = collect(policy, weight_updater=make if called else make())
        handle = collector.update_policy_weights_()
        assert handle.acknowledged == {0: 1, 1: 1}
        assert [told(collector.next(), row)["wide"] for row in (0, 1)] == [7, 7]
        assert all((parameter == 7).all() for parameter in policy.parameters())
        collector.update_policy_weights_(Telling(3))
        assert told(collector.next())["wide"] == 3

    def test_one_that_needs_the_weights_to_be_given(self, collect: Collect) -> None:
        collector = collect(Telling(1), weight_updater=updaters.RemoteModuleWeightUpdater)
        collector.update_policy_weights_(policy_weights(2))
        assert told(collector.next())["wide"] == 2

    def test_the_methods_of_a_users_updater(self, collect: Collect) -> None:
        called: list[Any] = []
        updater = own_updater(
            _get_server_weights=lambda self: policy_weights(7),
            _maybe_map_weights=lambda self, weights: (
                TensorDict.from_module(weights).data * 2
                if isinstance(weights, Telling)
                else weights * 3
            ),
            _skip_update=lambda self, worker_id: worker_id == skipped,
            all_worker_ids=lambda self: [1, 2],
            init=lambda self, *args, **kwargs: called.append((args, kwargs)),
        )
        skipped = 0
        updater.register_post_hook(lambda: called.append("pushed"))
        with pytest.warns(UserWarning, match=r"Mine: its _sync_weights_with_worker\(\) is not"):
            collector = collect(Telling(1), num_workers=3, weight_updater=updater)
        assert updater.collector is collector
        collector.init_updater(1, two=3)
        first = collector.update_policy_weights_()
        assert first.worker_ids == (1, 2)
        assert [told(collector.next(), row)["wide"] for row in range(3)] == [1, 21, 21]
        skipped = 1
        second = collector.update_policy_weights_(Telling(5), worker_ids=[0, 1])
        assert second.worker_ids == (0,)
        assert [told(collector.next(), row)["wide"] for row in range(3)] == [10, 21, 21]
        assert called == [((1,), {"two": 3}), "pushed", "pushed"]
        skipped = 2
        assert collector.update_policy_weights_(worker_ids=2) is None, "nobody is left"

    def test_schemes_that_send(self, collect: Collect) -> None:
        for kind in SCHEMES:
            scheme = kind()
            with pytest.warns(UserWarning, match=f"in place of {type(scheme).__name__}"):
                collector = collect(Telling(1), weight_sync_schemes={"policy": scheme})
            collector.update_policy_weights_(Telling(2))
            assert told(collector.next())["wide"] == 2
            collector.shutdown()

    def test_a_scheme_that_sends_nothing(self, collect: Collect) -> None:
        policy = Telling(1)
        collector = collect(
            policy,
            weight_sync_schemes={"policy": schemes.NoWeightSyncScheme()},
            update_at_each_batch=True,
        )
        for _ in range(3):
            assert collector.update_policy_weights_(policy.fill(2)) is None
            assert told(collector.next())["wide"] == 1
        assert collector.policy_version == 0

    @pytest.mark.parametrize("nothing", [None, {}])
    def test_no_schemes(self, collect: Collect, nothing: Any) -> None:
        collector = collect(weight_sync_schemes=nothing, weight_recv_schemes=nothing)
        collector.update_policy_weights_(Telling(2))
        assert told(collector.next())["wide"] == 2
        with dc.SyncDataCollector(
            ProcessIdEnv,
            Telling(),
            frames_per_batch=2,
            weight_sync_schemes=nothing,
            weight_updater=None
            if nothing is None
            else updaters.VanillaWeightUpdater(policy_weights=policy_weights(0)),
        ) as alone:
            assert alone.next().shape == (2,)


class TestNamesOfUpdatePolicyWeights:
    @pytest.mark.parametrize(
        "names",
        [
            {"policy": Telling(2)},
            {"weights": policy_weights(2)},
            {"weights": policy_weights(2), "model_id": "policy"},
            {"weights_dict": {"policy": policy_weights(2)}},
            {"weights": {0: policy_weights(2), 1: policy_weights(2)}},
        ],
        ids=["policy", "weights", "model_id", "weights_dict", "by-worker"],
    )
    def test_of_the_policy(self, collect: Collect, names: dict[str, Any]) -> None:
        collector = collect(Telling(1))
        collector.update_policy_weights_(**names)
        batch = collector.next()
        assert [told(batch, row)["wide"] for row in (0, 1)] == [2, 2]

    def test_of_a_function_that_holds_a_model(self, collect: Collect) -> None:
        """What it holds is published by the model's name, so the function may stand for it."""
        net = Telling(1)

        def policy(observation: Any) -> Any:
            return net(observation)

        for models in ({}, {"net": net}):
            collector = collect(policy, models=models)
            net.fill(3)
            collector.update_policy_weights_(collector.policy)
            assert told(collector.next(), 0)["wide"] == 3
            collector.shutdown()

    def test_of_models(self) -> None:
        policy, norm = parts = Telling(1), Telling(1)
        with dc.SyncDataCollector(
            ProcessIdEnv, policy, models={"norm": norm}, frames_per_batch=2
        ) as collector:
            collector.update_policy_weights_(weights=policy_weights(2), model_id="norm")
            assert [part.wide[0].item() for part in parts] == [1, 2]
            collector.update_policy_weights_(
                weights_dict={"policy": policy_weights(3), "norm": None}
            )
            assert [part.wide[0].item() for part in parts] == [3, 2]
            assert collector.policy_version == 2

    @pytest.mark.parametrize(
        ("names", "error", "message"),
        [
            ({"polcy": Telling()}, TypeError, "'polcy' .did you mean 'policy'"),
            ({"policy": Telling(), "weights": {}}, ValueError, "weights and policy are given"),
            (
                {"weights_dict": {"policy": Telling()}, "model_id": "policy"},
                ValueError,
                "weights_dict and model_id are given",
            ),
            ({"weights_dict": Telling()}, TypeError, "must be a dict of weights by name"),
            (
                {"weights": {}, "model_id": "critic"},
                ValueError,
                r"no module 'critic'. Pass it as models=\{'critic': module\}",
            ),
        ],
    )
    def test_refused(
        self, collect: Collect, names: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        for collector in (
            collect(Telling(1)),
            dc.SyncDataCollector(ProcessIdEnv, Telling(1), frames_per_batch=2),
        ):
            with collector, pytest.raises(error, match=message):
                collector.update_policy_weights_(**names)


def remote() -> Any:
    return rpc.RPCWeightUpdater([], None, [], policy_weights(0), 2)


def distributed() -> Any:
    return generic.DistributedWeightUpdater({}, policy_weights(0), 2, sync=True)


def scheme() -> Any:
    return schemes.SharedMemWeightSyncScheme()


class OwnScheme(schemes.SharedMemWeightSyncScheme):
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight_updater": lambda: None}, TypeError, "returned None: it must return"),
        ({"weight_updater": lambda: 5}, TypeError, "must be derived"),
        ({"weight_updater": scheme()}, TypeError, "pass it as weight_sync_schemes="),
        ({"weight_updater": remote()}, ValueError, "RPCWeightUpdater.*Leave weight_updater out"),
        ({"weight_updater": distributed}, ValueError, "DistributedWeightUpdater.*AutoUpdater"),
        (
            {"weight_updater": updaters.RayWeightUpdater(policy_weights(0), [])},
            ValueError,
            "RayWeightUpdater.*Leave weight_updater out",
        ),
        (
            {"weight_updater": lambda: own_updater(push_weights=lambda self, *_, **__: None)},
            ValueError,
            r"Mine: its push_weights\(\) sends",
        ),
        ({"weight_sync_schemes": [scheme()]}, TypeError, "dict of names"),
        ({"weight_sync_schemes": {"policy": "shared"}}, TypeError, "dict of names"),
        ({"weight_sync_schemes": {"norm": scheme()}}, ValueError, "models={'norm': module}"),
        ({"weight_sync_schemes": {"policy": OwnScheme()}}, ValueError, "OwnScheme can't be used"),
        ({"weight_recv_schemes": {"policy": scheme()}}, ValueError, "leave weight_recv_schemes"),
        (
            {"weight_sync_schemes": {"policy": scheme()}, "weight_updater": dc.TransportUpdater},
            ValueError,
            "both given",
        ),
        (
            {
                "weight_sync_schemes": {"policy": scheme(), "norm": schemes.NoWeightSyncScheme()},
                "models": {"norm": Telling()},
            },
            ValueError,
            r"WeightSync\(exclude=\['norm\.\*'\]\)",
        ),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dc.RPCDataCollector(ProcessIdEnv, Telling(), frames_per_batch=4, num_workers=1, **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight_sync_schemes": {"policy": scheme()}},
        {"weight_updater": dc.TransportUpdater},
        {
            "weight_updater": updaters.VanillaWeightUpdater(
                weight_getter=lambda: policy_weights(7), policy_weights=policy_weights(0)
            )
        },
    ],
)
def test_refused_without_workers(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no workers to send weights to"):
        dc.SyncDataCollector(ProcessIdEnv, Telling(), frames_per_batch=4, **arguments)


def test_an_updater_that_says_nothing_of_its_own(collect: Collect) -> None:
    """TorchRL's defaults are not asked: they know nothing of these workers."""
    updater = updaters.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={})
    collector = collect(Telling(4), weight_updater=updater)
    assert collector.update_policy_weights_().acknowledged == {0: 1, 1: 1}
    assert told(collector.next())["wide"] == 4
