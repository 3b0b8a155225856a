#!/usr/bin/env python3
"""Measures one pod-creating controller against a real API server with a node that does not exist (kwok). See README.md."""

import argparse
import json
import os
import pathlib
import time

from cluster import RUN, Cluster
from measure import Audit, Calibration, machine_cpu, own_cgroup


def log(*words):
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def quantile(values, share):
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 1) if ordered else None


class Bench:
    def __init__(self, profile, arguments, timeout):
        self.profile, self.arguments, self.timeout = profile, arguments, timeout
        self.cluster = Cluster(profile)
        self.result = {
            "name": profile["name"],
            "arguments": " ".join(arguments),
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
        }

    # --- meters

    def start_meter(self):
        cluster = self.cluster
        return {
            "at": time.time(),
            "cpu": cluster.process.cpu(),
            "mark": cluster.audit.mark(),
            "machine": machine_cpu(),
            "cluster": {name: process.cpu() for name, process in cluster.processes.items()},
        }

    def read_meter(self, start, objects=None):
        now, process = self.start_meter(), self.cluster.process
        counts, _ = self.cluster.audit.since(start["mark"])
        cluster = {name: round(cpu - start["cluster"][name], 1) for name, cpu in now["cluster"].items()}
        cpu, span = now["cpu"] - start["cpu"], now["at"] - start["at"]
        measured = {
            "span_s": round(span, 1),
            "controller_cpu_s": round(cpu, 2),
            "peak_rss_mib": process.memory("VmHWM"),
            "rss_mib": process.memory("VmRSS"),
            "cluster_cpu_s": cluster,
            "foreign_cores": round((now["machine"] - start["machine"] - cpu - sum(cluster.values())) / span, 2),
            **Audit.summary(counts),
        }
        if objects:
            measured["writes_per_object"] = round(measured["writes"] / objects, 2)
            measured["reads_per_object"] = round(measured["reads"] / objects, 2)
            measured["failed_writes_per_object"] = round(measured["failed_writes"] / objects, 2)
        return measured

    def until_quiet(self, quiet=5, cap=120):
        """Until the controller wrote nothing for that many seconds."""
        audit, end = self.cluster.audit, time.time() + cap
        mark, since = audit.mark(), time.time()
        while time.time() < end:
            time.sleep(0.5)
            now = audit.mark()
            if now != mark:
                _, write = audit.since(mark)
                since, mark = (time.time() if write else since), now
            if time.time() - since >= quiet:
                return
        log(f"still writing after {cap} s")

    def delete_all(self):
        cluster, start = self.cluster, time.time()
        names = sorted(cluster.objects)
        cluster.kube.in_parallel([("DELETE", f"{cluster.path}/{name}?propagationPolicy=Background", None) for name in names])
        sent = time.time() - start
        cluster.wait(lambda: not cluster.objects, self.timeout, "all objects gone")
        objects = time.time() - start
        cluster.wait(lambda: not cluster.pods, self.timeout, "all pods gone")
        pods = time.time() - start
        cluster.forget()
        return {"n": len(names), "sent_s": round(sent, 2), "objects_gone_s": round(objects, 2), "pods_gone_s": round(pods, 2)}

    # --- scenarios

    def one_by_one(self, number=100):
        cluster, pod, ready = self.cluster, [], []
        meter = self.start_meter()
        for index in range(number):
            name = f"one-{index}"
            cluster.kube.request("POST", cluster.path, cluster.manifest(name))
            start = time.time()
            if not cluster.wait(lambda name=name: name in cluster.pod_seen, 60, f"pod of {name}"):
                break
            pod.append(max(0, cluster.pod_seen[name] - start))
            if cluster.wait(lambda name=name: name in cluster.ready_seen, 60, f"{name} ready"):
                ready.append(max(0, cluster.ready_seen[name] - start))
            time.sleep(0.05)
        return {
            "n": len(pod),
            "pod_p50_ms": quantile(pod, 0.5),
            "pod_p99_ms": quantile(pod, 0.99),
            "ready_p50_ms": quantile(ready, 0.5),
            "ready_p99_ms": quantile(ready, 0.99),
            **self.read_meter(meter, number),
        }

    def burst(self, number):
        cluster = self.cluster
        cluster.process.reset_peak()
        meter, start = self.start_meter(), time.time()
        cluster.create(f"burst-{index}" for index in range(number))
        sent = time.time() - start
        pods = cluster.wait(lambda: len(cluster.pod_seen) >= number, self.timeout, "all pods")
        ready = cluster.wait(lambda: len(cluster.ready_seen) >= number, self.timeout, "all ready")
        foreign = self.read_meter(meter)["foreign_cores"]  # before the quiet time dilutes it
        self.until_quiet()
        return {
            **self.read_meter(meter, number),
            "n": number,
            "sent_s": round(sent, 2),
            "all_pods_s": round(max(cluster.pod_seen.values()) - start, 2) if pods else None,
            "all_ready_s": round(max(cluster.ready_seen.values()) - start, 2) if ready else None,
            "foreign_cores": foreign,
        }

    def idle(self, seconds=60):
        meter = self.start_meter()
        time.sleep(seconds)
        return {"n": len(self.cluster.objects), **self.read_meter(meter)}

    def restart(self):
        cluster = self.cluster
        objects = len(cluster.objects)
        cluster.stop_controller()
        cluster.create(["probe"])  # waits behind the first pass over all the others
        mark, start = cluster.audit.mark(), time.time()
        cluster.start_controller(self.arguments)
        served = cluster.wait(lambda: "probe" in cluster.pod_seen, 300, "the probe's pod after the restart")
        pod_s = time.time() - start
        self.until_quiet(quiet=10, cap=240)
        counts, last_write = cluster.audit.since(mark, without="probe")
        return {
            "n": objects,
            "probe_pod_s": round(pod_s, 2) if served else None,
            "last_write_s": round(last_write - start, 2) if last_write else None,
            "controller_cpu_s": round(cluster.process.cpu(), 2),
            "peak_rss_mib": cluster.process.memory("VmHWM"),
            **Audit.summary(counts),
        }

    def delete(self):
        meter = self.start_meter()
        deleted = self.delete_all()
        self.until_quiet()
        return {**self.read_meter(meter, deleted["n"]), **deleted}

    # --- the whole

    def step(self, key, scenario, *arguments):
        start = time.time()
        self.result[key] = scenario(*arguments)
        self.result[key]["calibration_ms"] = self.calibration.since(start)
        log(key, json.dumps({name: value for name, value in self.result[key].items() if name != "detail"}))

    def run(self, sizes, skip):
        cluster = self.cluster
        self.result["own_cgroup"] = own_cgroup()
        log("control plane up")
        cluster.up()
        log("controller:", *self.profile["command"], *self.arguments)
        cluster.start_controller(self.arguments)
        self.calibration = Calibration()
        cluster.create(f"warm-{index}" for index in range(3))
        if not cluster.wait(lambda: len(cluster.ready_seen) >= 3, 120, "the first three ready"):
            raise SystemExit(f"no pods; see {RUN}/log/controller.log (run with --keep)")
        self.delete_all()
        self.until_quiet()
        self.result["start_rss_mib"] = cluster.process.memory("VmRSS")
        if "a" not in skip:
            self.step("a_one_by_one", self.one_by_one)
            self.delete_all()
            self.until_quiet()
        for index, number in enumerate(sizes):
            if index:
                self.delete_all()
                self.until_quiet()
            self.step(f"b_burst_{number}", self.burst, number)
        if "c" not in skip:
            self.until_quiet(quiet=self.profile.get("settle_seconds", 5), cap=300)
            self.step("c_idle", self.idle)
        if "d" not in skip:
            self.step("d_restart", self.restart)
        self.step("e_delete", self.delete)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", type=pathlib.Path)
    parser.add_argument("--sizes", default="200,1000", help="bursts, comma-separated")
    parser.add_argument("--skip", default="", help="letters of scenarios to leave out: a, c, d")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one burst")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--keep", action="store_true", help="leave the control plane up")
    options, arguments = parser.parse_known_args()
    bench = Bench(json.loads(options.profile.read_text()), arguments, options.timeout)
    try:
        bench.run([int(size) for size in options.sizes.split(",")], options.skip)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(bench.result, indent=1) + "\n")
    finally:
        if not options.keep:
            bench.cluster.down()


if __name__ == "__main__":
    main()
