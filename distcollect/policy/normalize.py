"""Normalises observations where the policy acts, and keeps the statistics where batches come.

Only the trainer updates the statistics, from the batches that it takes. With each publication it
freezes them: the frozen ones are in the buffers of the :class:`Normalizer`, which are published
with the weights. So the ``policy_version`` of a frame says which statistics its policy acted with,
and a batch is normalised by these, on the trainer.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from distcollect.config import Normalize
from distcollect.errors import ArgumentError
from distcollect.policy.weight_layout import STATISTICS, module_of, named_tensors, state_tensors
from distcollect.rollout.header import Header
from distcollect.rollout.layout import POLICY_VERSION, TRAJ_IDS, Layout
from distcollect.rollout.spaces import Key, Leaf, as_key

_REWARD: Key = ("next", "reward")

_Frames = TypeVar("_Frames")


class Normalizer(nn.Module):
    """Subtracts the mean from observations, divides by the deviation, and clips.

    It computes in float64. The result has the observation's dtype, for integers float32. For a
    policy that acts without a collector::

        nn.Sequential(collector.normalizer, policy)

    Attributes:
        settings: what to normalise.
        leaves: the entries of the observation that are normalised.
    """

    def __init__(self, settings: Normalize) -> None:
        """Start without entries."""
        super().__init__()
        self.settings = settings
        self.leaves: tuple[Leaf, ...] = ()

    def bind(self, entries: Iterable[Leaf]) -> None:
        """Choose from the entries of an observation, as the settings say; all means are 0 then.

        A choice stays: envs that are only evaluated in may show more beside it.

        Raises:
            ArgumentError: there is no such entry, or none has floats; or one of the choice is
                missing.
        """
        wanted, by_key = self.settings.observations, {leaf.key: leaf for leaf in entries}
        if lacking := {*self.leaves}.difference(by_key.values()):
            raise ArgumentError(
                f"Normalize: an env shows no {', '.join(sorted(map(str, lacking)))}, which the "
                f"envs before it show; it has {', '.join(map(str, by_key.values()))}"
            )
        if self.leaves:
            return
        if isinstance(wanted, bool):
            leaves = [each for each in by_key.values() if wanted and each.dtype.is_floating_point]
            missing = [*by_key] if wanted and not leaves else []
        else:
            keys = {as_key(key) for key in wanted}  # each once
            leaves = [leaf for key, leaf in by_key.items() if key in keys]
            missing = [*keys.difference(by_key)]
        if missing:
            known = ", ".join(map(str, by_key.values()))
            raise ArgumentError(
                f"Normalize(observations={wanted!r}): the observation has no such entry, or none "
                f"of floats: {known}; name the entries to normalise, or give False"
            )
        self.leaves = tuple(leaves)
        for index, leaf in enumerate(leaves):
            self.register_buffer(f"entry_{index}", _Moments(leaf.shape).frozen(0.0))

    def load(self, frozen: Sequence[torch.Tensor]) -> None:
        """Normalise by these statistics from now on, as :meth:`_Moments.frozen` gives them."""
        for own, new in zip(self.buffers(), frozen, strict=True):
            own.copy_(new)

    def normalized(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """Normalise one entry, ``[..., *shape]``."""
        return _normalized(value, self._buffer(key), self.settings.clip)

    def _buffer(self, key: Key) -> torch.Tensor:
        index = [leaf.key for leaf in self.leaves].index(key)
        return self.get_buffer(f"entry_{index}")

    def filling(self, key: Key, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Return a function that normalises ``source`` into ``target``, in little time."""
        mean, deviation = self._buffer(key)  # which is written in place
        clip = self.settings.clip
        exact = torch.empty_like(target, dtype=torch.float64)
        dtype = _dtype_of(source)  # rounded to it first, as in the batch
        rounded = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)

        def fill() -> None:
            rounded.copy_(exact.copy_(source).sub_(mean).div_(deviation).clamp_(-clip, clip))
            if rounded is not target:
                target.copy_(rounded)

        return fill

    def forward(self, observation: _Frames) -> _Frames:
        """Normalise an observation: a tensor, or a dict or TensorDict, which stays as it is.

        In a TensorDict of frames the observations under "next" are normalised too.
        """
        for leaf in self.leaves:
            if isinstance(observation, torch.Tensor):
                return self.normalized(leaf.key, observation)  # type: ignore[return-value]
            for key in (leaf.key, ("next", *leaf.key)):
                observation = _with(observation, key, partial(self.normalized, leaf.key))
        return observation


