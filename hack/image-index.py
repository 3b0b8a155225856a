#!/usr/bin/env python3
"""image-index.py LAYOUT TAG PLATFORM=TAG...: joins images of an OCI layout, one for each platform, into one index with the tag.

The tags of the single images go; their digests stay what they were.
"""

import hashlib
import json
import pathlib
import sys

NAME = "org.opencontainers.image.ref.name"


def main():
    layout, tag = pathlib.Path(sys.argv[1]), sys.argv[2]
    index = json.loads((layout / "index.json").read_text())
    tagged = {one["annotations"][NAME]: one for one in index["manifests"]}
    manifests = []
    for pair in sys.argv[3:]:
        platform, _, single = pair.partition("=")
        system, architecture = platform.split("/")
        found = tagged[single]
        config = json.loads((layout / "blobs" / found["digest"].replace(":", "/")).read_text())["config"]["digest"]
        built = json.loads((layout / "blobs" / config.replace(":", "/")).read_text())
        if (built["os"], built["architecture"]) != (system, architecture):
            sys.exit(f"the image {single} says {built['os']}/{built['architecture']}, not {platform}")
        descriptor = {key: found[key] for key in ("mediaType", "digest", "size")}
        manifests.append(descriptor | {"platform": {"os": system, "architecture": architecture}})
    media = "application/vnd.oci.image.index.v1+json"
    body = json.dumps({"schemaVersion": 2, "mediaType": media, "manifests": manifests}).encode()
    digest = hashlib.sha256(body).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(body)
    entry = {"mediaType": media, "digest": f"sha256:{digest}", "size": len(body), "annotations": {NAME: tag}}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))


main()
