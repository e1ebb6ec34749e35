"""``distcollect run`` without a launcher; under torchrun see ``processes/test_launch.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distcollect.commands.main import main

_SCRIPT = """
import json
import sys

import beside

print(json.dumps([__name__, sys.argv, beside.VALUE]))
"""


def test_runs_a_script_as_python_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 5")
    assert main(["run", str(script), "--lr", "1", "--help"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen == ["__main__", [str(script), "--lr", "1", "--help"], 5]


def test_there_must_be_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no-such.py", "--lr", "1"]) == 2
    assert capsys.readouterr().err == "distcollect: run no-such.py: there is no such file\n"
