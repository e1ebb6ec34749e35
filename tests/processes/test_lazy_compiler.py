"""Torch's compiler is imported when something is compiled, and finds TensorDict's marks then."""

from __future__ import annotations

import importlib.util
import json
import re
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
# Newer ones have no _check_inbuild.
functions = [utils._lock_warn, getattr(utils, "_check_inbuild", utils._lock_warn)]
marked = [function._dynamo_marked_constant for function in functions]
kept = [torch.compiler.allow_in_graph.__module__, utils.__loader__.get_filename()]
print(json.dumps([told, marked, kept]))
"""


def tensordict_needs_it() -> bool:
    """Whether this TensorDict needs the compiler to be imported, as older ones do."""
    spec = importlib.util.find_spec("tensordict")
    assert spec is not None
    assert spec.origin is not None
    pattern = re.compile(r"^(from|import) torch\._dynamo\b", re.MULTILINE)
    return any(pattern.search(file.read_text()) for file in Path(spec.origin).parent.glob("*.py"))


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
    assert told == [early or tensordict_needs_it(), True]
    assert marked == [True, True]
    assert module == "torch.compiler"
    assert path.endswith("tensordict/utils.py")
