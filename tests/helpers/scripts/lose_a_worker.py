"""Collects while a worker is lost and comes back; see test_launch_on_hosts.py.

The host of worker 1 is unplugged when "running" is printed, and plugged in again when "lost" is.
"""

import distcollect as dc


def main():
    with dc.RPCDataCollector("CartPole-v1", frames_per_batch=20) as collector:
        seen = set()

        def until(holds):
            while not holds():
                batch = collector.next(timeout_s=60)
                seen.add(int(batch["collector", "worker_id"][0, 0]))

        until(lambda: len(seen) == 2)
        print("running", flush=True)
        until(lambda: collector.num_workers == 1)
        print("lost", flush=True)
        seen.clear()
        until(lambda: collector.num_workers == 2)
        until(lambda: 1 in seen)
    report = collector.ledger
    print(report)
    assert report.total.open == 0
    print("mended", flush=True)


if __name__ == "__main__":
    dc.run(main)
