"""What is measured, and from where: CPU and memory from /proc, requests from the API server's audit log."""

import collections
import datetime
import json
import os
import pathlib
import re
import threading
import time

TICKS = os.sysconf("SC_CLK_TCK")
READS = ("get", "list", "watch")


def own_cgroup():
    """Moves this process and all it starts into a CPU cgroup of high weight, so that other work disturbs less."""
    for top, file, weight in (("/sys/fs/cgroup/cpu", "cpu.shares", "65536"), ("/sys/fs/cgroup", "cpu.weight", "10000")):
        if os.path.exists(f"{top}/cgroup.procs"):
            try:
                os.makedirs(f"{top}/bench", exist_ok=True)
                pathlib.Path(f"{top}/bench/{file}").write_text(weight)
                pathlib.Path(f"{top}/bench/cgroup.procs").write_text(str(os.getpid()))
                return True
            except OSError:
                return False
    return False


def machine_cpu():
    """CPU seconds that the whole machine has worked since it started."""
    fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS


class Process:
    def __init__(self, pid):
        self.pid = pid

    def cpu(self):
        try:
            fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except FileNotFoundError:
            raise SystemExit(f"process {self.pid} is gone") from None
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self, key):
        """MiB of VmRSS (now) or VmHWM (peak since the last reset)."""
        status = pathlib.Path(f"/proc/{self.pid}/status").read_text()
        return round(int(re.search(key + r":\s+(\d+)", status)[1]) / 1024)

    def reset_peak(self):
        pathlib.Path(f"/proc/{self.pid}/clear_refs").write_text("5")


class Audit:
    """Requests of the controller since a mark in the audit log."""

    def __init__(self, path):
        self.path = path

    def mark(self):
        return self.path.stat().st_size if self.path.exists() else 0

    def since(self, mark, without=None):
        """Counts by (verb, resource, outcome), and the time of the last write."""
        counts, last_write = collections.Counter(), None
        if not self.path.exists():
            return counts, last_write
        with self.path.open("rb") as file:
            file.seek(mark)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                event = json.loads(line)
                reference = event.get("objectRef") or {}
                if without and without in (reference.get("name") or ""):
                    continue
                resource = reference.get("resource", event["requestURI"].split("?")[0])
                if reference.get("subresource"):
                    resource += "/" + reference["subresource"]
                code = (event.get("responseStatus") or {}).get("code", 0)
                counts[event["verb"], resource, "ok" if code < 400 else str(code)] += 1
                if event["verb"] not in READS:
                    stamp = event["stageTimestamp"].rstrip("Z")[:26] + "+00:00"
                    last_write = datetime.datetime.fromisoformat(stamp).timestamp()
        return counts, last_write

    @staticmethod
    def summary(counts):
        of = lambda wanted: sum(number for (verb, _, _), number in counts.items() if wanted(verb))  # noqa: E731
        failed = sum(number for (verb, _, end), number in counts.items() if verb not in READS and end != "ok")
        return {
            "writes": of(lambda verb: verb not in READS),
            "failed_writes": failed,
            "reads": of(lambda verb: verb in ("get", "list")),
            "watches": of(lambda verb: verb == "watch"),
            "detail": {
                f"{verb} {resource}" + ("" if end == "ok" else f" [{end}]"): number
                for (verb, resource, end), number in counts.most_common()
            },
        }


class Calibration:
    """CPU milliseconds of a fixed piece of work, once a second: shows when the machine itself is slower."""

    def __init__(self):
        self.samples = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            start, value = time.thread_time(), 0
            for number in range(30_000):
                value += number * number
            self.samples.append((time.time(), (time.thread_time() - start) * 1000))
            time.sleep(1)

    def since(self, moment):
        values = sorted(sample for at, sample in self.samples if at >= moment)
        return round(values[len(values) // 2], 2) if values else None
