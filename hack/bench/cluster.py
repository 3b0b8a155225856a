"""The control plane, the fake node and the measured controller: started, watched, stopped."""

import json
import os
import pathlib
import signal
import subprocess
import threading
import time

from kube import Kube
from measure import Audit, Process

HERE = pathlib.Path(__file__).resolve().parent
DEVCLUSTER = HERE.parent / "devcluster"
RUN = pathlib.Path(os.environ.get("RUN", "/var/tmp/agentloop-bench"))
BIN = pathlib.Path(os.environ["BIN"])
PORT = 8443
NAMESPACE = "bench"
SETTINGS = {
    "RUN": str(RUN),
    "API_PORT": str(PORT),
    "ETCD_PORT": "8379",
    "KCM_PORT": "18257",
    "SCHED_PORT": "18259",
    "CLIENT_QPS": "1000",  # scheduler and controller-manager must not be the limit
    "APISERVER_ARGS": f"--audit-policy-file={HERE}/audit-policy.yaml --audit-log-path={RUN}/audit.log",
}


def call(*command, **options):
    ended = subprocess.run(
        [str(word) for word in command], env={**os.environ, **SETTINGS}, text=True, capture_output=True, **options
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {ended.stdout}{ended.stderr}")
    return ended.stdout


def kubectl(*arguments, **options):
    return call(BIN / "kubectl", "--kubeconfig", RUN / "admin.kubeconfig", *arguments, **options)


class Cluster:
    """What exists and since when, seen by the load's own two watches."""

    def __init__(self, profile):
        self.profile = profile
        resource = profile["resource"]
        self.path = f"/apis/{resource['apiVersion']}/namespaces/{NAMESPACE}/{resource['plural']}"
        self.pod_seen, self.ready_seen = {}, {}  # object name -> time of its first pod, of its first ready status
        self.pods, self.objects = {}, set()  # living pods (pod name -> object name), living objects
        self.changed = threading.Condition()
        self.controller = None

    def up(self):
        call(DEVCLUSTER / "down.sh")
        call(DEVCLUSTER / "up.sh", "--no-node")
        # A service account's priority level in the API server, and all rights.
        call(DEVCLUSTER / "user.sh", "bench", "/O=system:serviceaccounts/CN=bench")
        kubectl("create", "clusterrolebinding", "bench", "--clusterrole=cluster-admin", "--user=bench")
        self.kwok = subprocess.Popen(
            [BIN / "kwok", "--kubeconfig", RUN / "admin.kubeconfig", "--manage-all-nodes", "--config", HERE / "kwok.yaml",
             "--node-lease-duration-seconds=10"],
            stdout=(RUN / "log/kwok.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        (RUN / "pid/kwok").write_text(str(self.kwok.pid))  # down.sh stops it
        self.kube, self.audit = Kube(RUN, PORT), Audit(RUN / "audit.log")
        self.kube.request("POST", "/api/v1/nodes", {"metadata": {"name": "fake"}})
        kubectl("create", "namespace", NAMESPACE)
        for file in self.profile["crds"]:
            kubectl("apply", "--server-side", "-f", HERE.parent.parent / file)
        for manifest in self.profile.get("setup", []):
            kubectl("apply", "-f", "-", input=json.dumps(manifest))
        kubectl("wait", "--for=condition=Ready", "node/fake", "--timeout=60s")
        while self.kube.request("GET", "/api/v1/nodes/fake")["spec"].get("taints"):
            time.sleep(0.2)
        self.kube.watch(f"/api/v1/namespaces/{NAMESPACE}/pods", self._on_pod)
        self.kube.watch(self.path, self._on_object)
        pids = {name: int((RUN / "pid" / name).read_text()) for name in ("etcd", "apiserver", "kcm", "sched", "kwok")}
        self.processes = {name: Process(pid) for name, pid in {**pids, "load": os.getpid()}.items()}

    def down(self):
        if hasattr(self, "kube"):
            self.kube.closing = True
        self.stop_controller()
        call(DEVCLUSTER / "down.sh")

    def start_controller(self, arguments):
        environment = {
            **os.environ,
            "KUBECONFIG": str(RUN / "bench.kubeconfig"),
            "NO_PROXY": "127.0.0.1,localhost",
            **self.profile.get("env", {}),
        }
        command = [os.path.expandvars(word) for word in self.profile["command"]] + arguments
        self.controller = subprocess.Popen(
            command, env=environment, cwd=RUN, stdout=(RUN / "log/controller.log").open("a"), stderr=subprocess.STDOUT
        )
        self.process = Process(self.controller.pid)

    def stop_controller(self):
        if self.controller is None:
            return
        self.controller.send_signal(signal.SIGTERM)
        try:
            self.controller.wait(20)
        except subprocess.TimeoutExpired:
            self.controller.kill()
            self.controller.wait()
        self.controller = None

    def manifest(self, name):
        resource = self.profile["resource"]
        metadata = {"name": name, "namespace": NAMESPACE}
        return {"apiVersion": resource["apiVersion"], "kind": resource["kind"], "metadata": metadata, "spec": resource["spec"]}

    def create(self, names):
        self.kube.in_parallel([("POST", self.path, self.manifest(name)) for name in names])

    def wait(self, holds, seconds, what):
        """True once it holds; False, said, after that time."""
        end = time.time() + seconds
        with self.changed:
            while not holds():
                if self.controller.poll() is not None:
                    raise SystemExit(f"the controller ended:\n{self._last_words()}")
                if time.time() > end:
                    print(f"not within {seconds} s: {what}", flush=True)
                    return False
                self.changed.wait(0.5)
        return True

    def _last_words(self):
        return "\n".join((RUN / "log/controller.log").read_text().splitlines()[-10:])

    def forget(self):
        with self.changed:
            self.pod_seen.clear()
            self.ready_seen.clear()

    def _on_pod(self, kind, pod):
        metadata, now = pod["metadata"], time.time()
        wanted = self.profile["resource"]["kind"]
        owner = next((owner["name"] for owner in metadata.get("ownerReferences", []) if owner["kind"] == wanted), None)
        if owner is None:
            return
        with self.changed:
            if kind == "DELETED":
                self.pods.pop(metadata["name"], None)
            else:
                self.pods[metadata["name"]] = owner
                self.pod_seen.setdefault(owner, now)
            self.changed.notify_all()

    def _on_object(self, kind, item):
        name, now = item["metadata"]["name"], time.time()
        conditions = (item.get("status") or {}).get("conditions") or []
        ready = any(one["type"] == self.profile["ready"] and one["status"] == "True" for one in conditions)
        with self.changed:
            if kind == "DELETED":
                self.objects.discard(name)
            else:
                self.objects.add(name)
                if ready:
                    self.ready_seen.setdefault(name, now)
            self.changed.notify_all()
