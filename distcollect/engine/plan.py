"""What the trainer sends a worker to build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from distcollect.errors import PolicyError, users_errors
from distcollect.inference.link import Link
from distcollect.inference.protocol import Serving
from distcollect.policy.base import Exploration
from distcollect.policy.normalize import Normalizer
from distcollect.policy.weight_layout import STATISTICS
from distcollect.rollout.spaces import Key


@dataclass(frozen=True)
class WorkerPlan:
    """Which envs and which policy a worker builds, and how it steps them.

    Attributes:
        create_env_fn: env id or callable, see :func:`~distcollect.envs.make.make_envs`.
        num_envs: number of envs to make.
        policy: the policy; None: random actions.
        policy_factory: called in the worker to make the policy, in place of ``policy``.
        device: where the policy computes; None: it is not moved.
        env_device: where TorchRL envs compute; None: they are not moved.
        adds_transforms: add the transforms to TorchRL envs that a recurrent policy needs.
        exploration: how actions are chosen from a distribution.
        for_evaluation: the policy is evaluated; env makers, and an inference server, are told.
        info_keys: entries of ``info`` that go into the batch.
        models: further modules whose weights are published with the policy's, by name. Policy and
            env makers that refer to one of them still refer to the same object after pickling.
        exclude: patterns of names of weights that are never sent.
        max_env_faults: see :class:`~distcollect.config.Faults`.
        registry: the env ids that the trainer knows, see
            :func:`~distcollect.envs.registered.pickled_registry`; None: only this process's.
        traces: record the times at which the worker steps, resets and swaps weights.
        metrics: metrics of episodes, see :class:`~distcollect.config.Monitor`.
        init_fn: called in the worker before anything is made.
        pre_collect_hook: called in the worker before each rollout.
        post_collect_hook: called in the worker with each rollout.
        held: the module that has the policy's weights; None: there is none, or a factory.
        max_frames_per_traj: truncate a trajectory after this many frames; None: never.
        reset_at_each_iter: start every rollout with a reset of all envs.
        clip_actions: clip actions to the bounds of a Box action space before they go to the envs.
            The batch keeps the action that the policy chose.
        check_nan: raise where observations or rewards are NaN or infinite.
        swap_within_rollouts: use new weights from the next step on; False: from the next rollout.
        shares_policy: the policy is the user's own object, which they train, not a copy.
        exact_version: collect each rollout with the version that the request names.
        serving: the process is an inference server, or served by one; None: neither.
        link: a served worker's way to the server, which its process makes.
    """

    create_env_fn: Any
    num_envs: int
    policy: Any = None
    policy_factory: Any = None
    device: torch.device | None = None
    env_device: torch.device | None = None
    adds_transforms: bool = True
    exploration: Exploration = Exploration.RANDOM
    for_evaluation: bool = False
    info_keys: Any = None
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    exclude: Sequence[str] = ()
    max_env_faults: int = 0
    registry: bytes | None = None
    traces: bool = False
    metrics: Mapping[str, Key] = field(default_factory=dict)
    init_fn: Callable[[], Any] | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None
    held: nn.Module | None = None
    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    clip_actions: bool = False
    check_nan: bool = True
    swap_within_rollouts: bool = True
    shares_policy: bool = False
    exact_version: bool = False
    serving: Serving | None = None
    link: Link | None = None

    @property
    def normalizer(self) -> Normalizer | None:
        """What the policy's observations go through: one of the ``models``; None: nothing."""
        found = self.models.get(STATISTICS)
        return found if isinstance(found, Normalizer) else None

    def with_policy_made(self) -> WorkerPlan:
        """The same plan with the policy that ``policy_factory`` makes, if there is a factory.

        Raises:
            PolicyError: the factory raised, or returned no policy.
        """
        if self.policy_factory is None:
            return self
        try:
            policy = self.policy_factory()
        except users_errors() as error:
            raise PolicyError(f"policy_factory raised {type(error).__name__}: {error}") from error
        if not callable(policy):
            raise PolicyError(
                f"policy_factory returned {policy!r}: it must return a module or a function. For "
                "random actions leave policy and policy_factory out"
            )
        return replace(self, policy=policy, policy_factory=None)
