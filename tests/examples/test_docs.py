"""README and docs: their Python code runs, their links exist, and migrating.md is correct.

The blocks of a page run one after the other in one namespace, in this process, as they are but for
``SHORTER``, which makes long runs short.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Iterator
from importlib import resources
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch.utils.data
from helpers.marked import Marked
from helpers.paths import ROOT
from helpers.programs import run_python

import distcollect as dc
from distcollect.common import signals
from distcollect.integrations.torchrl.arguments import translated

PACKAGE_LOG = logging.getLogger("distcollect")
DOCS = resources.files("distcollect") / "docs"
PAGES = {
    "README.md": ROOT / "README.md",
    **{page.name: page for page in sorted(Path(str(DOCS)).glob("*.md"))},
}


def saved_frames(folder: Path, num_frames: int) -> str:
    from distcollect.commands.collect.saved import SavedFrames  # noqa: PLC0415

    with (
        dc.SyncDataCollector("CartPole-v1", frames_per_batch=num_frames) as collector,
        SavedFrames(folder, num_frames, {}) as saved,
    ):
        saved.add(collector.next())
    return str(folder)


def saved_episodes(folder: Path) -> None:
    from distcollect.integrations.minari import MinariTarget  # noqa: PLC0415

    saved_frames(folder, 200)
    env = gym.make("CartPole-v1")
    MinariTarget("cartpole/random-v0", "random").write(folder, 200, env, {"seed": 0})


SHORTER = {
    "total_frames=1_024_000": "total_frames=8_192",
    "num_workers=None,": "num_workers=2,",
    "num_workers=16": "num_workers=4",
    "num_workers=8": "num_workers=2",
    "time.sleep(0.005)": "time.sleep(0.001)",
    "frames_per_batch=256": "frames_per_batch=64",
    "time.sleep(0.1)": "time.sleep(0.01)",
}
NEEDS = {
    **dict.fromkeys(("envs.md", "migrating.md", "sequences.md", "training.md"), "torchrl"),
    "minari.md": "minari",
    "multi_agent.md": "mpe2",
    "sweeps.md": "hydra",
    "videos.md": "moviepy",
}


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The names of the figures that reach W&B and MLflow, which are not installed."""
    names: dict[str, set[str]] = {"wandb": set(), "mlflow": set()}
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric: None,
        log=names["wandb"].update,
        finish=lambda: None,
        info=types.SimpleNamespace(run_id="1"),
    )
    client = types.SimpleNamespace(
        log_metric=lambda run_id, key, value, step: names["mlflow"].add(key)
    )
    modules = {
        "wandb": {"init": lambda project: run},
        "mlflow": {
            "start_run": lambda: contextlib.nullcontext(run),
            "MlflowClient": lambda: client,
        },
    }
    for name, attributes in modules.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return names


@pytest.fixture
def _usual_settings() -> Iterator[None]:
    """Undo what a page sets for the whole process."""
    num_threads, levels = torch.get_num_threads(), [logging.root.level, PACKAGE_LOG.level]
    handlers = list(logging.root.handlers)
    yield
    torch.set_num_threads(num_threads)
    logging.root.handlers[:] = handlers
    for log, level in zip((logging.root, PACKAGE_LOG), levels, strict=True):
        log.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def _torchrls_locks() -> None:
    """TorchRL's buffers start multiprocessing's tracker, which stays; so it gets no mark."""
    resource_tracker.ensure_running()


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page, padded so that tracebacks show the page's line numbers."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text[: match.start(1)].count("\n") + match[1] for match in found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchrl's
@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page)])
@pytest.mark.usefixtures("_usual_settings")
def test_its_code_runs(
    name: str,
    marked: Marked,
    logged: dict[str, set[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    namespace: dict[str, Any] = {"__name__": "page"}  # main() is called below
    instead = dict(SHORTER)
    if name == "collect.md":
        instead['"data/cartpole"'] = repr(saved_frames(tmp_path / "frames", 20))
    if name == "minari.md":
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
        saved_episodes(tmp_path / "frames")
    for block in blocks(PAGES[name]):
        code = block
        for written, run in instead.items():
            code = code.replace(written, run)
        if "@hydra.main" in code:  # it finds its configuration beside the script
            script = tmp_path / "train.py"
            script.write_text(code)
            done = run_python(script, timeout_s=250)
            assert done.returncode == 0, done.stderr
            continue
        # Without the __future__ imports of this module.
        exec(compile(code, str(PAGES[name]), "exec", dont_inherit=True), namespace)
        if "main" in namespace:
            namespace.pop("main")()
    signals.stop_watching()  # the signals that a Checkpoint handles
    assert not marked.left()
    if name == "videos.md":  # of two evaluations; the second one begins later than at episode 5
        videos = sorted((tmp_path / "videos").glob("worker0-0-episode-*.mp4"))
        assert len(videos) == 2
        assert all(video.stat().st_size > 1000 for video in videos)
    if name == "logging.md":
        assert {"frames", "episodes/return", "loss"} <= logged["wandb"]
        assert logged["mlflow"] == {"frames_per_s", "lag", "return"}


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].read_text().split()) <= 1500


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {dc.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_its_links_lead_somewhere(name: str) -> None:
    page = PAGES.get(name, ROOT / name)
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file, _, part = target.partition("#")
        other = page.parent / file if file else page
        assert other.exists(), target
        heads = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE) if part else []
        assert not part or part in [
            re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads
        ]


def test_contributing_names_what_is_there() -> None:
    """The packages of its table, its modules, and the names that it gives after them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    named = [(name, "") for name in re.findall(r"`([\w/]+\.?\w*)`", table)]
    named += re.findall(r"`([\w/]+\.py)`(?:: ((?:`[\w.]+`(?:, )?)+))?", text)
    for module, names in named:
        place, *_ = [p for p in (ROOT / module, ROOT / "distcollect" / module) if p.exists()]
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b{name}\b", place.read_text()), (module, name)


def test_the_map_is_the_import_contract() -> None:
    """The picture in CONTRIBUTING has the layers of pyproject.toml."""
    picture = (ROOT / "CONTRIBUTING.md").read_text().partition("```text\n")[2].partition("```")[0]
    cells = [line.partition("|")[2] for line in picture.splitlines() if "|" in line]
    contract = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    layers = [line for line in contract.splitlines() if line.strip()]
    assert [set(re.findall(r"\w+", cell)) for cell in cells] == [
        set(re.findall(r"distcollect\.(\w+)", layer)) for layer in layers
    ]


def public() -> list[tuple[str, Any]]:
    """All public names of the package, and the public methods of its classes."""
    found = []
    for name in set(dc.__all__) - {"__version__"}:
        value = getattr(dc, name)
        found.append((name, value))
        if inspect.isclass(value):
            own = (part for part in dir(value) if not part.startswith("_"))
            members = ((f"{name}.{part}", inspect.getattr_static(value, part)) for part in own)
            found += [
                each
                for each in members
                if inspect.isroutine(each[1]) or isinstance(each[1], property | classmethod)
            ]
    return found  # fmt: skip


def test_help_is_enough() -> None:
    """All public objects have a docstring of their own."""
    for name, value in public():
        if getattr(value, "__module__", "distcollect").startswith("distcollect"):
            text = inspect.getdoc(value) or ""
            assert text, name
            assert not text.startswith("See :"), name


def test_the_reference_has_all_public_names() -> None:
    text = PAGES["reference.md"].read_text()
    described = re.findall(r"^::: distcollect\.(\w+)$", text, re.MULTILINE)
    others = re.findall(r"^\| `(\w+)` \| \[`(\w+)`\]\[distcollect\.(\w+)\] \|$", text, re.MULTILINE)
    names = [*described, *(name for name, _, _ in others), "__version__"]
    assert sorted(names) == sorted(dc.__all__)
    for name, written, linked in others:
        assert getattr(dc, name) is getattr(dc, written)
        assert written == linked


def test_the_site_and_its_home_page_have_all_pages() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = PAGES.keys() - {"README.md"}
    assert set(re.findall(r": (\w+\.md)$", nav, re.MULTILINE)) == pages
    linked = set(re.findall(r"\]\((\w+\.md)", PAGES["index.md"].read_text()))
    assert linked == pages - {"index.md"}


def section(title: str) -> str:
    """The text of a section of migrating.md."""
    found = re.search(
        rf"^## {title}$(.*?)(?=^## |\Z)",
        PAGES["migrating.md"].read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found, title
    return found[1]


def rows(title: str) -> set[str]:
    """Names in the first column of a section's table."""
    first = re.findall(r"^\| (`.*?) \|", section(title), re.MULTILINE)
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


def own_names() -> set[str]:
    return set(inspect.signature(dc.RPCDataCollector).parameters)


def test_migrating_says_what_is_done() -> None:
    assert rows("Same name, but") <= own_names()
    given = {"create_env_fn": "CartPole-v1", "num_workers": 2}
    for name in rows("Taken, without effect"):
        assert translated({name: True}, given, own_names()) == given
    for name in rows("Taken with a warning"):
        assert translated({name: None}, given, own_names()) == given
        with pytest.warns(UserWarning, match=f"^{name}=True has no effect here: "):
            assert translated({name: True}, given, own_names()) == given
    for name in rows("Refused"):
        assert translated({name: None}, given, own_names()) == given
        with pytest.raises(dc.ArgumentError, match=f"^{name}=True: "):
            translated({name: True}, given, own_names())
    for name in rows("Another name here") - {"kwargs", "args"}:
        assert name not in own_names()
        harmless = True if name == "reset_when_done" else None
        assert translated({name: harmless}, given, own_names()) == given


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_migrating_names_all_of_torchrls_arguments() -> None:
    collectors = pytest.importorskip("torchrl.collectors", reason="torchrl is not installed")
    distributed = pytest.importorskip("torchrl.collectors.distributed")
    titles = ("Another name here", "Taken, without effect", "Taken with a warning", "Refused")
    named = own_names().union(*map(rows, titles))
    methods = set(re.findall(r"`(\w+)", section("Methods")))
    classes = [
        found
        for module in (collectors, distributed)
        for name in ("Collector", "AsyncCollector", "MultiSyncCollector", "MultiAsyncCollector",
                     "MultiCollector", "RPCCollector", "DistributedCollector",
                     "DistributedSyncCollector", "RayCollector")
        if (found := getattr(module, name, None)) is not None
    ]  # fmt: skip
    assert len(classes) >= 8
    for found in classes:
        assert f"`{found.__name__}`" in PAGES["migrating.md"].read_text()
        for name in inspect.signature(found.__init__).parameters.keys() - {"self"}:
            assert name in named, f"{found.__name__}({name}=...)"
        theirs = {name for name in dir(found) if not name.startswith("_")}
        for name in theirs - set(dir(torch.utils.data.IterableDataset)):
            if inspect.isfunction(inspect.getattr_static(found, name)):
                known = name in methods or hasattr(dc.RPCDataCollector, name)
                assert known, f"{found.__name__}.{name}"


def test_variables_are_those_of_the_code() -> None:
    """The names that the code reads, found in its text."""
    page = PAGES["launching.md"].read_text().partition("## Environment variables")[2]
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    code = "".join(path.read_text() for path in (ROOT / "distcollect").rglob("*.py"))
    own = {"DISTCOLLECT_RUN"}  # what `distcollect submit` passes to its jobs
    assert listed == set(re.findall(r'"(DISTCOLLECT_\w+)"', code)) - own
    written = "".join(page.read_text() for page in PAGES.values())
    assert set(re.findall(r"DISTCOLLECT_\w+", written)) <= listed
