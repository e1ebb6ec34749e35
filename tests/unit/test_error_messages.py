"""Every message that a user can meet says what was wrong, with which value, and what to do."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from helpers.bad_calls import ARGUMENTS, RUNNING, saves
from helpers.command_line import folders, modules, status_of
from helpers.error_rows import ARGUMENT, STATE, Row, check, rpc
from helpers.paths import ROOT
from torch import nn

import distcollect as dc
from distcollect.common import signals

__all__ = ["folders", "modules"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("row", range(len(ARGUMENTS)))
@pytest.mark.usefixtures("modules")
def test_of_arguments(row: int, started: Callable[[], list[str]]) -> None:
    check(ARGUMENTS[row])
    assert started() == []


@pytest.mark.parametrize("row", range(len(RUNNING)))
def test_in_process(row: int) -> None:
    check(RUNNING[row])


COLLECT = "collect --frames 8 --out new --env CartPole-v1"


COMMANDS: list[tuple[str, str]] = [
    # the command, and a regular expression for its one line of output
    ("nonsense", "'nonsense'.*collect'?, '?doctor"),
    ("collect", "required: --env, --frames, --out"),
    (f"{COLLECT} --frames ten", "--frames: .*'ten'"),
    (f"{COLLECT} --frames 0", "--frames: '0': must be a whole number, at least 1"),
    (f"{COLLECT} --env CartPoel-v1", "CartPoel.*CartPole.*module:id"),
    (f"{COLLECT} --env raises_on_import:Env-v0", "importing .* failed \\(OSError: no licence\\)"),
    (f"{COLLECT} --env collections:OrderedDict", "makes a OrderedDict: name a Gymnasium env"),
    (f"{COLLECT} --env Lacking-v0", "--env Lacking-v0 .*no_such_simulator.*install"),
    (f"{COLLECT} --out five.py", "--out five.py .*File exists.*: name another"),
    (f"{COLLECT} --policy no.pt", "no.pt: there is no such file; .*MODULE:NAME"),
    (f"{COLLECT} --policy five.py", "five.py was not written by torch.save.*name a file that was"),
    (f"{COLLECT} --policy :net", ":net: there is no such file.*MODULE:NAME"),
    (f"{COLLECT} --policy raises_on_import:net", "can't be imported .OSError: no licence"),
    (f"{COLLECT} --policy five:four", "has no 'four'; name a policy that it defines"),
    (f"{COLLECT} --policy five:five", "5 can't be called.*name a module or function"),
    (f"{COLLECT} --weights five.py", "--weights five.py needs a --policy"),
    (
        f"{COLLECT} --policy torch.nn:Identity --weights five.py",
        "five.py is no file of weights.*torch.save",
    ),
    (f"{COLLECT} --author me", "--author me: it goes into a Minari data set; name one by --minari"),
    ("bench --env CartPole-v1 --envs 1,no", "--envs: 'no': must be a whole number, at least 1"),
    ("bench --env CartPole-v1 --workers -1", "'-1': must be a whole number, at least 0"),
    ("bench --env five:five", "no env 'five:five'"),
    ("bench --env collections:OrderedDict", "makes a OrderedDict: name a Gymnasium env"),
    ("bench --env CartPole-v1 --json no/x", "--json: no/x: No such file or directory; name a file"),
    ("top", "required: RUN"),
    ("run", "required: SCRIPT$"),
    ("status", "required: RUN"),
    ("top .", "there is no stats.jsonl; name the folder"),
    ("top noise", "noise/stats.jsonl holds no statistics yet.*try again.*name the folder"),
    ("report .", "there is no stats.jsonl; name the folder"),
    ("report noise", "noise/stats.jsonl holds no snapshots.*try again.*name a folder"),
    ("status .", "holds no run.*Name the folder that it printed"),
    ("status other", "other holds no run.*Name the folder that it printed"),
    ("status unsubmitted", "none of the run's jobs was submitted.*submit it again"),
    ("cancel five.py", "five.py holds no run.*Name the folder that it printed"),
    ("submit", "no script given"),
    ("submit no.py", "no.py is not a file: name the training script"),
    ("submit --nodes none five.py", "--nodes: 'none': must be a whole number, at least 1"),
    ("submit --mem-gb -1 five.py", "--mem-gb: '-1': must be a number above 0"),
    ("submit --mem-gb inf five.py", "--mem-gb: 'inf': must be .*, and at most 1e8"),
    ("submit --slurm =1 five.py", "--slurm '=1': must be NAME or NAME=VALUE"),
    ("submit --time 1 five.py", "--notice 120 s .*1 minute.*more --time, or a shorter"),
    ("submit --run-folder five.py/run five.py", "five.py is a file: name another --run-folder"),
    ("submit --run-folder run five.py", "run holds a run already: name another"),
    ("submit --time 0 five.py", "--time: '0': must be more than 0"),
    ("submit --add-workers run", "needs --worker-jobs"),
    ("submit --add-workers run --worker-jobs 1 five.py", "takes no script"),
    ("submit --add-workers ended --worker-jobs 1", "it is done.* --resume .*ended goes on"),
    ("submit --resume ended five.py", "ended: there is no checkpoint.pt, .* leave --resume out"),
    (
        "submit --add-workers run --worker-jobs 1",
        "no other worker can join.*again, with --worker-jobs",
    ),
    ("worker", "--join --run is required"),
    ("worker --join here", "--join='here': must be HOST:PORT"),
    ("worker --join 127.0.0.1:²", "--join='127.0.0.1:²': must be HOST:PORT"),
    ("worker --join 127.0.0.1:9", "token is missing: name the file"),
    ("worker --join 127.0.0.1:9 --token-file no", "--token-file=no: .*No such file.*has to hold"),
    ("worker --join 127.0.0.1:9 --threads 0", "--threads: '0': must be a whole number"),
    ("worker --join 127.0.0.1:9 --wait soon", "--wait: 'soon': must be a number above 0"),
    ("worker --run other", "--run other: .*no run of.*name the folder"),
    ("doctor --wait 0", "--wait: '0': must be a number above 0"),
    ("doctor --wait inf", "--wait: 'inf': must be .*, and at most 1e8"),
]


@pytest.mark.parametrize(("typed", "line"), COMMANDS)
@pytest.mark.usefixtures("folders")
def test_of_commands(
    typed: str,
    line: str,
    started: Callable[[], list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of(typed) == 2
    lines = capsys.readouterr().err.splitlines()
    lines = [text for text in lines if text.startswith("distcollect")]
    assert len(lines) == 1
    assert re.search(line, lines[0]), lines[0]
    assert started() == []


SCRIPTS = [*sorted((ROOT / "launch").glob("*.py")), *sorted((ROOT / "slurm").glob("*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_needs_no_launcher(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if script.stem == "train_impala":
        pytest.importorskip("ale_py")
    if script.stem.endswith("_torchrl"):
        pytest.importorskip("torchrl")
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_of_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    fits, other = nn.Linear(1, 1), nn.Linear(3, 3)
    rows: list[tuple[Any, Row]] = [
        (
            fits.state_dict(),
            (lambda: saves(path).load(), ARGUMENT, "c.pt can't be", "another path"),
        ),
        ({"format": 9, "parts": {}}, (lambda: saves(path).load(), ARGUMENT, "format 9", "use the")),
        (
            {"format": 1, "parts": {"part": other.state_dict()}},
            (
                lambda: saves(path).load(),
                ARGUMENT,
                "c.pt: .*'part' .*size mismatch",
                "another path",
            ),
        ),
        (
            {"format": 1, "parts": {"model": fits.state_dict()}},
            (lambda: saves(path).load(), ARGUMENT, r"\['model'\], not \['part'\]", "the same ones"),
        ),
        ({}, (lambda: saves(path).step(), STATE, "c.pt is from an earl", r"load\(\).* or remove")),
    ]
    try:
        for content, row in rows:
            torch.save(content, path)
            check(row)
        first = saves(tmp_path / "d.pt")
        first.save()
        check((lambda: saves(first.path).step(), STATE, "from another Checkpoint of this", "load"))
        whole = first.path.read_bytes()
        for share in (0.0, 0.1, 0.5, 0.9):
            path.write_bytes(whole[: int(share * len(whole))])
            check((lambda: saves(path).load(), ARGUMENT, "c.pt can't be .*damaged", "remove it"))
    finally:
        signals.stop_watching()


def test_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process saw no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for given in ({"weight_sync": dc.WeightSync(backend="nccl")}, {"backend": "nccl"}):
        check((lambda given=given: rpc(**given), ARGUMENT, "backend='nccl'", "use backend='auto'"))
