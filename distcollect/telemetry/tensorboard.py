"""Statistics for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from distcollect.errors import ArgumentError
from distcollect.results import Stats
from distcollect.telemetry.prometheus import figures


class TensorBoard:
    """Writes scalars for TensorBoard; their step is the number of frames."""

    about = "Monitor(tensorboard=True)"

    def __init__(self, folder: Path, every_s: float) -> None:
        """Write events to ``folder``.

        Raises:
            ArgumentError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ArgumentError(
                f"Monitor(tensorboard=True): {error}; install it with "
                "pip install 'distcollect[tensorboard]'"
            ) from error
        self.every_s = every_s
        self._events: Any = SummaryWriter(str(folder))

    def write(self, stats: Stats) -> None:
        """Write all figures that change with time, but none of single workers."""
        for name, value in figures(stats).items():
            # TensorBoard groups by the part before "/": "trainer_share/train".
            group, share, part = name.partition("_share_")
            tag = f"{group}_share/{part}" if share else f"collector/{name}"
            self._events.add_scalar(tag, value, stats.frames)
        of = {"metrics": stats.episodes, "evaluation_metrics": stats.evaluation}
        for group, episodes in of.items():
            for name, value in episodes.metrics.items():
                if not math.isnan(value):
                    self._events.add_scalar(f"{group}/{name}", value, stats.frames)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()
