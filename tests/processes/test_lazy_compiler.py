"""Torch's compiler is imported when something is compiled, and finds TensorDict's marks then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.programs import run_python

TOLD = """
import json, sys
told = []
def tell():
    told.append("torch._dynamo" in sys.modules)
{first}
import distcollect
from tensordict import TensorDict, utils
import torch
distcollect.SyncDataCollector
tell()

@torch.compile(backend="eager", fullgraph=True)
def compiled(td):
    td = td.clone()
    td["b"] = td["a"] + 1  # locks are checked by a function that is marked
    return td.lock_()

assert compiled(TensorDict({{"a": torch.zeros(2)}}, [2]))["b"].tolist() == [1, 1]
tell()
marked = [utils._lock_warn._dynamo_marked_constant, utils._check_inbuild._dynamo_marked_constant]
kept = [torch.compiler.allow_in_graph.__module__, utils.__loader__.get_filename()]
print(json.dumps([told, marked, kept]))
"""


@pytest.mark.parametrize(
    ("first", "early"),
    [("", False), ("import torch._dynamo", True)],
    ids=["distcollect", "the compiler"],
)
def test_what_is_imported_first(tmp_path: Path, first: str, early: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(TOLD.format(first=first))
    ended = run_python(script, timeout_s=120)
    assert ended.returncode == 0, ended.stderr
    told, marked, [module, path] = json.loads(ended.stdout)
    assert told == [early, True]
    assert marked == [True, True]
    assert module == "torch.compiler"
    assert path.endswith("tensordict/utils.py")
