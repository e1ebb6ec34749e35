"""Runs launch/first_steps.ipynb and saves it with its output: python .ci/run_notebook.py."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

notebook_file = Path(__file__).parent.parent / "launch" / "first_steps.ipynb"
notebook = nbformat.read(notebook_file, 4)
NotebookClient(notebook, timeout=600).execute()
for cell in notebook.cells:
    cell.metadata.pop("execution", None)  # times
nbformat.write(notebook, notebook_file)
