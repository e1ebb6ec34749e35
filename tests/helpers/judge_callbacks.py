"""Functions of the user's that raise when they are told to, and the truth about their envs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

import distcollect as dc

RAISED = "from the user's code"


class Trigger:
    """Raises in whatever process calls it, once :meth:`arm` was called in any.

    Attributes:
        kind: the exception that it raises.
    """

    def __init__(self, folder: Path, kind: type[BaseException], *, again: bool) -> None:
        """``again``: it raises in every call, not only in the first."""
        self.kind = kind
        self._file = str(folder / "armed")
        self._again = again

    def arm(self) -> None:
        Path(self._file).touch()

    @property
    def is_armed(self) -> bool:
        return Path(self._file).exists()

    def __call__(self) -> None:
        if self._again:
            raises = self.is_armed
        else:
            raises = False
            with contextlib.suppress(FileNotFoundError):
                Path(self._file).unlink()
                raises = True
        if raises:
            raise self.kind(RAISED)


class Env(gym.Env[np.ndarray, Any]):
    """Episodes of five steps; writes a byte to a file for each transition that it made."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, log: Path, step: Any = None, reset: Any = None) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._before_step, self._before_reset = step, reset
        self._steps = 0

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if self._before_reset is not None:
            self._before_reset()
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._before_step is not None:
            self._before_step()
        self._steps += 1
        os.write(self._log, b".")
        return np.full(1, self._steps, np.float32), 1.0, self._steps == 5, False, {}

    def close(self) -> None:
        os.close(self._log)


class Policy(nn.Module):
    """Always 0."""

    def __init__(self, before: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._before = before

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if self._before is not None:
            self._before()
        return torch.zeros(len(observation), dtype=torch.int64)


class Buffer:
    """A replay buffer that counts frames."""

    def __init__(self, before: Any = None) -> None:
        self.num_frames = 0
        self._before = before

    def extend(self, data: TensorDict) -> None:
        if self._before is not None:
            self._before()
        self.num_frames += data.shape.numel()


class Updater(dc.TransportUpdater):
    """Raises before it sends."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self._before = before

    def sources(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return super().sources(*args, **kwargs)


class Mapping(dc.TransportUpdater):
    """Raises before it changes the weights that are published."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self._before = before

    def _maybe_map_weights(self, weights: Any) -> Any:
        self._before()
        return weights


def arguments(name: str, trigger: Trigger, log: Path) -> dict[str, Any]:
    """Arguments of a collector, with a function of this name that calls the trigger."""

    def maker() -> Env:
        if name == "env maker":
            trigger()
        step = trigger if name == "step" else None
        return Env(log, step, trigger if name == "reset" else None)

    def factory() -> Policy:
        trigger()
        return Policy()

    def postproc(batch: TensorDict) -> TensorDict:
        trigger()
        return batch

    def post_collect_hook(batch: TensorDict) -> None:
        trigger()

    def pre_collect_hook() -> None:
        trigger()

    def init_fn() -> None:
        trigger()

    given: dict[str, Any] = {"create_env_fn": maker, "policy": Policy()}
    own: dict[str, dict[str, Any]] = {
        "policy": {"policy": Policy(trigger)},
        "policy_factory": {"policy": None, "policy_factory": factory},
        "postproc": {"postproc": postproc},
        "pre_collect_hook": {"pre_collect_hook": pre_collect_hook},
        "post_collect_hook": {"post_collect_hook": post_collect_hook},
        "extend": {"replay_buffer": Buffer(trigger)},
        "init_fn": {"init_fn": init_fn},
        "updater": {"weight_updater": Updater(trigger)},
        "mapped weights": {"weight_updater": Mapping(trigger)},
    }
    return {**given, **own.get(name, {})}


def raised_by(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call returns, and what it raises."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 - to be judged
        return None, error
