"""judge_run.py FILE STEP ...: does steps with collectors, and writes to FILE what it saw, as JSON.

It knows the public API and the documentation only; see tests/judges.
"""

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.descendants import descendants
from helpers.judge_launches import listening_ports
from helpers.judge_state import LATE_MODULE, StateEnv, process_state

import distcollect as dc

SEEN = Path(sys.argv[1])
FOLDER = SEEN.parent
LIMIT_S = 60
FAULTS = dc.Faults(batch_timeout_s=LIMIT_S, start_timeout_s=LIMIT_S)
logged = []


class Lines(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())


def collector(kind=dc.MultiSyncDataCollector, num_workers=2, **options):
    frames = 4 * num_workers if kind is dc.MultiSyncDataCollector else 4
    given = {"frames_per_batch": frames, "num_workers": num_workers, "faults": FAULTS, **options}
    return kind(StateEnv, **given)


def pids_of(open_collector):
    return {w: values[0] for w, values in open_collector.call("getpid").items()}


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.01)


def with_all(open_collector, num_workers=2):
    """Collect until all workers are there; the last batch's frames by worker."""
    until(lambda: open_collector.next() is not None and open_collector.num_workers == num_workers)
    ids = open_collector.next()["collector", "worker_id"]
    return sorted(int(i) for i in ids.unique())


def replaced(open_collector, worker_id):
    """Kill a worker, and collect until another process is in its place; whether it is so."""
    before = pids_of(open_collector)[worker_id]
    with contextlib.suppress(ProcessLookupError):
        os.kill(before, signal.SIGKILL)
    until(
        lambda: (
            open_collector.next() is not None
            and open_collector.num_workers == 2
            and pids_of(open_collector).get(worker_id, before) != before
        )
    )
    return with_all(open_collector) == [0, 1]


def collect(kind=dc.MultiSyncDataCollector, **options):
    """Batches, the death of a worker, twice, its replacement, an orderly end."""
    with collector(kind, **options) as open_collector:
        first = open_collector.next()
        other = pids_of(open_collector)[1]
        # What the first death has done to others shows at the second one at the latest.
        was_replaced = [replaced(open_collector, 0), replaced(open_collector, 0)]
        stayed = pids_of(open_collector)[1] == other
    return {
        "frames": first.numel(),
        "replaced": was_replaced,
        "the other one stayed": stayed,
        "all accounted for": open_collector.ledger.total.open == 0,
    }


def launched():
    """The same with the two workers that a launch has."""
    return collect(dc.RPCDataCollector, num_workers=None, frames_per_batch=8, sync=True)


def signals():
    """What SLURM and systemd do: every descendant gets a signal."""
    with collector() as open_collector:
        open_collector.next()
        before = pids_of(open_collector)
        for name in ("HUP", "USR1", "USR2"):
            for pid in descendants(os.getpid()):
                os.kill(pid, signal.Signals[f"SIG{name}"])
            open_collector.next()
        workers = with_all(open_collector)
        same = pids_of(open_collector) == before
        lost = dict(open_collector.ledger.total.lost)
        # What replaces a worker has got the signals too.
        after = replaced(open_collector, 0) and pids_of(open_collector)[1] == before[1]
    return {"workers": workers, "same": same, "lost": lost, "replaced alone": after}


def terminate():
    """SIGTERM to every descendant, while rollouts are collected."""
    ended = ""
    with collector(dc.MultiaSyncDataCollector) as open_collector:
        for _ in range(4):
            open_collector.next()
        for pid in descendants(os.getpid()):
            os.kill(pid, signal.SIGTERM)
        try:
            for _ in range(1000):
                open_collector.next()
        except dc.WorkerLost as error:
            ended = str(error)
        lost = dict(open_collector.ledger.total.lost)
    return {"ended": ended, "lost": lost}


def terminate_all():
    """SIGTERM to this process as well, which has a checkpoint."""
    with collector() as open_collector:
        checkpoint = dc.Checkpoint(FOLDER / "checkpoint.pt", collector=open_collector)
        open_collector.next()
        # The descendants first: this process reacts at once.
        for pid in [*descendants(os.getpid()), os.getpid()]:
            os.kill(pid, signal.SIGTERM)
        try:
            for _ in range(1000):
                open_collector.next()
                checkpoint.step()
        except SystemExit as error:
            note("terminate_all", {"code": error.code, "saved": checkpoint.path.exists()})
            raise
    return {"code": None}