class Statistics:
    """The running statistics of a collector's frames, and what normalises its batches.

    Attributes:
        normalizer: has the statistics that were frozen last.
        worker_ids: gives the workers that may deliver frames.
        waiting: gives the lowest version of each rollout that waits; its worker may be gone.
        first_versions: gives those that workers which come may begin with.
    """

    worker_ids: Callable[[], Iterable[int]] = staticmethod(lambda: (0,))
    waiting: Callable[[], Iterable[int]] = staticmethod(lambda: ())
    first_versions: Callable[[], Collection[int]] = staticmethod(lambda: ())

    def __init__(self, normalizer: Normalizer, layout: Layout, *, raw: bool) -> None:
        """Start without frames.

        Args:
            normalizer: whose statistics these are.
            layout: of the rollouts.
            raw: leave batches as they are.

        Raises:
            ArgumentError: frames of this layout can't be normalised.
        """
        if layout.is_torchrl or layout.outcomes:
            raise ArgumentError(
                "normalize is for Gymnasium envs of one agent: use a transform in TorchRL's envs, "
                "or a module in the policy whose buffers have the statistics"
            )
        normalizer.bind(layout.normalized)
        self.normalizer = normalizer
        self.is_raw = raw
        self._settings = normalizer.settings
        self._lock = threading.Lock()  # of all below: a batch may be taken in the background
        self._observations = [_Moments(leaf.shape) for leaf in normalizer.leaves]
        self._returns = _Moments(())
        self._moments = [*self._observations, self._returns]
        self._before: list[_Moments] = []  # of the batch that was taken and is not settled yet
        # By worker_id and env: the last trajectory's id, and its discounted return so far.
        self._unfinished: dict[int, dict[int, tuple[int, float]]] = {}
        self._oldest: dict[int, int] = {}  # by worker_id: no older version can come
        self._frozen: dict[int, list[torch.Tensor]] = {}  # by policy_version
        self.freeze(0)

    def freeze(self, version: int) -> None:
        """Have the normalizer use the statistics of now, as those of ``version``."""
        with self._lock:
            frozen = [moments.frozen(self._settings.epsilon) for moments in self._observations]
            self._frozen[version] = frozen
            self._is_used = any(moments.count for moments in self._observations)
            self.normalizer.load(frozen)

    def renumber(self, version: int) -> None:
        """Call the statistics that were frozen last those of ``version``."""
        with self._lock:
            # Workers that still wait for it act with those from before.
            last = [self._frozen[each] for each in sorted(self._frozen)[-2:]]
            self._frozen = {version - 1: last[0], version: last[-1]}

    def take(self, frames: TensorDict, headers: Sequence[Header]) -> None:
        """Add the frames of a batch, and normalise them unless batches are raw.

        Args:
            frames: of W rollouts, in their order along the first dimension; written to.
            headers: of the rollouts.
        """
        worker_ids = [*self.worker_ids()]
        real = frames[TRAJ_IDS] >= 0
        with self._lock:
            self._before = [copy.copy(each) for each in self._moments]
            for leaf, moments in zip(self.normalizer.leaves, self._observations, strict=True):
                samples = frames[leaf.key]
                moments.add(samples.flatten(0, real.ndim - 1) if real.all() else samples[real])
            if self._settings.rewards:
                returns = self._discounted(frames, headers)
                self._returns.add(torch.from_numpy(returns)[real.flatten().cpu()])
            if not self.is_raw:
                self._normalize(frames, real)
            for header in headers:
                self._oldest[header.worker_id] = header.policy_version[0]
            to_come = [self._oldest.get(each, 0) for each in worker_ids]
            # Asked last: nothing comes from a worker that is gone after that.
            oldest = min((*to_come, *self.waiting()), default=0)
            first = self.first_versions()
            frozen = self._frozen.items()
            self._frozen = {v: each for v, each in frozen if v >= oldest or v in first}

    def settle(self, *, is_lost: bool) -> None:
        """The batch that was taken last is the user's, or is lost: then its frames don't count."""
        with self._lock:
            if is_lost:
                for moments, before in zip(self._moments, self._before, strict=False):
                    vars(moments).update(vars(before))
            self._before = []

    def _normalize(self, frames: TensorDict, real: torch.Tensor) -> None:
        """Normalise each observation by the statistics that its frame's policy acted with."""
        versions = frames[POLICY_VERSION]
        parts = {v: real & (versions == v) for v in versions[real].unique().tolist()}
        for index, leaf in enumerate(self.normalizer.leaves):
            for key in (leaf.key, ("next", *leaf.key)):
                if (value := frames.get(key, None)) is None:  # left out under "next"
                    continue
                new = torch.zeros_like(value, dtype=_dtype_of(value))
                for version, part in parts.items():
                    frozen = self._frozen[version][index]
                    # Mostly the whole batch, for which it takes a third of the time.
                    where = ... if part.all() else part
                    new[where] = _normalized(value[where], frozen, self._settings.clip)
                frames[key] = new
        frames[_REWARD] = self._scaled(frames[_REWARD])

    def _scaled(self, rewards: torch.Tensor) -> torch.Tensor:
        """Divide rewards by the deviation of the discounted returns so far."""
        if not self._settings.rewards:
            return rewards
        scale = self._returns.frozen(self._settings.epsilon)
        scale[0] = 0.0
        return _normalized(rewards, scale, self._settings.clip)

    def _discounted(self, frames: TensorDict, headers: Sequence[Header]) -> np.ndarray:
        """Return the discounted sum of rewards up to each frame of its trajectory.

        Returns:
            float64 ``[frames]``, in the order of ``frames``.
        """
        num_steps, gamma = headers[0].num_steps, self._settings.gamma
        ids = frames[TRAJ_IDS].numpy(force=True).reshape(-1, num_steps)
        sums: np.ndarray = frames[_REWARD].double().numpy(force=True).reshape(ids.shape).copy()
        # After each pass a sum has twice as many terms: a row takes log(T) operations, not T.
        reach = 1
        while reach < num_steps and gamma**reach:
            same = ids[:, reach:] == ids[:, :-reach]
            sums[:, reach:] += np.where(same, gamma**reach * sums[:, :-reach], 0.0)
            reach *= 2
        powers = gamma ** np.arange(1, num_steps + 1)
        num_first = (ids == ids[:, :1]).sum(1)
        last = np.maximum((ids >= 0).sum(1) - 1, 0)
        rows = np.arange(len(ids)).reshape(len(headers), -1).tolist()
        for header, own in zip(headers, rows, strict=True):
            unfinished = self._unfinished.setdefault(header.worker_id, {})
            for env, row in enumerate(own):
                if ids[row, 0] < 0:
                    continue  # the rollout was preempted before the env had a frame
                traj_id, so_far = unfinished.get(env, (-1, 0.0))
                if traj_id == ids[row, 0]:
                    num = num_first[row]
                    sums[row, :num] += so_far * powers[:num]
                unfinished[env] = int(ids[row, last[row]]), float(sums[row, last[row]])
        return sums.ravel()

    def normalized(self, frames: TensorDict) -> TensorDict:
        """Normalise raw frames, see :meth:`.DataCollectorBase.normalize`."""
        with self._lock:
            new = self.normalizer(frames)
            if not isinstance(new, torch.Tensor):  # the only observation
                new = _with(new, _REWARD, self._scaled)
        return new

    def completed(self, weights: Any, *, has_models: bool) -> dict[str, torch.Tensor]:
        """Return weights that the user gave, by name, and the statistics with them.

        Args:
            weights: the policy's, or with ``models`` also theirs.
            has_models: the names begin with those of the modules.
        """
        # A function without weights has none to give.
        lacks = callable(weights) and module_of(weights) is None
        given = {} if lacks else named_tensors(weights)
        if any(name.startswith(STATISTICS) for name in given):
            return given
        start = "" if has_models else "policy."
        own = state_tensors(nn.ModuleDict({STATISTICS: self.normalizer}))
        return {f"{start}{name}": value for name, value in given.items()} | own

    def state_dict(self) -> dict[str, Any]:
        """The statistics of all frames so far, as plain numbers; and if any are frozen."""
        with self._lock:
            moments = [each.state() for each in self._moments]
        return {"entries": self._names(), "moments": moments, "is_used": self._is_used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state; what is frozen stays as it is.

        Raises:
            ArgumentError: it is of other observations.
        """
        own = self._names()
        if state["entries"] != own:
            raise ArgumentError(
                f"the state has statistics of {state['entries']}, this collector normalises {own}: "
                "load it into one with the same envs and Normalize(observations=...)"
            )
        with self._lock:
            for moments, saved in zip(self._moments, state["moments"], strict=True):
                moments.load(saved)
            self._before = []  # a batch that waits for its delivery no longer counts

    def _names(self) -> list[str]:
        return [str(leaf) for leaf in self.normalizer.leaves]


class _Moments:
    """Count, mean and sum of squared deviations of all samples so far, in float64.

    Those of two sets of samples are joined by the formula of Chan, Golub and LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances" (1979).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Start without samples, each of which has this shape."""
        self.count = 0
        self._mean = torch.zeros(shape, dtype=torch.float64)
        self._squares = torch.zeros(shape, dtype=torch.float64)

    def add(self, samples: torch.Tensor) -> None:
        """Add samples, ``[N, *shape]``; one with a NaN or an infinity does not count."""
        samples = samples.to(torch.float64)
        mean = samples.mean(0)
        if not mean.isfinite().all():
            rows = samples.reshape(len(samples), self._mean.numel())
            samples = samples[rows.isfinite().all(1)]
            mean = samples.mean(0)
        if not (num := len(samples)):
            return
        squares = (samples - mean).square_().sum(0).cpu()
        delta, total = mean.cpu() - self._mean, self.count + num
        # Never in place: a copy of this object has the same tensors.
        self._mean = self._mean + delta * (num / total)
        self._squares = self._squares + squares + delta.square() * (self.count * num / total)
        self.count = total

    def frozen(self, epsilon: float) -> torch.Tensor:
        """Mean and deviation, the square root of variance plus ``epsilon``; 0 and 1 at the start.

        Returns:
            float64 ``[2, *shape]``.
        """
        if not self.count:
            return torch.stack([self._mean, torch.ones_like(self._mean)])
        deviation = (self._squares / self.count + epsilon).sqrt()
        return torch.stack([self._mean, deviation])

    def state(self) -> list[Any]:
        """Return count, mean and sum of squares as plain numbers."""
        return [self.count, self._mean.tolist(), self._squares.tolist()]

    def load(self, state: Sequence[Any]) -> None:
        """Continue from such a state."""
        self.count, *rest = state
        self._mean, self._squares = (torch.tensor(each, dtype=torch.float64) for each in rest)


def _normalized(value: torch.Tensor, frozen: torch.Tensor, clip: float) -> torch.Tensor:
    """Normalise ``[..., *shape]`` by what :meth:`_Moments.frozen` returned."""
    mean, deviation = frozen.to(value.device).unbind()
    result = value.to(torch.float64).sub(mean).div_(deviation).clamp_(-clip, clip)
    return result.to(_dtype_of(value))


def _dtype_of(value: torch.Tensor) -> torch.dtype:
    """Return the dtype that a value has once it is normalised."""
    return value.dtype if value.is_floating_point() else torch.float32


def _with(tree: Any, key: Key, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a dict or TensorDict with one entry changed; as it is, if there is no such entry."""
    name, *rest = key
    if name not in tree.keys():  # noqa: SIM118 - of a TensorDict
        return tree
    changed = tree.copy()
    changed[name] = _with(tree[name], tuple(rest), change) if rest else change(tree[name])
    return changed
