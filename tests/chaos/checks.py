"""Checks of every batch and of the ledger that must hold whatever happens to workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict

from chaos.envs import ENV, EPISODE, LENGTH, NUMBER, STEP, TOKEN, Record, reward_of
from distcollect.results import LedgerReport

_CAUSES = {"worker_lost", "hung", "left", "shut_down"}
# The most rollouts of a process that are not delivered yet: two ready, one unfinished.
_ROLLOUTS_OWED = 3
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
    def shape(self) -> tuple[int, int]:
        """Shape ``[B, T]`` of a batch."""
        return (self.num_workers if self.sync else 1) * self.num_envs, self.num_steps

    @property
    def frames_per_batch(self) -> int:
        """Frames per batch."""
        return self.shape[0] * self.shape[1]


@dataclass
class SeenEnv:
    """What the batches have shown of one env.

    Attributes:
        following: one more than the number of its last frame.
        num_frames: how many frames were delivered.
        episode: that of its last frame.
        traj_id: of that frame.
    """

    following: int = 0
    num_frames: int = 0
    episode: int = -1
    traj_id: int = -1


@dataclass
class Seen:
    """What the batches have shown of one process.

    Attributes:
        worker_id: its slot.
        first_at: when its first frame was delivered.
        last_at: when its last frame was delivered.
        envs: by their numbers.
    """

    worker_id: int
    first_at: float
    last_at: float = 0.0
    envs: dict[int, SeenEnv] = field(default_factory=dict)


@dataclass
class SeenServer:
    """What the batches have shown of an inference server.

    Attributes:
        first_at: when the first frame whose action it chose was delivered.
        last_at: when the last one was.
        clients: tokens of the processes that it served.
    """

    first_at: float
    last_at: float = 0.0
    clients: set[int] = field(default_factory=set)


class Checker:
    """Checks batches as they come.

    Attributes:
        seen: the processes of this round by token.
        servers: the inference servers of this round by token.
        frames: number of frames delivered in this round.
        failures: messages of the first failed checks.
    """

    def __init__(self, failures: list[str]) -> None:
        self.failures = failures
        self.begin(Plan(sync=False, num_workers=0, num_envs=0, num_steps=0))

    def begin(self, plan: Plan) -> None:
        """Begin a round."""
        self._plan = plan
        self.seen: dict[int, Seen] = {}
        self.servers: dict[int, SeenServer] = {}
        self._env_of: dict[int, tuple[int, int]] = {}  # by traj_id: the process and its env
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
        self.frames += batch.numel()
        try:
            demand(batch.shape == self._plan.shape, f"a batch of shape {tuple(batch.shape)}")
            demand("mask" not in batch["collector"], "a mask that nobody asked for")
            versions = batch["collector", "policy_version"]
            demand((batch["mark"] == versions[..., None]).all(), "torn weights, or another version")
            demand((versions[:, 1:] >= versions[:, :-1]).all(), "versions go back in a rollout")
            demand(0 <= versions.min() <= versions.max() <= version, "a version of the future")
            workers = batch["collector", "worker_id"]
            demand((workers == workers[:, :1]).all(), "a row of several workers")
            if self._plan.sync:
                demand((workers.diff(dim=0) >= 0).all(), "rows are not in the workers' order")
                oldest = workers.clone().apply_(lambda worker_id: owed.get(worker_id, 0))
                demand((versions >= oldest).all(), "frames older than what was sent")
            for row in batch:
                self._see_row(row, now)
        except CheckError as error:
            self.fail(str(error))

    def _see_row(self, row: TensorDict, now: float) -> None:
        obs, traj_ids = row["observation"], row["collector", "traj_ids"]
        worker_id, token = int(row["collector", "worker_id"][0]), int(obs[0, TOKEN])
        where = f"worker {worker_id}, process {token:012x}"
        demand((obs[:, TOKEN] == token).all(), f"{where}: a row of several processes")
        seen = self.seen.setdefault(token, Seen(worker_id, now))
        seen.last_at = now
        demand(seen.worker_id == worker_id, f"{where}: it was {seen}")
        for server in row.get("server", torch.empty(0)).unique().tolist():
            serving = self.servers.setdefault(server, SeenServer(now))
            serving.last_at = now
            serving.clients.add(token)
        try:
            _check_row(row)
            cuts = (traj_ids.diff().nonzero().flatten() + 1).tolist()
            for begin, end in zip([0, *cuts], [*cuts, len(traj_ids)], strict=True):
                first, traj_id = obs[begin].tolist(), int(traj_ids[begin])
                number, episode = first[NUMBER], first[EPISODE]
                env = seen.envs.setdefault(first[ENV], SeenEnv())
                owner = token, first[ENV]
                demand(self._env_of.setdefault(traj_id, owner) == owner, "a traj_id of two envs")
                demand(number >= env.following, f"frame {number} came before: {env}")
                goes_on = traj_id == env.traj_id
                demand(goes_on == (episode == env.episode), f"{traj_id} is spliced: {env}")
                env.following, env.num_frames = number + end - begin, env.num_frames + end - begin
                env.episode, env.traj_id = episode, traj_id
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
            may_be_missing: supervisors were lost, so frame counts may be unknown.
        """
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
                shown = [self.seen[record.token] for record in mine if record.token in self.seen]
                envs = [env for seen in shown for env in seen.envs.values()]
                missing = sum(env.following - env.num_frames for env in envs)
                demand(missing <= lost + frames.at_most, f"{missing} frames are missing")
            except CheckError as error:
                self.fail(f"the ledger, worker {worker_id}: {error}\n{report}")
        if report.total.delivered != self.frames:
            self.fail(f"{self.frames} frames were delivered, the ledger says:\n{report}")


def _check_row(row: TensorDict) -> None:
    """Check what must hold along one row."""
    about, following = row["collector"], row["next"]
    obs, after = row["observation"], following["observation"]
    done = following["done"][:, 0]
    faulted = about.get("faulted", torch.zeros_like(done))
    is_last = obs[:, STEP] + 1 == obs[:, LENGTH]
    demand((following["terminated"][:, 0] == is_last).all(), "terminated elsewhere than episodes")
    demand((following["truncated"][:, 0] == faulted).all(), "truncated without a fault")
    demand((done == (is_last | faulted)).all(), "done is not where episodes end")
    expected = obs.clone()
    expected[:, [NUMBER, STEP]] += 1
    demand((after == expected).all(), "a frame's next observation is not what followed it")
    rewards = np.array([reward_of(number) for number in obs[:, NUMBER].tolist()])
    demand((following["reward"][:, 0].numpy() == rewards).all(), "a reward is another frame's")
    ends = done[:-1]
    demand(((about["traj_ids"].diff() != 0) == ends).all(), "trajectories end elsewhere than done")
    demand((after[:-1][~ends] == obs[1:][~ends]).all(), "a gap within a trajectory")
    demand((obs[1:, STEP][ends] == 0).all(), "a trajectory does not begin with a reset")
    same_env = obs[1:, ENV] == obs[:-1, ENV]
    demand((same_env | ends).all(), "an env was replaced in the middle of a trajectory")
    demand(not (same_env & faulted[:-1]).any(), "an env that raised goes on")
    gap = obs[1:, NUMBER] - torch.where(same_env, after[:-1, NUMBER], 0)
    demand((gap == 0).all(), "a gap between episodes, or a new env has stepped before")
