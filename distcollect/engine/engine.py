"""Steps envs with a policy and writes every frame in place, by way of arrays.

:class:`Engine` takes requests, resets the envs and swaps weights between rollouts. The steps
themselves are made by one of two loops: :mod:`.aligned_loop` where every row makes one transition
in each step, :mod:`.ragged_loop` for vector envs with filler steps, and for those that give the
results of some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import StepCounter
from distcollect.engine.aligned_loop import AlignedLoop, action_bounds
from distcollect.engine.base import EngineBase, seed_global_generators
from distcollect.engine.finite import check_finite
from distcollect.engine.halves_loop import HalvesLoop
from distcollect.engine.plan import WorkerPlan
from distcollect.engine.ragged_loop import RaggedLoop
from distcollect.envs.bad_actions import check_actions
from distcollect.envs.base import EnvBatch, Faulted
from distcollect.errors import ArgumentError, PolicyError
from distcollect.inference.remote_policy import RemotePolicy
from distcollect.policy.base import Policy
from distcollect.policy.noise import OrnsteinUhlenbeckNoise, wrappers_of
from distcollect.policy.normalize import Normalizer
from distcollect.policy.random import RandomPolicy
from distcollect.policy.user import UserPolicy
from distcollect.rollout.layout import Layout
from distcollect.rollout.slab import Slab
from distcollect.rollout.spaces import Arrays, leaves_of, overlaps


class Engine(EngineBase):
    """Collects rollouts ``[n, T]`` from n envs that give arrays, and one policy."""

    envs: EnvBatch

    def __init__(
        self, envs: EnvBatch, plan: WorkerPlan, traj_ids: Iterator[int], counter: StepCounter | None
    ) -> None:
        """Reset the envs and call the policy once, to learn which leaves it writes.

        Args:
            envs: the n envs.
            plan: the policy, which was made, and how to step.
            traj_ids: the ids of new trajectories.
            counter: counts the frames; None: a new one.

        Raises:
            ArgumentError: an option that these envs do not support.
            EnvError: an env raised.
            PolicyError: the policy raised, or its output does not fit the action space.
        """
        self._policy: Policy
        self._observed = leaves_of(envs.observation_space, "observation")
        normalizer = plan.normalizer
        if normalizer is not None:
            normalizer.bind(self._observed)
        if plan.policy is None:
            self._policy = RandomPolicy(envs.action_space, envs.num_ready)
        elif plan.link is not None:
            self._policy = RemotePolicy(
                plan.link,
                plan.policy,
                envs.obs,
                envs.leaves,
                envs.observation_space,
                action_space=envs.action_space,
                exploration=plan.exploration,
                for_evaluation=plan.for_evaluation,
            )
        else:
            self._policy = user_policy(plan, envs, envs.obs)
        _check_options(plan, envs)
        envs.limit_frames(plan.max_frames_per_traj)
        super().__init__(envs, plan, traj_ids, counter)
        if isinstance(self._policy, RemotePolicy):
            self._policy.on_answer = self.step_timer.answered
        state = self._policy.state
        self._random_policy = RandomPolicy(envs.action_space, envs.num_ready, state)
        self._seeds: Sequence[int] | None = None  # of the next reset
        try:
            envs.reset()
        except Faulted as faulted:
            if not self.counter.stepped:  # so it is not known whether they work
                raise faulted.faults[0].error from faulted.__cause__
            self.recovery.rebuild_all(faulted.faults)
        check_actions(envs, self._policy.try_out())
        self.layout = _layout(envs, self._policy, normalizer)
        loop = AlignedLoop if envs.is_aligned else RaggedLoop
        if isinstance(self._policy, RemotePolicy) and self._policy.can_halve and envs.steps_parts:
            loop = HalvesLoop
        self._loop = loop(self, self._policy, self._trajectories)

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        self._seeds = list(env_seeds)
        self.recovery.seed(self._seeds)
        num_ready = self.envs.num_ready
        self._policy.seed(policy_seeds[:num_ready])
        # Other numbers than those of EpsilonGreedy's random actions, which the policy draws.
        self._random_policy.seed([seed + 1 for seed in policy_seeds[:num_ready]])
        seed_global_generators(policy_seeds[0])
        self._reset_due = True

    def swap_weights(self, up_to: int | None = None) -> None:
        super().swap_weights(up_to)
        self._loop.renew_states()
        for noise in self._policy.noises:
            noise.progress(self.weights.version, self.frames_before)

    def _abandon(self) -> None:
        self._loop.drop_waiting()

    @property
    def num_waiting(self) -> int:
        return self._loop.num_waiting

    def _collect(self, slab: Slab, *, random: bool, fresh: bool) -> None:
        if self._reset_due or self.options.reset_at_each_iter:
            self._reset()
        slab.clear()
        policy = self._random_policy if random else self._policy
        if random:
            for array in slab.extras.values():
                array.fill(0)
        with policy.exploring():
            self._loop.fill(slab, policy, fresh=fresh)
        check_actions(self.envs, slab.action.values(), slab.traj_ids >= 0, slab.root)
        if self.options.check_nan:
            check_finite(slab, self.envs, self._observed)
        self.step_timer.collected(slab, self._trajectories.rests_in(slab.traj_ids))

    def _reset(self) -> None:
        begin = clock_ns()
        try:
            self.envs.reset(self._seeds)
        except Faulted as faulted:
            self.recovery.rebuild_all(faulted.faults)
        self.step_timer.was_reset(begin, clock_ns())
        self._seeds = None
        self._reset_due = False
        self.counter.lose("row_skew", self._loop.drop_waiting())
        self._loop.begin_all()


def user_policy(plan: WorkerPlan, envs: EnvBatch, observation: Arrays) -> UserPolicy:
    """The policy of a plan, bound to arrays of observations like those of the envs.

    Raises:
        PolicyError: see :class:`~distcollect.policy.user.UserPolicy`.
    """
    return UserPolicy(
        plan.policy,
        observation,
        envs.observation_space,
        envs.action_space,
        exploration=plan.exploration,
        device=plan.device,
        shared=plan.shares_policy,
        normalizer=plan.normalizer,
    )


def _layout(envs: EnvBatch, policy: Policy, normalizer: Normalizer | None) -> Layout:
    """The leaves of the frames, once the policy was called.

    Raises:
        PolicyError: it writes an entry that frames have at their end.
    """
    outcomes = [leaf.key for leaf in envs.outcome_leaves]
    for leaf in policy.extras:
        if overlaps(leaf.key, outcomes):
            raise PolicyError(
                f"the policy writes {'.'.join(leaf.key)!r}, a name that is taken; rename it"
            )
    state = envs.leaves if policy.state is None else (*envs.leaves, *policy.state.leaves)
    return Layout(
        (envs.num_envs,),
        state,
        envs.action_leaves,
        policy.extras,
        envs.outcome_leaves,
        normalized=() if normalizer is None else normalizer.leaves,
        # Each row makes a frame in every second step at least; or is a rollout ahead before it
        # waits, and then as many frames may come of those that can't.
        skew=1 if envs.is_aligned else 2 if envs.num_ready == envs.num_envs else 3,
    )


def _check_options(options: WorkerPlan, envs: EnvBatch) -> None:
    """Raise ArgumentError for an option that the envs do not support."""
    needs_resets = options.max_frames_per_traj or options.reset_at_each_iter
    if needs_resets and not envs.supports_partial_reset:
        wanted = "max_frames_per_traj" if options.max_frames_per_traj else "reset_at_each_iter"
        raise ArgumentError(
            f"{wanted} does not work with this native vector env: it cannot reset single rows, as "
            "it, or a wrapper of yours around it, may take no reset mask. Pass a maker of single "
            "envs and envs_per_worker instead"
        )
    if envs.num_ready < envs.num_envs:
        _check_options_of_some(options, f"{envs.num_ready} of its {envs.num_envs}")
    if options.clip_actions:
        action_bounds(envs)


def _check_options_of_some(options: WorkerPlan, some: str) -> None:
    """Raise ArgumentError for what doesn't work with the results of ``some`` rows at a time."""
    wrappers = wrappers_of(options.policy)
    if options.exact_version:
        wanted, instead = "reproducible=True", "leave it out"
    elif any(isinstance(each, OrnsteinUhlenbeckNoise) for each in wrappers):
        wanted, instead = "OrnsteinUhlenbeckNoise", "use GaussianNoise"
    else:
        return
    raise ArgumentError(
        f"{wanted} does not work with an EnvPool env that gives the results of {some} envs at a "
        f"time, of which any may come first: {instead}, or leave "
        "out batch_size where the env is made"
    )
