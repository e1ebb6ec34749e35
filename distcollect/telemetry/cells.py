"""The cells of IPython and notebooks: what passes after one concerns no run."""

from __future__ import annotations

import sys
import weakref

from distcollect.common import signals
from distcollect.telemetry.recorder import StatsRecorder

_recorders: weakref.WeakSet[StatsRecorder] = weakref.WeakSet()


def rest_between_cells(recorder: StatsRecorder) -> None:
    """Call ``recorder.rest()`` at the end of each cell; outside of IPython nothing happens.

    A Ctrl-C that comes once a cell has ended does not end the next one.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        _recorders.add(recorder)
        # Again, they change nothing.
        shell.events.register("post_run_cell", _cell_ended)
        shell.events.register("pre_run_cell", _cell_begins)


def _cell_ended(_result: object) -> None:
    for recorder in list(_recorders):
        recorder.rest()


def _cell_begins(_info: object) -> None:
    signals.forget_ctrl_c()
