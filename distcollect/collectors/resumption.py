"""What a collector needs to continue where another one ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from distcollect.collectors.batches import Backend
from distcollect.common.peer_ids import identity
from distcollect.common.seeding import Stream, env_seed
from distcollect.errors import ArgumentError, CollectorStateError

_FORMAT = 2


class Resumption:
    """Makes the state of a collector's run, and continues a run from it.

    Attributes:
        seed: the run's seed, and whether it is static; None: there is none.
    """

    def __init__(self, backend: Backend) -> None:
        """Begin a run that was not resumed."""
        self.seed: tuple[int, bool] | None = None
        self._backend = backend
        self._resumes = 0  # how often the run was resumed
        self._is_loading = False  # until a load has ended

    def state_dict(self, worker_ids: Sequence[int]) -> dict[str, Any]:
        """See :meth:`.DataCollectorBase.state_dict`."""
        backend = self._backend
        state: dict[str, Any] = {
            "format": _FORMAT,
            "frames": backend.frames,
            "policy_version": backend.policy_version,
            "next_traj_id": identity().next_traj_id,
            "seed": self.seed,
            "resumes": self._resumes,
            "entries": self._entries(),
        }
        if backend.statistics is not None:
            state["normalizer"] = backend.statistics.state_dict()
        if backend.layout.is_torchrl:
            own: dict[str, Any] = {"policy_version": backend.policy_version}
            if isinstance(backend.policy, nn.Module):
                own["policy_state_dict"] = backend.policy.state_dict()
            state |= own | {f"worker{each}": dict(own) for each in worker_ids}
        return state

    def _entries(self) -> dict[str, str]:
        """What a frame has of its env: name to shape and dtype."""
        layout = self._backend.layout
        return {".".join(leaf.key): str(leaf) for leaf in (*layout.state, *layout.action)}

    def load(self, state: Mapping[str, Any], set_seed: Callable[[int, bool], object]) -> None:
        """See :meth:`.DataCollectorBase.load_state_dict`."""
        backend = self._backend
        if backend.batches:
            raise CollectorStateError(
                f"this collector has delivered {backend.frames:,} frames: call "
                "load_state_dict() on a new one, before its first batch"
            )
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            raise ArgumentError(
                f"this is no state of a collector (format {_FORMAT}): {str(state)[:100]}; "
                "give what state_dict() returned"
            )
        saved, present = dict(state.get("entries", {})), self._entries()
        differing = [key for key in saved if present.get(key, saved[key]) != saved[key]]
        if differing:
            raise ArgumentError(
                f"the state is of frames with {', '.join(saved[key] for key in differing)}, this "
                f"collector's have {', '.join(present[key] for key in differing)}: make the envs "
                "as they were then, or give another state"
            )
        # What an interrupted load has published doesn't count.
        if state["policy_version"] < backend.policy_version and not self._is_loading:
            raise ArgumentError(
                f"the state has policy_version {state['policy_version']}, but this collector has "
                f"published version {backend.policy_version} already: load the state first"
            )
        weights = state.get("policy_state_dict")
        has_weights = weights is not None and isinstance(backend.policy, nn.Module)
        if has_weights:
            try:
                backend.policy.load_state_dict(weights)
            except RuntimeError as error:
                raise ArgumentError(
                    f"the state has the weights of another policy: {error}"
                ) from error
        has_statistics = backend.load_statistics(state)
        # From here on, workers may be waited for. If that is interrupted, load the state again.
        self._is_loading = True
        if has_weights or has_statistics:
            backend.publish(None, None, wait=True)
        backend.drop_trajectories()  # a batch that the buffer refused has ids from before
        backend.frames = backend.resumed_frames = state["frames"]
        self._resumes = state["resumes"] + 1
        backend.resume(state["policy_version"], state["next_traj_id"])
        if backend.statistics is not None:
            backend.statistics.renumber(backend.policy_version)
        if state["seed"] is not None:
            seed, static_seed = state["seed"]
            set_seed(env_seed(seed, self._resumes, stream=Stream.RESUMED), static_seed)
            self.seed = seed, static_seed
        self._is_loading = False
