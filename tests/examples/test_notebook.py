"""The notebook in ``launch/``: its cells run in a kernel, and the display appears in it."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest
from helpers.marked import Marked
from helpers.paths import ROOT

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
pytest.importorskip("ipykernel", reason="needs ipykernel")

NOTEBOOK = ROOT / "launch" / "first_steps.ipynb"
# The run is short here, so its display has to appear at once.
AT_ONCE = """
from distcollect.telemetry import display
display._FIRST_AFTER_S = 0
display.NotebookDisplay.every_s = 0.05
"""


@pytest.mark.filterwarnings("ignore")  # of Jupyter's
def test_its_cells_run(marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, 4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "total_frames=120_000" in code[1].source
    code[1].source = code[1].source.replace("120_000", "20_000")
    code[0].source += AT_ONCE
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=250, resources=where).execute()
    shown = [
        output.data["text/plain"]
        for cell in code
        for output in cell.outputs
        if output.output_type == "display_data"
    ]
    assert len(shown) == 1  # it was updated in place
    assert "20,000 of 20,000 frames (100%)" in shown[0]
    assert "Bound by" in shown[0]
    assert not marked.left()


CELLS = """
import signal
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell('''
import signal
import distcollect as dc
collector = dc.SyncDataCollector("CartPole-v1", None, frames_per_batch=4)
checkpoint = dc.Checkpoint("training.pt", save_on_ctrl_c=True, progress={})
''').raise_error()

def press():
    shell.events.unregister("post_execute", press)
    signal.raise_signal(signal.SIGINT)

shell.events.register("post_execute", press)
ended = shell.run_cell("signal.raise_signal(signal.SIGINT); checkpoint.step()")
assert isinstance(ended.error_in_exec, KeyboardInterrupt), ended
shell.run_cell("collector.next(); checkpoint.step()").raise_error()
"""


def test_ctrl_c_pressed_again_does_not_end_the_next_cell(tmp_path: Path) -> None:
    run([sys.executable, "-c", CELLS], cwd=tmp_path, timeout=120, check=True)


def test_its_output_is_small_and_true() -> None:
    """It was saved after it had run from top to bottom."""
    notebook = nbformat.read(NOTEBOOK, 4)
    numbers = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "120,000 of 120,000 frames (100%)" in str(notebook)
    assert NOTEBOOK.stat().st_size < 30_000
