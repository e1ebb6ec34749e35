"""Closing envs of Gymnasium in limited time."""

from __future__ import annotations

import logging
import threading
from typing import Any

from gymnasium.vector import AsyncVectorEnv

log = logging.getLogger(__name__)

# An AsyncVectorEnv that raised may take this long to answer an earlier call.
_ANSWER_TIMEOUT_S = 1.0
# Its processes have this long to close their envs, and to end.
_CLOSE_TIMEOUT_S = 10.0


def close(env: Any) -> None:
    """Close an env; kill the processes of an AsyncVectorEnv that take too long to end.

    Gymnasium waits for them without a limit.
    """
    bare = getattr(env, "unwrapped", env)
    if not isinstance(bare, AsyncVectorEnv):
        env.close()
        return

    def kill_all() -> None:
        log.warning("the processes of %s did not end within %g s: killed", env, _CLOSE_TIMEOUT_S)
        for process in bare.processes:
            process.kill()

    killer = threading.Timer(_CLOSE_TIMEOUT_S, kill_all)
    killer.daemon = True
    killer.start()
    try:
        # Without a timeout it also waits for answers that it has received already.
        env.close(timeout=_ANSWER_TIMEOUT_S)
    finally:
        killer.cancel()
        for process in bare.processes:  # none is left, also if closing raised
            process.kill()
            process.join()
