"""Evaluating a policy: whole episodes in envs of their own, beside the collection."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from distcollect.common.seeding import Stream, env_seed, policy_seed, shares
from distcollect.engine.engine import Engine
from distcollect.errors import DeadlineError
from distcollect.policy.base import Exploration
from distcollect.results import Evaluation
from distcollect.rollout.slab import Slab

log = logging.getLogger(__name__)

_STEPS = 64  # of a rollout; the rest of the last one is stepped in vain


class Evaluator:
    """Plays episodes with the policy of a collecting engine, on that one's thread."""

    def __init__(self, make_engine: Callable[[Exploration], Engine]) -> None:
        """Make engines when they are needed; each has envs of its own, but no policy."""
        self._make_engine = make_engine
        self._engines: dict[Exploration, Engine] = {}

    def evaluate(
        self,
        num_episodes: int,
        *,
        version: int,
        deterministic: bool,
        seed: int | None,
        timeout_s: float,
    ) -> Evaluation:
        """Play ``num_episodes``, each env its share.

        Args:
            num_episodes: in all.
            version: of the policy.
            deterministic: take the most likely action, where the policy has a distribution.
            seed: of envs and actions; None: a random one.
            timeout_s: for all of it.

        Raises:
            DeadlineError: they were not over by then.
            EnvError, PolicyError: an env or the policy failed.
        """
        deadline = time.monotonic() + timeout_s
        exploration = Exploration.DETERMINISTIC if deterministic else Exploration.RANDOM
        with _own_random_numbers():
            if exploration not in self._engines:
                self._engines[exploration] = self._make_engine(exploration)
            engine = self._engines[exploration]
            num_envs = engine.layout.num_envs
            if seed is None:
                seed = int(np.random.SeedSequence().generate_state(1)[0])
            episodes = self._play(engine, seed, shares(num_episodes, num_envs), deadline)
        returns, lengths = zip(*episodes, strict=True)
        return Evaluation(
            torch.tensor(returns, dtype=torch.float64),
            torch.tensor(lengths),
            torch.full((num_episodes,), version),
        )

    def _play(
        self, engine: Engine, seed: int, owed: list[int], deadline: float
    ) -> list[tuple[float, int]]:
        """(return, length) of so many episodes of each env."""
        slab = Slab(engine.layout, _STEPS)
        episodes: list[tuple[float, int]] = []
        num_envs = len(owed)
        totals, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        num_starts = 0
        while any(owed):
            _seed(engine, seed, num_starts)
            num_starts += 1
            traj_ids, over = np.full(num_envs, -1), np.ones(num_envs, bool)
            goes_on = True
            while goes_on and any(owed):
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"{sum(owed)} of the episodes to be evaluated are not over, the longest "
                        f"after {lengths.max()} frames; give it a longer timeout_s or fewer "
                        "episodes"
                    )
                engine.collect(slab)
                for step in range(_STEPS):
                    begins = slab.traj_ids[:, step] != traj_ids
                    # Where frames are missing, as an env was made anew or rows of a vector env have
                    # drifted apart, what follows is no whole episode: all start over.
                    goes_on = not (begins & ~over).any()
                    if not goes_on:
                        break
                    traj_ids[:] = slab.traj_ids[:, step]
                    totals[begins] = lengths[begins] = 0
                    totals += slab.reward[:, step]
                    lengths += 1
                    over = slab.terminated[:, step] | slab.truncated[:, step]
                    # One that its env's failure cut short tells nothing.
                    for row in np.flatnonzero(over & ~slab.faulted[:, step]).tolist():
                        if owed[row]:
                            owed[row] -= 1
                            episodes.append((float(totals[row]), int(lengths[row])))
        return episodes

    def close(self) -> None:
        """Close the envs."""
        for engine in self._engines.values():
            engine.close()


def _seed(engine: Engine, seed: int, num_starts: int) -> None:
    num_envs = engine.layout.num_envs
    rows = range(num_starts * num_envs, (num_starts + 1) * num_envs)
    policy_seeds = [policy_seed(seed, row, Stream.EVALUATION) for row in rows]
    engine.seed([env_seed(seed, row, Stream.EVALUATION) for row in rows], policy_seeds)
    torch.manual_seed(policy_seeds[0])


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Collection goes on afterwards as if nothing had been drawn."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - for envs that still use it
    try:
        # Nothing of CUDA is touched where nobody uses it.
        num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=range(num_gpus)):
            yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
