"""Takes the weight updaters and weight-sync schemes of TorchRL, or says what to write instead.

In TorchRL such an object does two things. It decides what is sent, and to which workers; and it
moves the bytes to the processes of a TorchRL collector. Here the first part is taken from it, and
an updater of this package moves the bytes. This module does not import torchrl: it knows TorchRL's
classes by their names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from distcollect.collectors.user_code import users_stack_level
from distcollect.common.checks import unknown_argument
from distcollect.errors import ArgumentError, ArgumentTypeError
from distcollect.policy.weight_layout import published
from distcollect.pool.publisher import Weights
from distcollect.weights.broadcast import NoUpdater, default_updater
from distcollect.weights.updaters import WeightUpdaterBase

# Methods of TorchRL's WeightUpdaterBase that do both parts at once.
_WHOLE_PUSH = ("__call__", "push_weights", "_push_weights")
# Methods that say what is sent, to which workers.
_SAYING = (
    "_get_server_weights", "_maybe_map_weights", "_skip_update", "all_worker_ids",
    "_call_post_hooks", "init", "register_collector",
)  # fmt: skip
# Of these, TorchRL's own make a TensorDict of a module at most, and know TorchRL's workers only.
_NOT_THEIRS = ("_maybe_map_weights", "all_worker_ids")
# It works with Ray's object store, not with weights.
_RAY_UPDATER = "RayWeightUpdater"
# Each sends the weights of one module to all workers that it is told to send them to.
_SENDING_SCHEMES = {
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "RPCWeightSyncScheme",
    "SharedMemWeightSyncScheme",
}
_NO_SCHEME = "NoWeightSyncScheme"
# The arguments of TorchRL's update_policy_weights_ that each can hold the weights.
_WEIGHTS = ("policy_or_weights", "weights", "policy", "weights_dict")


def with_hooks(hooks: Any, mover: WeightUpdaterBase) -> WeightUpdaterBase:
    """Have ``hooks`` say what is sent, and ``mover`` move the bytes; returns ``mover``.

    Args:
        hooks: of a class derived from TorchRL's ``WeightUpdaterBase``, or from ours.
        mover: gets the methods in :data:`_SAYING` of ``hooks``.

    Raises:
        ArgumentError: ``hooks`` can't be used here.
    """
    name = type(hooks).__name__
    replaced = [method for method in _WHOLE_PUSH if _is_changed(hooks, method)]
    if replaced or name == _RAY_UPDATER:
        reason = f"its {replaced[0]}() sends" if replaced else "it sends"
        raise ArgumentError(
            f"weight_updater={name}: {reason} the weights to the processes of a TorchRL "
            "collector, and there are none here. Leave weight_updater out, and the collector "
            "sends the weights of its policy. If you get weights from elsewhere, derive from "
            "distcollect.AutoUpdater and return them from _get_server_weights()"
        )
    if _package(hooks, "_sync_weights_with_worker") not in ("torchrl", "distcollect"):
        warnings.warn(
            f"weight_updater={name}: its _sync_weights_with_worker() is not called, as "
            "distcollect sends the weights to the workers itself. Its other methods are called",
            UserWarning,
            stacklevel=users_stack_level(),
        )
    for method in _SAYING:
        if method not in _NOT_THEIRS or _package(hooks, method) != "torchrl":
            setattr(mover, method, getattr(hooks, method))
    if isinstance(hooks, WeightUpdaterBase):  # our own classes have more methods than TorchRL's
        for method in ("attach", "check", "forget", "close"):
            setattr(mover, method, _both(getattr(mover, method), getattr(hooks, method)))
    return mover


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        first(*args)
        second(*args)

    return call


def made_updater(given: object, backend: str) -> WeightUpdaterBase:
    """The weight updater that a collector uses.

    Args:
        given: an updater of ours or of TorchRL's, a callable without arguments that makes one, or
            None for the default.
        backend: of the default updater, see :class:`~distcollect.WeightSync`.

    Raises:
        ArgumentTypeError: it is something else.
        ArgumentError: it is an updater of TorchRL's that can't be used here.
    """
    if given is None:
        return default_updater(backend)
    # TorchRL's updaters can be called, but that sends weights.
    made = given() if callable(given) and not _is_updater(given) else given
    if isinstance(made, WeightUpdaterBase) and _is_changed(made, "sources"):
        return made
    if _is_updater(made):
        return with_hooks(made, default_updater(backend))
    what = "must be derived from distcollect.WeightUpdaterBase, or be a callable that makes one"
    if _is_torchrl(made, "WeightSyncScheme"):
        what = "is a scheme: pass it as weight_sync_schemes={'policy': ...}, or leave it out"
    elif made is None:
        what = "returned None: it must return the updater. For the default, leave it out"
    raise ArgumentTypeError(f"weight_updater={given!r}: {what}")


def check_updater_in_process(given: object) -> None:
    """Check the ``weight_updater`` of a collector that computes with the user's policy itself.

    Raises:
        ArgumentError: it would have something to do.
    """
    has_source = getattr(given, "weight_getter", None) is not None
    if given is None or (type(given).__name__ == "VanillaWeightUpdater" and not has_source):
        return
    raise ArgumentError(
        f"weight_updater={given!r}: this collector has no workers to send weights to. It computes "
        "with your policy itself, so training it is enough; for weights from elsewhere, call "
        "collector.update_policy_weights_(weights)"
    )


def weights_among(
    weights: Weights | None,
    names: Mapping[str, Any],
    policy: object,
    models: Mapping[str, nn.Module],
) -> Weights | None:
    """The weights that the arguments of TorchRL's ``update_policy_weights_`` stand for.

    Args:
        weights: ``policy_or_weights``.
        names: the others, by name: ``weights``, ``policy``, ``weights_dict`` and ``model_id``.
        policy: the collector's own. Where there are models, what the arguments leave out is taken
            from it and them.
        models: the collector's own.

    Raises:
        ArgumentTypeError: there is no such argument, or ``weights_dict`` is no dict.
        ArgumentError: two arguments exclude each other, or there is no such model.
    """
    if not names:
        return weights
    known = {*_WEIGHTS, "model_id"}
    if unknown := next((name for name in names if name not in known), None):
        raise ArgumentTypeError(f"update_policy_weights_: {unknown_argument(unknown, known)}")
    everything = {"policy_or_weights": weights, **names}
    given = {name: everything[name] for name in _WEIGHTS if everything.get(name) is not None}
    model_id = names.get("model_id")
    if "weights_dict" in given and model_id is not None:
        given["model_id"] = model_id
    if len(given) > 1:
        raise ArgumentError(
            f"update_policy_weights_: {' and '.join(given)} are given: leave all but one out"
        )
    [value] = given.values() or [None]
    if "weights_dict" not in given and model_id is None:
        return value
    by_name: Any = value if "weights_dict" in given else {model_id: value}
    if not isinstance(by_name, Mapping):
        raise ArgumentTypeError(f"weights_dict={by_name!r}: must be a dict of weights by name")
    for name in by_name:
        if name != "policy" and name not in models:
            raise ArgumentError(f"update_policy_weights_: {_unknown_model(name)}")
    if not models:
        return by_name.get("policy")
    own = published(policy, models)
    assert isinstance(own, nn.ModuleDict)
    return dict(own.items()) | {name: part for name, part in by_name.items() if part is not None}


def _unknown_model(name: str) -> str:
    return (
        f"the collector knows no module {name!r}. Pass it as models={{{name!r}: module}} when you "
        "make the collector, and it is published together with the policy"
    )


def take_schemes(names: dict[str, Any], arguments: dict[str, Any], own: Collection[str]) -> None:
    """Take TorchRL's argument with weight-sync schemes out of ``names``.

    Args:
        names: arguments, by name, that the collector doesn't have.
        arguments: the collector's arguments; ``weight_updater`` is set where that is needed.
        own: the names of all arguments that the collector has.

    Raises:
        ArgumentTypeError: it is not a dict of schemes.
        ArgumentError: a scheme can't be used here.
    """
    schemes = names.pop("weight_sync_schemes", None) or {}
    if not isinstance(schemes, Mapping) or not all(
        _is_torchrl(scheme, "WeightSyncScheme") for scheme in schemes.values()
    ):
        raise ArgumentTypeError(
            f"weight_sync_schemes={schemes!r}: must be a dict of names to TorchRL's weight-sync "
            "schemes; you may leave it out, as distcollect sends the weights by itself"
        )
    if not schemes:
        return
    if "weight_updater" not in own:
        raise ArgumentError(
            f"weight_sync_schemes={schemes!r}: this collector has no workers to send weights to. "
            "It computes with your policy itself: leave weight_sync_schemes out"
        )
    if arguments.get("weight_updater") is not None:
        raise ArgumentError(
            "weight_sync_schemes and weight_updater are both given: leave one of them out"
        )
    kinds = {model: type(scheme).__name__ for model, scheme in schemes.items()}
    for model, kind in kinds.items():
        which = f"weight_sync_schemes[{model!r}]={kind}"
        if model != "policy" and model not in (arguments.get("models") or {}):
            raise ArgumentError(f"{which}: {_unknown_model(model)}")
        is_theirs = type(schemes[model]).__module__.startswith("torchrl.")
        if not is_theirs or kind not in {*_SENDING_SCHEMES, _NO_SCHEME}:
            raise ArgumentError(
                f"{which} can't be used here: leave it out, and the collector sends the weights of "
                "its policy. For a way of your own, pass weight_updater=..., derived from "
                "distcollect.WeightUpdaterBase"
            )
    silent = [model for model, kind in kinds.items() if kind == _NO_SCHEME]
    if len(silent) == len(kinds):
        arguments["weight_updater"] = NoUpdater()
    elif silent:
        raise ArgumentError(
            f"weight_sync_schemes: {silent} are not to be sent, and the others are. Leave "
            "weight_sync_schemes out, and name what is not sent: "
            f"weight_sync=distcollect.WeightSync(exclude={[f'{name}.*' for name in silent]})"
        )
    else:
        warnings.warn(
            f"weight_sync_schemes: distcollect sends the weights in its own way, in place of "
            f"{', '.join(sorted({*kinds.values()}))}; leave weight_sync_schemes out",
            UserWarning,
            stacklevel=users_stack_level(),
        )


def _is_updater(given: object) -> bool:
    return isinstance(given, WeightUpdaterBase) or _is_torchrl(given, "WeightUpdaterBase")


def _is_torchrl(given: object, name: str) -> bool:
    """Return True if ``given`` is an instance of TorchRL's class of this name."""
    return any(
        cls.__name__ == name and cls.__module__.startswith("torchrl.")
        for cls in type(given).__mro__
    )


def _defining(hooks: object, method: str) -> type:
    """The class that defines the method that an object has; our base if none does."""
    return next((cls for cls in type(hooks).__mro__ if method in vars(cls)), WeightUpdaterBase)


def _package(hooks: object, method: str) -> str:
    """The package of the class that defines the method that an object has."""
    return _defining(hooks, method).__module__.partition(".")[0]


def _is_changed(hooks: object, method: str) -> bool:
    """Return True if a method is another one than that of ``WeightUpdaterBase``."""
    return _defining(hooks, method).__name__ != "WeightUpdaterBase"
