"""A folder of memory-mapped frames on disk, with a record of how many are written.

``TensorDict.load_memmap(folder)`` is a TensorDict ``[N]`` for all frames; the first ``frames`` of
them, a number in the folder's ``collect.json``, are written. That number is raised only after the
frames have reached the disk, so the first ``frames`` are complete however the writer ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import tensordict
import torch
from tensordict import TensorDict

from distcollect.common.files import replacing
from distcollect.envs.base import space_of
from distcollect.errors import ArgumentError, CollectorStateError
from distcollect.rollout.spaces import leaves_of

RECORD = "collect.json"
_DRAFT = f".{RECORD}"
_DESCRIPTION = "meta.json"  # TensorDict's, in each folder of frames
_FORMAT = 1
_RECORD_EVERY_S = 1.0  # a process that is killed loses at most the frames of this time
_GIB = 1 << 30
_ANY_NAME = (0, 13)  # since this version of TensorDict, names of entries may have slashes

_Self = TypeVar("_Self", bound="SavedFrames")


def frame_bytes(env: gym.Env[Any, Any]) -> int:
    """Bytes of a frame of ``env`` in a batch, without what a policy writes besides its action.

    Raises:
        SpaceError: the env has a space that is not supported.
    """
    observation = leaves_of(space_of(env, "observation"), "observation")
    leaves = [*observation, *observation, *leaves_of(space_of(env, "action"), "action")]
    # Reward; done, terminated and truncated before and after; faulted; three ids.
    bookkeeping = 4 + 6 + 1 + 3 * 8
    return bookkeeping + sum(
        torch.Size(leaf.shape).numel() * leaf.dtype.itemsize for leaf in leaves
    )


class SavedFrames:
    """The frames in a folder; one process at a time may add to it.

    Attributes:
        frames: how many frames are written.
        resumes: how often a process resumed collecting.
        next_traj_id: higher than every traj_id in the folder.
    """

    def __init__(self, folder: Path, num_frames: int, settings: Mapping[str, Any]) -> None:
        """Open or make the folder.

        Args:
            folder: a folder that is new, empty, or from an earlier call with the same settings;
                with any settings if that wrote no frames.
            num_frames: N, how many frames the folder is to hold.
            settings: what the frames depend on, in values that JSON can hold.

        Raises:
            ArgumentError: the folder holds something else or frames of other settings, or can't be
                written to.
            CollectorStateError: another process is writing to the folder.
        """
        self.folder = folder
        self.num_frames = num_frames
        self._record: dict[str, Any] = {
            "format": _FORMAT,
            "frames": 0,
            "resumes": 0,
            "next_traj_id": 0,
            "settings": {"frames": num_frames, **settings},
        }
        self._frames: TensorDict | None = None
        self._files: list[int] = []
        with contextlib.ExitStack() as undo:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(folder, os.O_RDONLY)
                undo.callback(os.close, self._lock)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CollectorStateError(
                    f"--out {folder}: another process is writing there; wait for it, or name "
                    "another"
                ) from None
            except OSError as error:
                raise ArgumentError(
                    f"--out {folder} can't be a folder of frames ({error.strerror}): name another"
                ) from error
            self._read()
            undo.pop_all()

    def _read(self) -> None:
        if not (self.folder / RECORD).exists():
            # A process that was killed at its start has left a draft of its first record.
            if others := sorted({path.name for path in self.folder.iterdir()} - {_DRAFT}):
                raise ArgumentError(
                    f"--out {self.folder} holds other things ({', '.join(others[:3])}"
                    f"{', ...' if len(others) > 3 else ''}): name a new or empty folder"
                )
            return
        try:
            found = json.loads((self.folder / RECORD).read_text())
            known = found["format"] == _FORMAT
        except OSError as error:
            raise ArgumentError(
                f"{self.folder / RECORD} can't be read ({error.strerror}): name another folder"
            ) from error
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ArgumentError(
                f"{self.folder / RECORD} is no record of format {_FORMAT}: name another folder"
            )
        if not found["frames"]:
            self._discard()  # frames that were never recorded, perhaps of other settings
            return
        wanted, there = self._record["settings"], found["settings"]
        if differing := [
            f"{name} {there.get(name)!r}, not {wanted.get(name)!r}"
            for name in {**wanted, **there}
            if wanted.get(name) != there.get(name)
        ]:
            raise ArgumentError(
                f"--out {self.folder} holds frames of other settings: {'; '.join(differing)}. Name "
                "another folder, or use the same settings"
            )
        self._record = found

    def _discard(self) -> None:
        """Remove what was made for frames, none of which was written."""
        for path in sorted(self.folder.rglob("*"), reverse=True):  # what is in a folder goes first
            if path.is_dir():
                with contextlib.suppress(OSError):  # other things are in it
                    path.rmdir()
            elif path.name == _DESCRIPTION or path.name.endswith(".memmap"):
                path.unlink()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def frames(self) -> int:
        return self._record["frames"]  # type: ignore[no-any-return]

    @property
    def resumes(self) -> int:
        return self._record["resumes"]  # type: ignore[no-any-return]

    @property
    def next_traj_id(self) -> int:
        return self._record["next_traj_id"]  # type: ignore[no-any-return]

    @property
    def is_complete(self) -> bool:
        """Whether all frames are written."""
        return self.frames == self.num_frames

    def check_room(self, bytes_per_frame: int) -> None:
        """Raise ArgumentError if the disk has too little room for the frames.

        Does nothing if there are frames already: the room for all was allocated with the first.
        """
        free = shutil.disk_usage(self.folder).free
        needed = self.num_frames * bytes_per_frame
        if not self.frames and needed > free:
            raise ArgumentError(
                f"{self.num_frames:,} frames need {needed / _GIB:.1f} GiB, and {self.folder} has "
                f"{free / _GIB:.1f} GiB left: take fewer, or another disk"
            )

    def begin(self) -> None:
        """Record that this process begins or resumes; raises what :meth:`record` raises."""
        if self.frames:
            self._record["resumes"] += 1
        self._write_record()
        self._recorded_at = time.monotonic()

    def add(self, batch: TensorDict) -> int:
        """Write the frames of ``batch``, row by row, until the folder is complete.

        Returns:
            The number of frames written.

        Raises:
            ArgumentError: the disk is full, or the frames differ in kind from those in the folder.
        """
        flat = batch.reshape(-1)
        if self._frames is None:
            self._frames = self._mapped(flat)
        first = self.frames
        count = min(len(flat), self.num_frames - first)
        self._frames[first : first + count] = flat[:count]
        highest = int(flat["collector", "traj_ids"][:count].max())
        self._record["next_traj_id"] = max(self.next_traj_id, highest + 1)
        self._record["frames"] += count
        if self.is_complete or time.monotonic() - self._recorded_at > _RECORD_EVERY_S:
            self.record()
        return count

    def _mapped(self, flat: TensorDict) -> TensorDict:
        if self.frames:
            frames = TensorDict.load_memmap(self.folder)
            there, new = _kinds(frames), _kinds(flat)
            if there != new:
                names = sorted({name for name, _ in there.items() ^ new.items()})
                raise ArgumentError(
                    f"--out {self.folder}: the frames there differ from the new ones in "
                    f"{', '.join(names)}; name another folder, or use the same env and policy"
                )
        else:
            self.check_room(flat[:1].bytes())
            _check_names(flat)
            frames = flat[:1].expand(self.num_frames).memmap_like(self.folder)
        try:
            for file in sorted(self.folder.rglob("*.memmap")):
                self._files.append(os.open(file, os.O_RDWR))
                # Otherwise a write to the map would kill this process when the disk is full.
                os.posix_fallocate(self._files[-1], 0, file.stat().st_size)
        except OSError as error:
            if not self.frames:
                self._discard()
            raise ArgumentError(
                f"--out {self.folder}: no room for {self.num_frames:,} frames ({error.strerror}): "
                "take fewer, or another disk"
            ) from error
        return frames

    def record(self) -> None:
        """Write all frames to the disk, and then their number.

        Raises:
            ArgumentError: the disk is full or gone; what was recorded before remains.
        """
        try:
            for file in self._files:
                os.fdatasync(file)
        except OSError as error:
            raise self._unwritable(error) from error
        self._write_record()
        self._recorded_at = time.monotonic()

    def _write_record(self) -> None:
        try:
            with replacing(self.folder / RECORD, self.folder / _DRAFT) as file:
                file.write(json.dumps(self._record, indent=1).encode())
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ArgumentError:
        return ArgumentError(
            f"--out {self.folder} can't be written ({error.strerror}): once it can, the same "
            "command continues from the frames that were recorded before"
        )

    def close(self) -> None:
        """Record all frames and close the folder; raises what :meth:`record` raises."""
        try:
            if self._files:
                self.record()
        finally:
            self._frames = None
            for file in self._files:
                os.close(file)
            self._files.clear()
            os.close(self._lock)


def _kinds(frames: TensorDict) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        ".".join(key) if isinstance(key, tuple) else key: (value.shape[1:], value.dtype)
        for key, value in frames.items(include_nested=True, leaves_only=True)
        if value.numel()  # an empty tensor has no file
    }


def _check_names(frames: TensorDict) -> None:
    """Check that this version of TensorDict writes entries of these names.

    Raises:
        ArgumentError: it would write them to other folders, and not find them again.
    """
    major, minor, *_ = tensordict.__version__.split(".")
    if (int(major), int(minor)) >= _ANY_NAME:
        return
    wrong = sorted(name for name in _kinds(frames) if "/" in name)
    if wrong:
        raise ArgumentError(
            f"TensorDict {tensordict.__version__} can't write entries with a slash in their "
            f"name to files: {', '.join(wrong)}; install TensorDict "
            f"{'.'.join(map(str, _ANY_NAME))} or newer"
        )
