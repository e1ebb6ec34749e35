"""The cells of IPython and notebooks: what passes after one is no time of a run."""

from __future__ import annotations

import sys
import weakref

from distcollect.telemetry.recorder import StatsRecorder

_recorders: weakref.WeakSet[StatsRecorder] = weakref.WeakSet()


def rest_between_cells(recorder: StatsRecorder) -> None:
    """Call ``recorder.rest()`` at the end of each cell; outside of IPython nothing happens."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        _recorders.add(recorder)
        shell.events.register("post_run_cell", _cell_ended)  # again, it changes nothing


def _cell_ended(_result: object) -> None:
    for recorder in list(_recorders):
        recorder.rest()
