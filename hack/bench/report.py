#!/usr/bin/env python3
"""Prints results as a Markdown table: report.py OURS.json... PEERS.json. What was not measured is a dash."""

import json
import pathlib
import sys


def load(paths):
    results = []
    for path in paths:
        content = json.loads(pathlib.Path(path).read_text())
        results += content["peers"] if "peers" in content else [content]
    return results


def cell(result, step, keys):
    """The values of one step, joined by slashes; a dash where nothing was measured."""
    values = result if step is None else result.get(step)
    if values is None:
        return "–"
    found = []
    for key in keys:
        value = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found.append("none" if value is None and key == "last_write_s" else "–" if value is None else str(value))
    return " / ".join(found)


def rows(results):
    yield "RSS after start, MiB", None, ["start_rss_mib"]
    one = "a_one_by_one"
    yield "(a) created → pod exists, p50 / p99 ms", one, ["pod_p50_ms", "pod_p99_ms"]
    yield "(a) created → status ready, p50 / p99 ms", one, ["ready_p50_ms", "ready_p99_ms"]
    yield "(a) writes / reads per object", one, ["writes_per_object", "reads_per_object"]
    for size in sorted({int(key.rsplit("_", 1)[1]) for result in results for key in result if key.startswith("b_burst_")}):
        step = f"b_burst_{size}"
        yield f"(b) {size} at once: creates sent, s", step, ["sent_s"]
        yield f"(b) {size} at once: all pods / all ready, s", step, ["all_pods_s", "all_ready_s"]
        yield f"(b) {size} at once: writes / failed / reads per object", step, [
            "writes_per_object", "failed_writes_per_object", "reads_per_object"]  # fmt: skip
        yield f"(b) {size} at once: CPU of controller / API server, s", step, ["controller_cpu_s", "cluster_cpu_s.apiserver"]
        yield f"(b) {size} at once: peak RSS, MiB", step, ["peak_rss_mib"]
        yield f"(b) {size} at once: other work on the machine, cores", step, ["foreign_cores"]
    yield "(c) idle 60 s: objects", "c_idle", ["n"]
    yield "(c) idle 60 s: writes / reads", "c_idle", ["writes", "reads"]
    yield "(c) idle 60 s: CPU s / RSS MiB", "c_idle", ["controller_cpu_s", "rss_mib"]
    yield "(d) restart: writes, the last after s", "d_restart", ["writes", "last_write_s"]
    yield "(d) restart: a new object's pod exists after, s", "d_restart", ["probe_pod_s"]
    yield "(d) restart: CPU until quiet s / peak RSS MiB", "d_restart", ["controller_cpu_s", "peak_rss_mib"]
    yield "(e) delete all: sent / objects gone / pods gone, s", "e_delete", ["sent_s", "objects_gone_s", "pods_gone_s"]
    yield "(e) delete all: writes per object", "e_delete", ["writes_per_object"]


def main():
    results = load(sys.argv[1:])
    names = [result["name"] + (f" `{result['arguments']}`" if result.get("arguments") else "") for result in results]
    print("| | " + " | ".join(names) + " |")
    print("|---" * (len(results) + 1) + "|")
    for title, step, keys in rows(results):
        print(f"| {title} | " + " | ".join(cell(result, step, keys) for result in results) + " |")


if __name__ == "__main__":
    main()
