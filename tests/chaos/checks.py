"""Checks of every batch and of the ledger that must hold whatever happens to workers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from tensordict import TensorDict

from chaos.envs import ENV, EPISODE, LENGTH, NUMBER, STEP, TOKEN, Record, reward_of
from distcollect.common.peer_ids import TRAJ_IDS_PER_PEER
from distcollect.results import LedgerReport

_CAUSES = {"worker_lost", "hung", "left", "shut_down"}
# The most rollouts of a process that are not delivered yet: two ready, one unfinished.
_ROLLOUTS_OWED = 3
# The most trajectories of a process that may continue.
_RECENT = 64
_KEPT = 50


class CheckError(Exception):
    """A check has failed."""


def demand(holds: object, message: str) -> None:
    """Raise :class:`CheckError` unless ``holds``."""
    if not holds:
        raise CheckError(message)


@dataclass(frozen=True)
class Plan:
    """How a round collects.

    Attributes:
        sync: whether the collector is synchronous.
        num_workers: number of workers at the start.
        num_envs: envs per worker.
        num_steps: steps per rollout.
    """

    sync: bool
    num_workers: int
    num_envs: int
    num_steps: int

    @property
    def rollouts(self) -> int:
        """Rollouts per batch."""
        return self.num_workers if self.sync else 1

    @property
    def shape(self) -> tuple[int, int]:
        """Shape ``[B, T]`` of a batch."""
        return self.rollouts * self.num_envs, self.num_steps

    @property
    def frames_per_batch(self) -> int:
        """Frames per batch."""
        return self.shape[0] * self.shape[1]


@dataclass
class Delivered:
    """The delivered frames of an env, as ascending, disjoint spans ``[first, last]``."""

    spans: list[list[int]] = field(default_factory=list)

    def add(self, first: int, last: int) -> None:
        """Add frames ``first`` to ``last``; raise CheckError if one was delivered before."""
        at = next((i for i, span in enumerate(self.spans) if span[0] > first), len(self.spans))
        before = self.spans[at - 1] if at else None
        after = self.spans[at] if at < len(self.spans) else None
        twice = (before is not None and before[1] >= first) or (
            after is not None and after[0] <= last
        )
        demand(not twice, f"frames {first} to {last} were delivered before: {self.spans[-5:]}")
        self.spans.insert(at, [first, last])
        for left in (at, at - 1):
            if (
                0 <= left < len(self.spans) - 1
                and self.spans[left][1] + 1 == self.spans[left + 1][0]
            ):
                self.spans[left][1] = self.spans.pop(left + 1)[1]

    @property
    def num_missing(self) -> int:
        """The number of frames that were not delivered although later ones were."""
        return self.spans[-1][1] + 1 - sum(last - first + 1 for first, last in self.spans)


@dataclass
class Seen:
    """What the batches have shown of one process.

    Attributes:
        worker_id: its slot.
        peer: its peer id, which is part of its trajectories' ids.
        first_at: when its first frame was delivered.
        last_at: when its last frame was delivered.
        envs: delivered frames by env number.
        trajectories: the latest trajectories by id, with their env and episode.
        floor: later trajectories must have ids above this.
    """

    worker_id: int
    peer: int
    first_at: float
    last_at: float = 0.0
    envs: dict[int, Delivered] = field(default_factory=dict)
    trajectories: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    floor: int = -1

    def note(self, traj_id: int, of: tuple[int, int]) -> None:
        """Record the episode of a trajectory; raise CheckError if it was in another episode."""
        demand(traj_id > self.floor, f"trajectory {traj_id} goes on after {_RECENT} others")
        known = self.trajectories.setdefault(traj_id, of)
        demand(known == of, f"trajectory {traj_id} is spliced: {known} and {of}")
        self.trajectories.move_to_end(traj_id)
        if len(self.trajectories) > _RECENT:
            self.floor = max(self.floor, self.trajectories.popitem(last=False)[0])


class Checker:
    """Checks batches as they come.

    Attributes:
        seen: the processes of this round by token.
        frames: number of frames delivered in this round.
        failures: messages of the first failed checks.
    """

    def __init__(self, failures: list[str]) -> None:
        self.seen: dict[int, Seen] = {}
        self.frames = 0
        self.failures = failures
        self._plan: Plan | None = None
        self._peers: dict[int, int] = {}  # peer id to token, in this round

    def begin(self, plan: Plan) -> None:
        """Begin a round."""
        self._plan = plan
        self.seen = {}
        self._peers = {}
        self.frames = 0

    def fail(self, message: str) -> None:
        """Record and print a failed check."""
        if len(self.failures) < _KEPT:
            self.failures.append(message)
            print(f"FAILED: {message}", flush=True)

    def see(self, batch: TensorDict, now: float, version: int, owed: Mapping[int, int]) -> None:
        """Check a batch.

        Args:
            batch: the delivered batch.
            now: time of delivery.
            version: the newest published version.
            owed: in sync mode, worker_id to the newest version sent to it.
        """
        assert self._plan is not None
        self.frames += batch.numel()
        try:
            _check_shape(batch, self._plan)
            columns = _Columns.of(batch)
            _check_weights(batch, version)
            for row in range(self._plan.shape[0]):
                self._see_row(columns, row, now)
            if self._plan.sync:
                _check_on_policy(batch, owed)
        except CheckError as error:
            self.fail(str(error))

    def _see_row(self, columns: _Columns, row: int, now: float) -> None:
        obs, traj_ids = columns.obs[row], columns.traj_ids[row]
        worker_id, token = int(columns.worker_ids[row, 0]), int(obs[0, TOKEN])
        where = f"worker {worker_id}, process {token:012x}"
        demand((columns.worker_ids[row] == worker_id).all(), f"{where}: a row of several workers")
        demand((obs[:, TOKEN] == token).all(), f"{where}: a row of several processes")
        peer = int(traj_ids[0]) // TRAJ_IDS_PER_PEER
        demand(
            self._peers.setdefault(peer, token) == token,
            f"{where}: its trajectories have the ids of another process",
        )
        seen = self.seen.setdefault(token, Seen(worker_id, peer, now))
        seen.last_at = now
        demand((seen.worker_id, seen.peer) == (worker_id, peer), f"{where}: it was {seen}")
        try:
            _check_row(columns, row)
            cuts = np.flatnonzero(traj_ids[1:] != traj_ids[:-1]) + 1
            for begin, end in zip([0, *cuts], [*cuts, len(traj_ids)], strict=True):
                first, last = obs[begin], obs[end - 1]
                of = (int(first[ENV]), int(first[EPISODE]))
                seen.note(int(traj_ids[begin]), of)
                seen.envs.setdefault(of[0], Delivered()).add(int(first[NUMBER]), int(last[NUMBER]))
        except CheckError as error:
            raise CheckError(f"{where}: {error}") from None

    def check_ledger(
        self,
        report: LedgerReport,
        records: list[Record],
        num_deaths: Mapping[int, int],
        may_be_missing: bool,
    ) -> None:
        """Check the ledger of a finished round.

        Args:
            report: the ledger's report.
            records: the records of all processes.
            num_deaths: worker_id to the number of its processes that were killed.
            may_be_missing: hosts or supervisors were lost, so frame counts may be unknown.
        """
        assert self._plan is not None
        plan = self._plan
        for worker_id, frames in report.workers.items():
            try:
                lost = sum(frames.lost.values())
                demand(frames.open == 0, "frames are open after the end")
                demand(frames.stepped == frames.delivered + lost, "it does not balance")
                demand(min([frames.delivered, *frames.lost.values()], default=0) >= 0, "negative")
                demand(set(frames.lost) <= _CAUSES, "frames were lost by a cause that wasn't there")
                demand(
                    may_be_missing or not frames.at_most, "nobody knows its frames, for no reason"
                )
                deaths = num_deaths.get(worker_id, 0)
                limit = deaths * _ROLLOUTS_OWED * plan.num_envs * plan.num_steps
                died = sum(frames.lost.get(cause, 0) for cause in ("worker_lost", "hung"))
                demand(died <= limit, f"{deaths} deaths can't have lost {died} frames")
                mine = [record for record in records if record.worker_id == worker_id]
                counted = sum(record.stepped for record in mine)
                # Envs count within a step, the worker at its end.
                most = frames.stepped + frames.at_most + deaths * plan.num_envs
                demand(frames.stepped <= counted <= most, f"its envs counted {counted} frames")
                tokens = {record.token for record in mine}
                missing = sum(
                    env.num_missing
                    for token in tokens & self.seen.keys()
                    for env in self.seen[token].envs.values()
                )
                demand(missing <= lost + frames.at_most, f"{missing} frames are missing")
            except CheckError as error:
                self.fail(f"the ledger, worker {worker_id}: {error}\n{report}")
        if report.total.delivered != self.frames:
            self.fail(f"{self.frames} frames were delivered, the ledger says:\n{report}")


@dataclass(frozen=True)
class _Columns:
    """The entries of a batch as arrays ``[B, T, ...]``."""

    obs: np.ndarray
    next_obs: np.ndarray
    traj_ids: np.ndarray
    worker_ids: np.ndarray
    faulted: np.ndarray
    done: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    reward: np.ndarray
    versions: np.ndarray

    @classmethod
    def of(cls, batch: TensorDict) -> _Columns:
        following, about = batch["next"], batch["collector"]
        return cls(
            obs=batch["observation"].numpy(),
            next_obs=following["observation"].numpy(),
            traj_ids=about["traj_ids"].numpy(),
            worker_ids=about["worker_id"].numpy(),
            faulted=about["faulted"].numpy() if "faulted" in about else _none_like(batch),
            done=following["done"][..., 0].numpy(),
            terminated=following["terminated"][..., 0].numpy(),
            truncated=following["truncated"][..., 0].numpy(),
            reward=following["reward"][..., 0].numpy(),
            versions=about["policy_version"].numpy(),
        )


def _none_like(batch: TensorDict) -> np.ndarray:
    return np.zeros(batch.shape, bool)


def _check_shape(batch: TensorDict, plan: Plan) -> None:
    demand(batch.shape == plan.shape, f"a batch of shape {tuple(batch.shape)}, not {plan.shape}")
    demand("mask" not in batch["collector"], "a mask that nobody asked for")


def _check_weights(batch: TensorDict, version: int) -> None:
    versions = batch["collector", "policy_version"]
    marks = batch["mark"]
    demand((marks[..., 0] == marks[..., 1]).all(), "an action was chosen with torn weights")
    demand((marks[..., 0] == versions).all(), "a frame's version is not that of its weights")
    demand((versions[:, 1:] >= versions[:, :-1]).all(), "versions go back within a rollout")
    demand(0 <= int(versions.min()) <= int(versions.max()) <= version, "a version of the future")


def _check_on_policy(batch: TensorDict, owed: Mapping[int, int]) -> None:
    versions, workers = batch["collector", "policy_version"], batch["collector", "worker_id"]
    for worker_id in np.unique(workers.numpy()).tolist():
        oldest = int(versions[workers == worker_id].min())
        demand(
            oldest >= owed.get(worker_id, 0),
            f"worker {worker_id} collected with version {oldest} after it was sent "
            f"{owed.get(worker_id, 0)}",
        )
    order = workers[:, 0]
    demand((order[1:] >= order[:-1]).all(), "rows are not in the workers' order")


def _check_row(columns: _Columns, row: int) -> None:
    """Check what must hold along one row."""
    obs, after, traj_ids = columns.obs[row], columns.next_obs[row], columns.traj_ids[row]
    done, terminated, truncated = columns.done[row], columns.terminated[row], columns.truncated[row]
    faulted = columns.faulted[row]
    steps, lengths = obs[:, STEP], obs[:, LENGTH]
    demand((done == (terminated | truncated)).all(), "done is not terminated or truncated")
    demand((terminated == (steps + 1 == lengths)).all(), "terminated is not where episodes end")
    demand((truncated == faulted).all(), "truncated is not where envs were replaced")
    demand((steps < lengths).all() and (steps >= 0).all(), "frames after an episode's end")
    expected = obs.copy()
    expected[:, [NUMBER, STEP]] += 1
    demand((after == expected).all(), "a frame's next observation is not what followed it")
    rewards = [reward_of(number) for number in obs[:, NUMBER].tolist()]
    demand((columns.reward[row] == rewards).all(), "a reward is another frame's")
    goes_on = traj_ids[1:] == traj_ids[:-1]
    demand((goes_on == ~done[:-1]).all(), "trajectories do not end where done is")
    demand((after[:-1][goes_on] == obs[1:][goes_on]).all(), "a gap within a trajectory")
    same_env = obs[1:, ENV] == obs[:-1, ENV]
    demand((same_env | done[:-1]).all(), "an env was replaced in the middle of a trajectory")
    demand(not (same_env & faulted[:-1]).any(), "an env that raised goes on")
    begins = obs[1:][~goes_on]
    demand((begins[:, STEP] == 0).all(), "a trajectory does not begin with a reset")
    demand((begins[:, NUMBER][~same_env[~goes_on]] == 0).all(), "a new env has stepped before")
    kept = same_env & ~goes_on
    demand((obs[1:, NUMBER][kept] == obs[:-1, NUMBER][kept] + 1).all(), "a gap between episodes")
