"""The env and the policy that are named on the command line."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distcollect.commands.argtypes import declare
from distcollect.common.refusing import refusing
from distcollect.engine.pickled_plan import take_state
from distcollect.envs.make import check_env_id, first_env_maker
from distcollect.errors import ArgumentError
from distcollect.policy.weight_layout import module_of


def named_env(given: str) -> Any:
    """What makes the env that ``given`` names: its id, or what ``module:name`` is.

    Raises:
        ArgumentError: there is no such env.
    """
    module, _, name = given.rpartition(":")
    maker: Any = None
    if module:
        with contextlib.suppress(Exception):  # an id may begin with the name of no module
            maker = getattr(importlib.import_module(module), name, None)
    if callable(maker):
        return maker
    check_env_id(given)
    return given


def tried_env(given: str, maker: Any) -> Any:
    """Make the env that ``--env`` names.

    Args:
        given: its name.
        maker: from :func:`named_env`.

    Raises:
        ArgumentError: it can't be made here, or is no env.
    """
    remedy = "install what it needs, or name another"
    with refusing(f"--env {given} can't be made here", remedy, Exception):
        env = first_env_maker(maker)()
    if not hasattr(env, "close"):
        raise ArgumentError(
            f"--env {given} makes a {type(env).__name__}: name a Gymnasium env, or what makes one"
        )
    return env


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a policy."""
    add = partial(declare, parser.add_argument)
    about = "a TorchScript file, MODULE:NAME, or a module saved by torch.save (default: random)"
    add("--policy FILE", about)
    add("--weights FILE", "a state_dict() to load into MODULE:NAME", type=Path)
    about = "allow a --policy saved by torch.save, which can run any code when it is loaded"
    add("--trust-policy", about, action="store_true")


class NamedPolicy(NamedTuple):
    """A policy.

    Attributes:
        factory: a collector's ``policy_factory``; None: random actions.
        identity: equal strings mean equal policies, as far as that can be known.
    """

    factory: Callable[[], Callable[..., Any]] | None
    identity: str


def named_policy(given: str | None, weights: Path | None = None, *, trust: bool) -> NamedPolicy:
    """The policy that ``given`` names.

    A file is either a TorchScript archive, whose code is TorchScript and can't call Python's
    functions, or a module that was saved by ``torch.save``: a pickle, which can run any code when
    it is loaded, so it needs ``trust``. ``module:name`` is imported like any module.

    Args:
        given: a file, or ``module:name`` with the name of a policy, or of a class or a function
            without parameters that makes one; None: random actions.
        weights: a file with the policy's state dict; it is loaded without running any code.
        trust: allow a pickle.

    Raises:
        ArgumentError: there is no such policy, it is of another kind, or needs ``trust``.
    """
    if given is None:
        if weights is not None:
            raise ArgumentError(f"--weights {weights} needs a --policy whose weights they are")
        return NamedPolicy(None, "random")
    if not Path(given).is_file():
        policy, identity = _imported(given), given
        if weights is not None:
            identity += f" {_load_weights(policy, weights, given)}"
    elif weights is not None:
        raise ArgumentError(
            f"--weights {weights}: the policy in {given} has weights already; leave one out, or "
            "name the policy's code by --policy MODULE:NAME"
        )
    else:
        data, identity = _read("--policy", given)
        if _is_torchscript(data):
            return NamedPolicy(partial(Scripted, data), identity)
        policy = _unpickled(given, data, trust=trust)
    if not callable(policy):
        remedy = "name a module or function from observations to actions"
        if isinstance(policy, Mapping):
            remedy = f"if these are weights: --policy MODULE:NAME --weights {given}"
        raise ArgumentError(
            f"--policy {given}: {policy!r:.100} can't be called, so it is no policy; {remedy}"
        )
    return NamedPolicy(partial(_with_state, policy, module_of(policy)), identity)


