"""Steps TorchRL envs with a policy, as TorchRL's collectors step them.

The policy gets the env's own TensorDict and writes into it, and the env's ``step_and_maybe_reset``
gets that TensorDict. The TensorDicts of some steps are kept, and then written to the slab together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from distcollect.common.clock import clock_ns
from distcollect.common.step_counter import StepCounter
from distcollect.engine.base import EngineBase, seed_global_generators
from distcollect.engine.plan import WorkerPlan
from distcollect.envs.base import Fault
from distcollect.errors import ArgumentError, EnvError
from distcollect.integrations.torchrl.envs import TorchRLEnvs
from distcollect.integrations.torchrl.policy import TensorDictPolicy
from distcollect.integrations.torchrl.specs import layout_of
from distcollect.rollout.spaces import Key
from distcollect.rollout.tree_slab import FrameSlab

# Frames are written to the slab when there are more: fewer would take longer, and many more would
# need more memory than the CPU's caches have.
_MOST_KEPT = 64


class TensorDictEngine(EngineBase):
    """Collects rollouts ``[n, T]`` from TorchRL envs and one policy."""

    envs: TorchRLEnvs

    def __init__(
        self,
        envs: TorchRLEnvs,
        plan: WorkerPlan,
        traj_ids: Iterator[int],
        counter: StepCounter | None,
    ) -> None:
        """Reset the envs, and call the policy once with a copy of what that gave.

        Args:
            envs: the envs.
            plan: the policy, which was made, and how to step.
            traj_ids: the ids of new trajectories.
            counter: counts the frames; None: a new one.

        Raises:
            ArgumentError: an option that these envs do not support.
            EnvError: an env raised.
            PolicyError: the policy raised.
        """
        if plan.max_frames_per_traj is not None:
            envs.limit_frames(plan.max_frames_per_traj)
        policy = TensorDictPolicy(plan, envs)
        super().__init__(envs, plan, traj_ids, counter)
        if plan.clip_actions:
            raise ArgumentError(
                "clip_actions does not work with TorchRL envs: use the transform ActionScaling, or "
                "let the policy clip its actions"
            )
        self._policy = policy
        self._collector = TensorDict()
        self._frames: list[TensorDictBase] = []  # not written to the slab yet
        self._given: set[Key] = set()  # the entries that frames had so far
        with policy.exploring():
            self._td = self._started(self._after_reset(may_rebuild=bool(self.counter.stepped)))
        self.layout = layout_of(envs, self._td, policy.try_out(self._td))
        assert self.layout.torchrl_keys is not None
        self._done_keys = [_short(key) for key in self.layout.torchrl_keys.done]

    def seed(self, env_seeds: Sequence[int], policy_seeds: Sequence[int]) -> None:
        """Seed the envs as TorchRL does; the policy draws from the global generators."""
        self._reset_due = True  # some envs may be reset if seeding another one raises
        self.recovery.seed(env_seeds)
        static_seed = len(env_seeds) > 1 and len(set(env_seeds)) == 1
        self.next_seed = self.envs.set_seeds(env_seeds, static_seed=static_seed)
        seed_global_generators(policy_seeds[0])

    def use_traj_ids(self, traj_ids: Iterator[int]) -> None:
        super().use_traj_ids(traj_ids)
        self._show_ids(self._td)

    def _abandon(self) -> None:
        self._frames.clear()

    def _collect(self, slab: FrameSlab, *, random: bool, fresh: bool) -> None:
        self._frames.clear()
        with self._policy.exploring():
            if self._reset_due or self.options.reset_at_each_iter:
                self._reset()
            slab.clear()
            num_steps = self._fill(slab, random=random)
            self._write(slab, num_steps, random=random, rest=True)
            slab.finish(num_steps)
        self.step_timer.collected(slab)

    def _fill(self, slab: FrameSlab, *, random: bool) -> int:
        """Make the steps of a rollout; returns how many, which is fewer if it is preempted."""
        envs, clears_device = self.envs, self._policy.clears_device
        call_policy = envs.choose_randomly if random else self._policy
        one_done = self._done_keys[0] if len(self._done_keys) == 1 else None
        slab.traj_ids[:] = self._trajectories.ids[:, None]

        def choose(step: int) -> TensorDictBase:
            if len(self._frames) > _MOST_KEPT:
                self._write(slab, step, random=random)
            td = self._td
            call_policy(td)
            # The env has no use for it, and would copy it.
            td.del_("collector")
            return td

        def record(step: int, result: tuple[TensorDictBase, TensorDictBase]) -> None:
            frame, start = result
            self.counter.add(envs.num_envs)
            self._frames.append(frame)
            self._td = start
            if clears_device and start.device is not None:
                start.clear_device_()
            following = frame.get("next")
            is_over = self._is_over(following) if one_done is None else following.get(one_done)
            # Converting a single flag takes a seventh of the time.
            if is_over if is_over.numel() == 1 else is_over.any():
                self._end_trajectories(slab, step, following)
            start.set("collector", self._collector)

        return self.make_steps(
            slab,
            slab.num_steps,
            choose=choose,
            step_envs=envs.step,
            record=record,
            recover=lambda step, error: self._recover(slab, step, error),
        )

    def _write(self, slab: FrameSlab, step: int, *, random: bool, rest: bool = False) -> None:
        """Write the frames to the slab, all but the newest: a fault of its env may still mark it.

        Args:
            slab: the slab.
            step: the next step.
            random: the policy was not called.
            rest: write the newest frame as well.
        """
        count = len(self._frames) - (not rest)
        # Random frames lack what the policy writes.
        given = set() if random else self._given
        try:
            slab.write(step - len(self._frames), self._frames[:count], given)
        except ValueError as error:
            raise EnvError(f"{self.envs.name()}: {error}") from error
        del self._frames[:count]

    def _is_over(self, following: TensorDictBase) -> torch.Tensor:
        """Bool ``[n]``: the trajectories that end with a step."""
        over = torch.zeros(self.envs.num_envs, dtype=torch.bool)
        for key in self._done_keys:
            over |= following.get(key).reshape(len(over), -1).any(-1).cpu()
        return over

    def _end_trajectories(self, slab: FrameSlab, step: int, following: TensorDictBase) -> None:
        rows = self._is_over(following).nonzero().flatten().tolist()
        slab.ended[rows, step] = True
        if self.recovery.streaks:
            self.recovery.episodes_ended(rows)
        self._begin_trajectories(slab, step + 1, rows)

    def _begin_trajectories(self, slab: FrameSlab, step: int, rows: Sequence[int]) -> None:
        self._trajectories.begin(rows)
        slab.traj_ids[rows, step:] = self._trajectories.ids[rows, None]
        self._collector = self._new_collector()

    def _new_collector(self) -> TensorDict:
        """The entries under "collector" that the policy sees; earlier ones may be kept."""
        shape = self.envs.batch_size
        ids = torch.from_numpy(self._trajectories.ids.copy()).reshape(shape)
        return TensorDict({"traj_ids": ids}, batch_size=shape)

    def _show_ids(self, td: TensorDictBase) -> None:
        self._collector = self._new_collector()
        td.set("collector", self._collector)

    def _started(self, td: TensorDictBase) -> TensorDictBase:
        """What a reset gave, as the policy gets it."""
        if self._policy.clears_device and td.device is not None:
            td.clear_device_()
        self._show_ids(td)
        return td

    def _reset(self) -> None:
        begin = clock_ns()
        td = self._after_reset()
        self.step_timer.was_reset(begin, clock_ns())
        self._reset_due = False
        self._trajectories.begin(range(self.envs.num_envs))
        self._td = self._started(td)

    def _after_reset(
        self, error: EnvError | None = None, *, may_rebuild: bool = True
    ) -> TensorDictBase:
        """What a reset of all envs gives.

        Args:
            error: of the env to replace before; None: none has raised.
            may_rebuild: replace an env that raises now.
        """
        while True:
            if error is not None:
                rows = tuple(range(self.envs.num_envs))
                self.recovery.rebuild(Fault(rows, error, stepped=False))
            try:
                return self.envs.reset()
            except EnvError as another:
                if not may_rebuild:
                    raise
                error = another

    def _recover(self, slab: FrameSlab, step: int, error: EnvError) -> int:
        """Replace an env that raised; all trajectories end before this step, which is the next.

        Steps that other envs had made are lost, as there is no frame for the row of the env.
        """
        self.counter.add(self.envs.num_stepped)
        self.counter.lose("env_failed", self.envs.num_stepped)
        td = self._after_reset(error)
        if self._frames:
            rows = np.flatnonzero(~slab.ended[:, step - 1]).tolist()
            slab.ended[rows, step - 1] = True
            slab.faulted[rows, step - 1] = True
            self._truncate(self._frames[-1], rows)
        self._begin_trajectories(slab, step, range(self.envs.num_envs))
        self._td = self._started(td)
        return step

    def _truncate(self, frame: TensorDictBase, rows: Sequence[int]) -> None:
        """Mark the rows of a frame as truncated and done."""
        following = frame.get("next")
        for key in self.layout.flags:
            if key[-1] == "terminated":
                continue
            name: Any = _short(key)
            flags = following.get(name).clone()
            flags.view(self.envs.num_envs, -1)[rows] = True
            following.set(name, flags)


def _short(key: Key) -> str | Key:
    """A key as TensorDicts look it up fastest."""
    return key[0] if len(key) == 1 else key
