"""A folder of memory-mapped frames on disk, with a record of how many are written.

``TensorDict.load_memmap(folder)`` is a TensorDict ``[N]`` for all frames; the first ``frames`` of
them, a number in the folder's ``collect.json``, are written. That number is raised only after the
frames have reached the disk, so the first ``frames`` are complete however the writer ends. The
files can be made longer: N never gets smaller.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tensordict
import torch
from tensordict import TensorDict

from distcollect.common.files import replacing
from distcollect.common.refusing import refusing
from distcollect.errors import ArgumentError, CollectorStateError

RECORD = "collect.json"
_DRAFT = f".{RECORD}"
_DESCRIPTION = "meta.json"  # TensorDict's, in each folder of frames
_LONGER = ".longer"  # a folder of empty files that have the length to come
_FORMAT = 1
_RECORD_EVERY_S = 1.0  # a process that is killed loses at most the frames of this time
_GIB = 1 << 30


class SavedFrames:
    """The frames in a folder; one process at a time may add to it.

    Attributes:
        frames: how many frames are written.
        resumes: how often a process resumed collecting.
        next_traj_id: higher than every traj_id in the folder.
        rests: the ids of trajectories that are the rest of an episode.
    """

    def __init__(self, folder: Path, num_frames: int, settings: Mapping[str, Any]) -> None:
        """Open or make the folder, and record that this process begins or resumes.

        Args:
            folder: a folder that is new, empty, or from an earlier call with the same settings;
                with any settings if that wrote no frames.
            num_frames: how many frames the folder is to hold; it may hold more already.
            settings: what the frames depend on, in values that JSON can hold.

        Raises:
            ArgumentError: the folder holds something else or frames of other settings, or can't be
                written to.
            CollectorStateError: another process is writing to the folder.
        """
        self.folder = folder
        self.num_frames = num_frames
        self.frames = self.resumes = self.next_traj_id = 0
        self.rests: set[int] = set()
        self._settings = dict(settings)
        self._mapped: TensorDict | None = None
        self._files: list[int] = []
        with contextlib.ExitStack() as opened:
            with refusing(f"--out {folder} can't be a folder of frames", "name another"):
                folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(folder, os.O_RDONLY)
                opened.callback(os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise CollectorStateError(
                        f"--out {folder}: another process is writing there; wait for it, or name "
                        "another"
                    ) from None
                self._read()
            if not self.is_complete:
                self.resumes += bool(self.frames)
                self.record()
            self._opened = opened.pop_all()

    def _read(self) -> None:
        file = self.folder / RECORD
        try:
            found = json.loads(file.read_text())
            is_known = found["format"] == _FORMAT
        except FileNotFoundError:
            # A process that was killed at its start has left a draft of its first record.
            if others := sorted({path.name for path in self.folder.iterdir()} - {_DRAFT}):
                raise ArgumentError(
                    f"--out {self.folder} holds other things ({', '.join(others[:3])}"
                    f"{', ...' if len(others) > 3 else ''}): name a new or empty folder"
                ) from None
            return
        except (ValueError, KeyError, TypeError):
            is_known = False
        if not is_known:
            raise ArgumentError(f"{file} is no record of format {_FORMAT}: name another folder")
        if not found["frames"]:
            self._discard()  # frames that were never recorded, perhaps of other settings
            return
        self._finish_lengthening()
        wanted, there = self._settings, found["settings"]
        there.pop("frames", None)  # earlier versions put their number there
        if differing := [
            f"{name} {_shown(there, name)}, not {_shown(wanted, name)}"
            for name in {**wanted, **there}
            if wanted.get(name) != there.get(name)
        ]:
            raise ArgumentError(
                f"--out {self.folder} holds frames of other settings: {'; '.join(differing)}. Name "
                "another folder, or use the same settings"
            )
        self.frames, self.resumes = found["frames"], found["resumes"]
        self.next_traj_id, self.rests = found["next_traj_id"], {*found.get("rests", ())}

    def _discard(self) -> None:
        """Remove what was made for frames, none of which was written."""
        for path in sorted(self.folder.rglob("*"), reverse=True):  # what is in a folder goes first
            if path.is_dir():
                with contextlib.suppress(OSError):  # other things are in it
                    path.rmdir()
            elif path.name == _DESCRIPTION or path.name.endswith(".memmap"):
                path.unlink()

    def __enter__(self) -> SavedFrames:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_complete(self) -> bool:
        """Return True if all frames are written."""
        return self.frames >= self.num_frames

    def add(self, batch: TensorDict, rests: Iterable[int] = ()) -> int:
        """Write the frames of ``batch``, row by row, until the folder is complete.

        ``rests``: the ids of trajectories in it that are the rest of an episode.

        Returns:
            The number of frames written.

        Raises:
            ArgumentError: the disk is full, or the frames differ in kind from those in the folder.
        """
        flat = batch.reshape(-1)
        if self._mapped is None:
            self._mapped = self._map(flat)
        count = min(len(flat), self.num_frames - self.frames)
        self._mapped[self.frames : self.frames + count] = flat[:count]
        highest = int(flat["collector", "traj_ids"][:count].max())
        self.next_traj_id = max(self.next_traj_id, highest + 1)
        self.rests.update(rests)
        self.frames += count
        if self.is_complete or time.monotonic() - self._recorded_at > _RECORD_EVERY_S:
            self.record()
        return count

    def _map(self, flat: TensorDict) -> TensorDict:
        """Map the files of all frames, and allocate the room for them."""
        length = 0
        if self.frames:
            frames = TensorDict.load_memmap(self.folder)
            there, new = _kinds(frames), _kinds(flat)
            if there != new:
                names = sorted({name for name, _ in there.items() ^ new.items()})
                raise ArgumentError(
                    f"--out {self.folder}: the frames there differ from the new ones in "
                    f"{', '.join(names)}; name another folder, or use the same env and policy"
                )
            length = len(frames)
        if length < self.num_frames:
            more = self.num_frames - length
            free, needed = shutil.disk_usage(self.folder).free, more * flat[:1].bytes()
            if needed > free:
                raise ArgumentError(
                    f"{more:,} frames need {needed / _GIB:.1f} GiB, and {self.folder} "
                    f"has {free / _GIB:.1f} GiB left: take fewer, or another disk"
                )
            _check_names(flat)
            self._lengthen(flat)
            frames = TensorDict.load_memmap(self.folder)
        problem = f"--out {self.folder}: no room for {self.num_frames:,} frames"
        with refusing(problem, "take fewer, or another disk"):
            for path in sorted(self.folder.rglob("*.memmap")):
                file = os.open(path, os.O_RDWR)
                self._opened.callback(os.close, file)
                self._files.append(file)
                # Otherwise a write to the map would kill this process when the disk is full.
                os.posix_fallocate(file, 0, path.stat().st_size)
        return frames

    def _lengthen(self, flat: TensorDict) -> None:
        """Make all files, or make them longer."""
        draft = self.folder / f"{_LONGER}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        flat[:1].expand(self.num_frames).memmap_like(draft)
        draft.rename(self.folder / _LONGER)
        self._finish_lengthening()

    def _finish_lengthening(self) -> None:
        """Give the files the lengths of those in a folder; may be broken off, and called again."""
        longer = self.folder / _LONGER
        for file in [path for path in longer.rglob("*") if path.is_file()]:
            there = self.folder / file.relative_to(longer)
            there.parent.mkdir(parents=True, exist_ok=True)
            if file.name == _DESCRIPTION or not there.exists():
                file.replace(there)
            else:
                os.truncate(there, file.stat().st_size)
        shutil.rmtree(longer, ignore_errors=True)

    def record(self) -> None:
        """Write all frames to the disk, and then their number.

        Raises:
            ArgumentError: the disk is full or gone; what was recorded before remains.
        """
        names = ("frames", "resumes", "next_traj_id")
        numbers = {**{name: getattr(self, name) for name in names}, "rests": sorted(self.rests)}
        record = {"format": _FORMAT, **numbers, "settings": self._settings}
        remedy = "once it can, the same command continues from the frames that were recorded before"
        with refusing(f"--out {self.folder} can't be written", remedy):
            for file in self._files:
                os.fdatasync(file)
            with replacing(self.folder / RECORD, self.folder / _DRAFT) as draft:
                draft.write(json.dumps(record, indent=1).encode())
        self._recorded_at = time.monotonic()

    def close(self) -> None:
        """Record all frames and close the folder; raises what :meth:`record` raises."""
        self._mapped = None
        with self._opened:
            if self.frames and self._files:
                self.record()
            elif not self.frames:
                self._discard()


def _shown(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    return "(none given)" if value is None else repr(value)


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
    wrong = sorted(name for name in _kinds(frames) if "/" in name)
    version = tensordict.__version__
    if wrong and tuple(map(int, version.split(".")[:2])) < (0, 13):
        raise ArgumentError(
            f"TensorDict {version} can't write entries with a slash in their name to files: "
            f"{', '.join(wrong)}; install TensorDict 0.13 or newer"
        )
