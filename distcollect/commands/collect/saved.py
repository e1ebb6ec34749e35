"""A folder of frames on disk: memory-mapped, and a record of how many of them are there.

``TensorDict.load_memmap(folder)`` is a TensorDict ``[N]`` of all frames that are wanted; the first
``frames`` of them, a number in the folder's ``collect.json``, are there. That number is written
only when they have reached the disk, so whatever ends the writer, the first ``frames`` are whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import torch
from tensordict import TensorDict

from distcollect.common.files import replacing
from distcollect.errors import ArgumentError, CollectorStateError
from distcollect.rollout.spaces import leaves_of

RECORD = "collect.json"
_DRAFT = f".{RECORD}"
_FORMAT = 1
# What a process that is killed has collected in vain, at most.
_RECORD_EVERY_S = 1.0
_GIB = 1 << 30

_Self = TypeVar("_Self", bound="SavedFrames")


def frame_bytes(env: gym.Env[Any, Any]) -> int:
    """Bytes of a frame of ``env`` in a batch, without what a policy writes beside its action.

    Raises:
        SpaceError: a space that no batch can carry.
    """
    observation = leaves_of(env.observation_space, "observation")
    leaves = [*observation, *observation, *leaves_of(env.action_space, "action")]
    # Reward; done, terminated and truncated before and after; faulted; three ids.
    bookkeeping = 4 + 6 + 1 + 3 * 8
    return bookkeeping + sum(
        torch.Size(leaf.shape).numel() * leaf.dtype.itemsize for leaf in leaves
    )


class SavedFrames:
    """The frames in a folder, which one process at a time adds to.

    Attributes:
        frames: how many are there.
        resumes: how often a process went on with them.
        next_traj_id: above all traj_ids in it.
    """

    def __init__(self, folder: Path, num_frames: int, settings: Mapping[str, Any]) -> None:
        """Open it, or make it.

        Args:
            folder: new, empty, or of an earlier call with the same settings.
            num_frames: N, how many it is to hold.
            settings: what the frames depend on, as JSON has it.

        Raises:
            ArgumentError: it holds something else, frames of other settings, or can't be written.
            CollectorStateError: another process is writing to it.
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
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise ArgumentError(
                f"--out {folder} can't be a folder of frames ({error.strerror}): name another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            os.close(self._lock)
            raise CollectorStateError(
                f"--out {folder}: another process is writing there; wait for it, or name another"
            ) from None
        except BaseException:
            os.close(self._lock)
            raise

    def _read(self) -> None:
        if not (self.folder / RECORD).exists():
            # Who was killed as it began has left the draft of its first record.
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
        wanted, there = self._record["settings"], found["settings"]
        if differing := [
            f"{name} {there.get(name)!r}, not {wanted.get(name)!r}"
            for name in {**wanted, **there}
            if wanted.get(name) != there.get(name)
        ]:
            raise ArgumentError(
                f"--out {self.folder} holds frames of other settings: {'; '.join(differing)}. Name "
                "another folder, or go on with the same settings"
            )
        if found["frames"]:
            self._record = found
        else:
            self._discard()  # what was cut off before its first record

    def _discard(self) -> None:
        """Give the room back that was taken for frames of which none is there."""
        for file in self.folder.rglob("*.memmap"):
            file.unlink()

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
        """Whether nothing is missing."""
        return self.frames == self.num_frames

    def check_room(self, bytes_per_frame: int) -> None:
        """Raise ArgumentError if the disk is too small for what is missing.

        For frames that are there already the room was taken when the first of them came.
        """
        free = shutil.disk_usage(self.folder).free
        needed = self.num_frames * bytes_per_frame
        if not self.frames and needed > free:
            raise ArgumentError(
                f"{self.num_frames:,} frames need {needed / _GIB:.1f} GiB, and {self.folder} has "
                f"{free / _GIB:.1f} GiB left: take fewer, or another disk"
            )

    def begin(self) -> None:
        """Take down that this process is the one that goes on. Raises as :meth:`record`."""
        if self.frames:
            self._record["resumes"] += 1
        self._write_record()
        self._recorded_at = time.monotonic()

    def add(self, batch: TensorDict) -> int:
        """Write the frames of ``batch``, rows one after the other, as far as there is room.

        Returns:
            How many these are.

        Raises:
            ArgumentError: the disk is full, or the frames are unlike those that are there.
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
                    f"--out {self.folder}: the frames there are unlike those that come now, in "
                    f"{', '.join(names)}; name another folder, or take the env and policy of then"
                )
        else:
            self.check_room(flat[:1].bytes())
            frames = flat[:1].expand(self.num_frames).memmap_like(self.folder)
        try:
            for file in sorted(self.folder.rglob("*.memmap")):
                self._files.append(os.open(file, os.O_RDWR))
                # Else a disk that gets full kills who writes to the map.
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
        """Have all frames on the disk, and their number.

        Raises:
            ArgumentError: the disk is full, or gone; what was recorded before is there.
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
            "command goes on from the frames that were recorded before"
        )

    def close(self) -> None:
        """Record what there is, and let go of it. Raises as :meth:`record`."""
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
        if value.numel()  # what has no bytes has no file
    }
