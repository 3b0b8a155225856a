"""A small client of the API server for the load: plain HTTP on a few connections, and watches in threads.

It has the admin's certificate, which the server never throttles, and is not in the audit log: only the measured
controller is.
"""

import collections
import http.client
import json
import ssl
import sys
import threading
import time


class Kube:
    def __init__(self, run, port):
        self.context = ssl.create_default_context(cafile=str(run / "pki/ca.crt"))
        self.context.load_cert_chain(str(run / "pki/admin.crt"), str(run / "pki/admin.key"))
        self.port = port
        self.local = threading.local()
        self.closing = False

    def connect(self, timeout=120):
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=self.context, timeout=timeout)

    def request(self, method, path, body=None):
        """One request on this thread's connection; asks again when told to, or when an idle connection was closed."""
        text = None if body is None else json.dumps(body)
        while True:
            fresh = getattr(self.local, "connection", None) is None
            if fresh:
                self.local.connection = self.connect()
            try:
                self.local.connection.request(method, path, text, {"Content-Type": "application/json"})
                response = self.local.connection.getresponse()
                data = response.read()
            except (OSError, http.client.HTTPException):
                self.local.connection = None
                if fresh:
                    raise
                continue
            if response.status == 429:  # such as a new resource whose storage is still starting
                time.sleep(1)
                continue
            if response.status >= 300 and not (method == "DELETE" and response.status == 404):
                raise RuntimeError(f"{method} {path}: {response.status} {data[:400]!r}")
            return json.loads(data)

    def in_parallel(self, jobs, workers=8):
        """Runs jobs (method, path, body) over some connections; returns when all are answered."""
        queue, errors = collections.deque(jobs), []

        def work():
            while True:
                try:
                    job = queue.popleft()
                except IndexError:
                    return
                try:
                    self.request(*job)
                except Exception as error:  # noqa: BLE001 -- reported below, all together
                    errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise SystemExit(f"{len(errors)} requests failed, the first: {errors[0]}")

    def watch(self, path, on_event):
        """Lists, then watches in a thread until the end: on_event(type, object)."""
        first = self.request("GET", path)
        for item in first.get("items", []):
            on_event("ADDED", item)
        version = first["metadata"]["resourceVersion"]
        threading.Thread(target=self._follow, args=(path, version, on_event), daemon=True).start()

    def _follow(self, path, version, on_event):
        try:
            while True:
                connection = self.connect(timeout=3600)
                query = f"watch=1&resourceVersion={version}&allowWatchBookmarks=true&timeoutSeconds=3500"
                connection.request("GET", f"{path}?{query}")
                response, rest = connection.getresponse(), b""
                while chunk := response.read1(1 << 16):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for event in map(json.loads, lines):
                        if event["type"] == "ERROR":
                            raise OSError(event["object"].get("message"))
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            on_event(event["type"], event["object"])
        except (OSError, http.client.HTTPException) as error:
            if not self.closing:
                print(f"watch of {path} ended: {error!r}", file=sys.stderr)
