"""Counts the frames that a script collects, and the returns of its episodes.

``scripts.py`` has the copies of scripts import this first. FRAMES_OF names the package whose
collectors are counted, and FRAMES_FILE is the file to which the figures are written at the end.
"""

from __future__ import annotations

import atexit
import functools
import json
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_RETURNS = ("episode_reward", "reward_sum")
_LAST_EPISODES = 50


class Count:
    """What was collected between the first and the last batch.

    Attributes:
        frames: number of frames in it.
        begin, end: wall and CPU time of this process at the first and at the last batch, in s.
        returns: the returns of the last episodes.
        first: the shape and dtype of each entry of the first batch, by its key.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.begin: tuple[float, float] | None = None
        self.end = (0.0, 0.0)
        self.returns: deque[float] = deque(maxlen=_LAST_EPISODES)
        self.first: dict[str, str] | None = None

    def add(self, collector: Any, batch: Any) -> None:
        """Count a batch; None is one that went to a replay buffer."""
        self.end = time.monotonic(), time.process_time()
        if self.begin is None:
            self.begin = self.end
        else:
            self.frames += collector.frames_per_batch if batch is None else batch.numel()
        if batch is not None:
            if self.first is None:
                self.first = _entries(batch)
            self._note_returns(batch)

    def _note_returns(self, batch: Any) -> None:
        following = batch["next"]
        done = following.get("done", None)
        for key in following.keys(include_nested=True, leaves_only=True):
            if done is not None and (key if isinstance(key, str) else key[-1]) in _RETURNS:
                ended = following[key][done[..., 0]]
                self.returns.extend(episode.float().mean().item() for episode in ended)

    def write(self, path: Path) -> None:
        """Write the figures to a file."""
        begin = self.begin or self.end
        figures = {
            "frames": self.frames,
            "seconds": self.end[0] - begin[0],
            "cpu_seconds": self.end[1] - begin[1],
            "return": sum(self.returns) / len(self.returns) if self.returns else None,
            "episodes": len(self.returns),
            "first": self.first,
        }
        path.write_text(json.dumps(figures))


def _entries(batch: Any) -> dict[str, str]:
    entries = {"": f"{tuple(batch.batch_size)} on {batch.device}, names {batch.names}"}
    for key, value in batch.items(include_nested=True):
        name = key if isinstance(key, str) else "/".join(key)
        entries[name] = f"{tuple(value.shape)} {getattr(value, 'dtype', type(value).__name__)}"
    return entries


def _counted(iterate: Callable[[Any], Iterator[Any]], count: Count) -> Callable[[Any], Any]:
    @functools.wraps(iterate)
    def wrapper(self: Any) -> Iterator[Any]:
        for batch in iterate(self):
            count.add(self, batch)
            yield batch

    return wrapper


def _install(package: str, path: Path) -> None:
    count = Count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if package == "distcollect":
            from distcollect import BaseCollector  # noqa: PLC0415
        else:
            from torchrl.collectors import BaseCollector  # noqa: PLC0415
    BaseCollector.__iter__ = _counted(BaseCollector.__iter__, count)
    atexit.register(count.write, path)


if "FRAMES_FILE" in os.environ and multiprocessing.parent_process() is None:
    _install(os.environ["FRAMES_OF"], Path(os.environ.pop("FRAMES_FILE")))
