#!/usr/bin/env python3
"""provenance.py LAYOUT IMAGE STARTED: prints an in-toto statement with SLSA provenance (v1) of the image in an OCI layout.

It names the digest of the image, the commit that it was built from and the tools that built it. It is not signed: who publishes the image
signs it (`cosign attest --type slsaprovenance1`). STARTED is the time at which the build began (RFC 3339).
"""

import datetime
import hashlib
import json
import os
import pathlib
import subprocess
import sys


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def blob(layout, digest):
    return json.loads((layout / "blobs" / digest.replace(":", "/")).read_text())


def manifests(layout, tag):
    """The descriptor that has the tag, and with an index those of its platforms."""
    index = json.loads((layout / "index.json").read_text())
    name = "org.opencontainers.image.ref.name"
    tagged = [one for one in index["manifests"] if one.get("annotations", {}).get(name) == tag]
    if len(tagged) != 1:
        sys.exit(f"{layout} has {len(tagged)} images with the tag {tag}")
    return [tagged[0], *blob(layout, tagged[0]["digest"]).get("manifests", [])]


def platforms(layout, descriptors):
    """The platforms of the images, from their own configurations."""
    found = set()
    for descriptor in descriptors:
        manifest = blob(layout, descriptor["digest"])
        if "config" in manifest:
            found.add("{os}/{architecture}".format(**blob(layout, manifest["config"]["digest"])))
    return sorted(found)


def subject(name, descriptor):
    algorithm, _, digest = descriptor["digest"].partition(":")
    return {"name": name, "digest": {algorithm: digest}}


def main():
    layout, image, started = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2], sys.argv[3]
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    repository, _, tag = image.rpartition(":")
    described = manifests(layout, tag)
    sources = {"name": "source", "digest": {"gitCommit": output("git", "rev-parse", "HEAD")}}
    remote = subprocess.run(["git", "remote", "get-url", "origin"], capture_output=True, text=True).stdout.strip()
    if remote.startswith("https://"):
        # Without what may be a password.
        sources["uri"] = "git+https://" + remote.removeprefix("https://").split("@")[-1]
    lock = hashlib.sha256(pathlib.Path("Cargo.lock").read_bytes()).hexdigest()
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [subject(repository, one) for one in described],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://agentloop.dev/make-image/v1",
                "externalParameters": {"target": "image", "image": image, "platforms": platforms(layout, described)},
                "internalParameters": {
                    "rustc": output("rustc", "--version"),
                    # What was built is then not what the commit says.
                    "uncommittedChanges": bool(output("git", "status", "--porcelain")),
                },
                "resolvedDependencies": [sources, {"name": "Cargo.lock", "digest": {"sha256": lock}}],
            },
            "runDetails": {
                "builder": {"id": "https://agentloop.dev/make-image/v1"},
                "metadata": {
                    "startedOn": started,
                    "finishedOn": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                },
            },
        },
    }
    print(json.dumps(statement, indent=2))


main()
