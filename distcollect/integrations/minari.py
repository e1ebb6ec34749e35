"""Writes the whole episodes of a folder of frames to a Minari data set."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from distcollect.common.refusing import refusing
from distcollect.envs.base import space_of
from distcollect.errors import ArgumentError
from distcollect.rollout.spaces import Leaf, leaf_spaces, leaves_of, unflatten
from distcollect.version import __version__


@dataclass(frozen=True)
class MinariTarget:
    """A Minari data set that is to be made.

    Attributes:
        dataset_id: its name, such as ``cartpole/random-v0``.
        algorithm_name: what chose the actions.
        author: who made it; None: not said.
        author_email: how to reach them; None: not said.
        code_permalink: where the code is; None: not said.
    """

    dataset_id: str
    algorithm_name: str
    author: str | None = None
    author_email: str | None = None
    code_permalink: str | None = None

    @property
    def folder(self) -> Path:
        """Where Minari keeps it."""
        from minari.storage.datasets_root_dir import get_dataset_path  # noqa: PLC0415 - an extra

        return Path(get_dataset_path(self.dataset_id))

    def check(self, env: gym.Env[Any, Any]) -> None:
        """Raise ArgumentError unless it can be made of the frames of ``env``."""
        option = f"--minari {self.dataset_id}"
        remedy = "pip install 'distcollect[minari]', with Python 3.11 or newer"
        with refusing(f"{option}: a package is missing", remedy, ImportError):
            import h5py  # noqa: F401, PLC0415
            from minari.dataset.minari_dataset import parse_dataset_id  # noqa: PLC0415
        remedy = "name it as NAMESPACE/NAME-vNUMBER, for example cartpole/random-v0"
        # TypeError: it has no version.
        with refusing(f"{option}: no name of a data set", remedy, (ValueError, TypeError)):
            parse_dataset_id(self.dataset_id)
        if self.folder.exists():
            raise ArgumentError(
                f"{option}: {self.folder} exists already; choose another name or number, or delete "
                f"it: minari delete {self.dataset_id}"
            )
        if not isinstance(env, gym.Env | VectorEnv):  # a TorchRL env shows spaces, too
            raise ArgumentError(
                f"--minari {self.dataset_id}: a {type(env).__name__} is no Gymnasium env, and its "
                "frames are not of Gymnasium's spaces: leave --minari out, or name an env of "
                "Gymnasium (distcollect.PettingZooEnv makes one of PettingZoo's)"
            )
        for role in ("observation", "action"):
            paths = [path for path, _ in leaf_spaces(space_of(env, role))]
            for name in {part for path in paths for part in path if isinstance(part, str)}:
                if "/" in name or name in (".", ".."):
                    raise ArgumentError(
                        f"--minari: the {role} space has an entry {name!r}, which the HDF5 files "
                        "of Minari can't have; rename it in a wrapper"
                    )

    def write(
        self,
        folder: Path,
        num_frames: int,
        env: gym.Env[Any, Any],
        settings: Mapping[str, Any],
        *,
        rests: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Make the data set.

        Args:
            folder: see :class:`~.saved.SavedFrames`; complete.
            num_frames: number of frames in it.
            env: an env of the kind that the frames are from.
            settings: how the frames were collected; kept in the data set's metadata.
            rests: the ids of trajectories that are the rest of an episode.

        Returns:
            The number of episodes, and the number of frames in them.

        Raises:
            ArgumentError: there is no whole episode.
        """
        import minari  # noqa: PLC0415

        frames = TensorDict.load_memmap(folder)[:num_frames]
        whole = list(_whole_episodes(frames, rests))
        if not whole:
            raise ArgumentError(
                f"--minari {self.dataset_id}: no episode of the {num_frames:,} frames in {folder} "
                "has ended, and only whole episodes are written; collect more frames"
            )
        spaces = {role: space_of(env, role) for role in ("observation", "action")}
        try:
            with warnings.catch_warnings():
                # It recommends to say what was left out, and to use envs that have an id.
                warnings.simplefilter("ignore", UserWarning)
                dataset = minari.create_dataset_from_buffers(
                    self.dataset_id,
                    _buffers(frames, whole, spaces),
                    env.spec if isinstance(env.spec, EnvSpec) else None,  # EnvPool's is no such
                    observation_space=spaces["observation"],
                    action_space=spaces["action"],
                    algorithm_name=self.algorithm_name,
                    author=self.author,
                    author_email=self.author_email,
                    code_permalink=self.code_permalink,
                    jpeg_encoding=False,  # which changes the pixels
                )
            dataset.storage.update_metadata({"distcollect": {"version": __version__, **settings}})
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return len(whole), sum(map(len, whole))


def _whole_episodes(frames: TensorDict, rests: Sequence[int]) -> Iterator[np.ndarray]:
    """For each episode that its env has begun and ended, the indices of its frames, in order."""
    ids = frames["collector", "traj_ids"].numpy()
    is_end = frames["next", "done"].numpy()[:, 0] & ~frames["collector", "faulted"].numpy()
    is_end &= ~np.isin(ids, rests)
    order = ids.argsort(kind="stable")
    for episode in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
        if is_end[episode[-1]]:
            yield episode


def _buffers(
    frames: TensorDict, episodes: Sequence[np.ndarray], spaces: Mapping[str, gym.Space[Any]]
) -> Iterator[Any]:
    from minari.data_collector import EpisodeBuffer  # noqa: PLC0415

    leaves = {role: leaves_of(space, role) for role, space in spaces.items()}
    before = [_column(frames, leaf) for leaf in leaves["observation"]]
    after = [_column(frames["next"], leaf) for leaf in leaves["observation"]]
    action = [_column(frames, leaf) for leaf in leaves["action"]]
    reward, terminated, truncated = (
        frames["next", name].numpy()[:, 0] for name in ("reward", "terminated", "truncated")
    )
    for at in episodes:
        last = at[-1:]
        seen = (
            np.concatenate([root[at], following[last]])
            for root, following in zip(before, after, strict=True)
        )
        yield EpisodeBuffer(
            observations=unflatten(spaces["observation"], seen),
            actions=unflatten(spaces["action"], (column[at] for column in action)),
            rewards=reward[at],
            terminations=terminated[at],
            truncations=truncated[at],
        )


def _column(frames: TensorDict, leaf: Leaf) -> np.ndarray:
    column: np.ndarray = frames[leaf.key].numpy()
    return column