def _with_state(policy: Any, held: nn.Module | None) -> Any:
    take_state(policy, held)
    return policy


def _read(option: str, file: str | Path) -> tuple[bytes, str]:
    """Return what is in a file, and its digest."""
    with refusing(f"{option} {file} can't be read", "name a file that you may read"):
        data = Path(file).read_bytes()
    return data, f"sha256:{hashlib.sha256(data).hexdigest()}"


class Scripted(nn.Module):
    """A policy from a TorchScript archive, whose parameters have the names that they have there."""

    def __init__(self, archive: bytes) -> None:
        """Load ``archive`` on the CPU."""
        super().__init__()
        with warnings.catch_warnings():
            # Scripting is deprecated, but archives are still in use. Torch's versions say so in
            # different ways.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            self.script = torch.jit.load(io.BytesIO(archive), map_location="cpu")  # type: ignore[no-untyped-call]
        script = self.script

        def forward(*args: Any, **kwargs: Any) -> Any:
            return script(*args, **kwargs)

        # The names of its parameters choose the entries of the observation that it gets.
        names = [argument.name for argument in script.forward.schema.arguments[1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward


def _is_torchscript(data: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(name.partition("/")[2] == "constants.pkl" for name in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return False  # no archive, or a damaged one


def _unpickled(file: str, data: bytes, *, trust: bool) -> Any:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise ArgumentError(
            f"--policy {file} was not written by torch.save or torch.jit.save: name a file that "
            "was, or MODULE:NAME"
        )
    if not trust:
        raise ArgumentError(
            f"--policy {file} is a pickle, which can run any code when it is loaded: add "
            "--trust-policy if you know where it comes from, or save the policy by torch.jit.save. "
            f"Weights alone go with the policy's code: --policy MODULE:NAME --weights {file}"
        )
    remedy = (
        "the modules that define it must be importable from here; if that is '__main__', move its "
        "class from the script to a module, and save it again"
    )
    with refusing(f"--policy {file} can't be loaded", remedy, Exception):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _imported(given: str) -> Any:
    """Return the policy ``module:name``, or what the class or function of this name makes."""
    module_name, _, name = given.partition(":")
    if not (module_name and name):
        raise ArgumentError(
            f"--policy {given}: there is no such file; give one, or MODULE:NAME for what a module "
            "defines"
        )
    remedy = "it is searched for in this folder and in PYTHONPATH"
    with refusing(f"--policy {given}: module {module_name!r} can't be imported", remedy, Exception):
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        origin = getattr(module, "__file__", "built in")
        raise ArgumentError(
            f"--policy {given}: module {module_name!r} ({origin}) has no {name!r}; name a policy "
            "that it defines, or a class or function that makes one"
        )
    found = getattr(module, name)
    if not _is_maker(found):
        return found
    try:
        return found()
    except Exception as error:
        raise ArgumentError(
            f"--policy {given}: {name}() raised {type(error).__name__}: {error}; "
            "name a class or function that makes the policy without arguments"
        ) from error


def _is_maker(found: object) -> bool:
    if inspect.isclass(found):
        return True
    try:
        return inspect.isroutine(found) and not inspect.signature(found).parameters
    except ValueError:  # some built-in functions have no signature
        return False


def _load_weights(policy: object, file: Path, given: str) -> str:
    """Load a file of weights into the policy ``given``; return the file's digest."""
    if not isinstance(policy, nn.Module):
        raise ArgumentError(f"--weights {file}: {given} is no torch module, so it has no weights")
    data, digest = _read("--weights", file)
    wanted = "it must hold that module's state_dict(), written by torch.save"
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        # Without torch's message, which recommends an option that would run code from the file.
        raise ArgumentError(f"--weights {file} is no file of weights: {wanted}") from error
    with refusing(f"--weights {file} can't be loaded into {given}", wanted, Exception):
        policy.load_state_dict(state)
    return digest