def change_everything():
    """After a zygote has begun, change all of this process that a process started later has."""
    late = FOLDER / "late"
    late.mkdir()
    (FOLDER / "made_late").mkdir()
    (FOLDER / "made_late" / f"{LATE_MODULE}.py").write_text("")
    os.chdir(late)
    os.umask(0o027)
    for name, soft in (("RLIMIT_CORE", 0), ("RLIMIT_NOFILE", 2000), ("RLIMIT_STACK", 1 << 22)):
        number = getattr(resource, name)
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
    os.nice(1)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGWINCH, signal.SIG_IGN)
    os.environ.update(
        TZ="Asia/Kolkata",
        LC_ALL="C.UTF-8",
        JUDGE="set late",
        LIST_TO_STACK="0",
        LAZY_LEGACY_OP="1",
    )
    del os.environ["JUDGE_DELETED_LATE"]
    time.tzset()
    sys.path.append(str(late / "nowhere"))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    Path("/proc/self/oom_score_adj").write_text("100")
    if os.getuid() == 0:
        become_another_user()


def become_another_user():
    """Become nobody, who may read all files, so that Python can be started."""
    libc = ctypes.CDLL(None, use_errno=True)
    every, reads_all = 0xFFFFFFFF, 1 << 2  # CAP_DAC_READ_SEARCH
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    caps = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, caps) == 0
    caps[2] |= reads_all & every
    assert libc.prctl(28, 1 << 2, 0, 0, 0) == 0  # PR_SET_SECUREBITS, no fixup by setuid
    assert libc.capset(header, caps) == 0
    assert libc.prctl(47, 2, 2, 0, 0) == 0  # PR_CAP_AMBIENT, raise
    os.setgroups([7777])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    FOLDER.joinpath("home").mkdir(exist_ok=True)


def state():
    """The state of a worker that starts after everything was changed."""
    sys.path.insert(0, str(FOLDER / "made_late"))
    os.environ["JUDGE_DELETED_LATE"] = "1"
    with collector(num_workers=1) as open_collector:
        open_collector.next()
    change_everything()
    with collector(num_workers=1) as open_collector:
        [state_of_worker] = open_collector.call("process_state")[0]
    return {"worker": state_of_worker, "own": process_state()}


def stuck():
    """How long shutdown() takes if all that was started is stopped, by the number of workers."""
    took = {}
    for num_workers in (1, 4):
        faults = dc.Faults(stop_timeout_s=1, silence_timeout_s=30, start_timeout_s=LIMIT_S)
        open_collector = collector(num_workers=num_workers, faults=faults)
        open_collector.next()
        started = descendants(os.getpid())
        for pid in started:
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with contextlib.suppress(dc.DistCollectError):
            open_collector.shutdown()
        took[num_workers] = time.monotonic() - begin
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return took


def touch(port):
    """Send a stray request to a port. Not from here: this process may end at any moment."""
    program = f"import socket; s = socket.create_connection(('127.0.0.1', {port}), 10); "
    program += "s.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n'); s.settimeout(1); s.recv(4096)"
    command = [sys.executable, "-I", "-S", "-c", program]
    subprocess.run(command, stderr=subprocess.DEVNULL, timeout=LIMIT_S, check=False)


def scanned():
    """A stray connection to a worker's port."""
    with collector(dc.RPCDataCollector, sync=True, frames_per_batch=8) as it:
        workers = with_all(it)
        touch(listening_ports(pids_of(it)[0])[0])
        until(lambda: it.next() is not None and any("SIGABRT" in line for line in logged))
        after = with_all(it)
    [line] = [line for line in logged if "SIGABRT" in line]
    return {"workers": workers, "after": after, "named": line}


def touched():
    """A stray connection to each port of this process; it ends there."""
    with collector(transport="rpc") as open_collector:
        open_collector.next()
        note("touched", {"started": descendants(os.getpid())})
        for port in listening_ports(os.getpid()):
            touch(port)
        for _ in range(100):
            open_collector.next()
    return {"ended": False}


def note(step, seen):
    known = json.loads(SEEN.read_text()) if SEEN.exists() else {}
    SEEN.write_text(json.dumps({**known, step: seen}))


def main():
    logging.getLogger("distcollect").addHandler(Lines())
    for step in sys.argv[2:]:
        note(step, globals()[step]())


if __name__ == "__main__":
    dc.run(main)
