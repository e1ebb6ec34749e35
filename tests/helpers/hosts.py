"""Hosts as network namespaces, which need root."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from helpers.paths import TESTBED


class Hosts:
    """Hosts 1, 2 and 3, made by the scripts in ``tests/helpers/testbed``.

    Attributes:
        address: the address of this machine for these hosts.
        env: the variables that commands on them need.
    """

    def __init__(self) -> None:
        """Make no host yet."""
        # Unique names: the machine may have other testbeds.
        net = f"10.{78 + os.getpid() // 250 % 100}.{os.getpid() % 250}"
        prefix = f"c{os.getpid() % 100_000}"
        self.address = f"{net}.254"
        self.env: Mapping[str, str]
        self.env = {"DC_STATE": f"/run/{prefix}", "DC_PREFIX": prefix, "DC_NET": net}

    def __enter__(self) -> Hosts:
        self._call("netns_up.sh")
        return self

    def __exit__(self, *_: object) -> None:
        self._call("netns_down.sh")
        Path(self.env["DC_STATE"] + ".lock").unlink(missing_ok=True)

    def do(self, host: int, *action: str) -> None:
        """Change a host; see ``netns_host.sh``."""
        self._call("netns_host.sh", str(host), *action)

    def on(self, host: int) -> list[str]:
        """The words before a command that make it run on this host."""
        return [str(TESTBED / "netns_exec.sh"), str(host)]

    def _call(self, script: str, *arguments: str) -> None:
        subprocess.run(
            [str(TESTBED / script), *arguments],
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )
