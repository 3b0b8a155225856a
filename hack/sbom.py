#!/usr/bin/env python3
"""sbom.py TARGET: prints a CycloneDX 1.5 document of what is linked into the binary for that target.

The crates come from `cargo metadata`, with the features and the platform of the build; their checksums from Cargo.lock. Crates that are
used only by build scripts, macros and tests are left out. The SQLite that libsqlite3-sys compiles is a component of its own.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import uuid


def metadata(target):
    cargo = os.environ.get("CARGO", "cargo")
    command = [cargo, "metadata", "--locked", "--format-version", "1", "--filter-platform", target]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def linked(nodes, packages, root):
    """Ids of the crates that the root links, and what each of them links. A macro runs in the compiler."""
    graph, todo = {}, [root]
    while todo:
        package = todo.pop()
        if package in graph:
            continue
        normal = (
            dependency["pkg"]
            for dependency in nodes[package]["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"])
        )
        graph[package] = sorted(
            other for other in normal if not any("proc-macro" in part["kind"] for part in packages[other]["targets"])
        )
        todo.extend(graph[package])
    return graph


def checksums(lock):
    """The SHA-256 of each crate of a registry, by name and version."""
    found = {}
    for block in lock.split("[[package]]")[1:]:
        fields = dict(re.findall(r'^(name|version|checksum) = "([^"]+)"$', block, re.M))
        if "checksum" in fields:
            found[fields["name"], fields["version"]] = fields["checksum"]
    return found


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, sums):
    described = {
        "type": "library",
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
    }
    if package["license"]:
        # Old crates write MIT/Apache-2.0, which is no SPDX expression.
        described["licenses"] = [{"expression": " ".join(package["license"].replace("/", " OR ").split())}]
    checksum = sums.get((package["name"], package["version"]))
    if checksum:
        described["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    if package["repository"]:
        described["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return described


def sqlite(package):
    """The C library within libsqlite3-sys."""
    header = pathlib.Path(package["manifest_path"]).parent / "sqlite3" / "sqlite3.h"
    version = re.search(r'#define SQLITE_VERSION\s+"([^"]+)"', header.read_text()).group(1)
    name = f"pkg:generic/sqlite@{version}"
    return {
        "type": "library",
        "bom-ref": name,
        "name": "sqlite",
        "version": version,
        "purl": name,
        "licenses": [{"license": {"name": "Public Domain"}}],
        "externalReferences": [{"type": "website", "url": "https://sqlite.org"}],
    }


def libc(target):
    """The C library of Debian, which the binary contains since it is static; nothing on another system."""
    architecture = target.partition("-")[0]
    cross = {"aarch64": "arm64", "x86_64": "amd64"}[architecture]
    name = "libc6-dev" if architecture == os.uname().machine else f"libc6-dev-{cross}-cross"
    try:
        asked = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", name], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if asked.returncode != 0:
        return None
    reference = f"pkg:deb/debian/{name}@{asked.stdout}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": asked.stdout,
        "purl": reference,
        "licenses": [{"license": {"id": "LGPL-2.1-or-later"}}],
    }


def main():
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    data = metadata(sys.argv[1])
    packages = {package["id"]: package for package in data["packages"]}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    root = data["resolve"]["root"]
    graph = linked(nodes, packages, root)
    sums = checksums(pathlib.Path("Cargo.lock").read_text())
    components = [component(packages[one], sums) for one in sorted(graph) if one != root]
    depends = {purl(packages[one]): [purl(packages[other]) for other in others] for one, others in graph.items()}
    for one in graph:
        if packages[one]["name"] == "libsqlite3-sys":
            library = sqlite(packages[one])
            components.append(library)
            depends[purl(packages[one])].append(library["bom-ref"])
            depends[library["bom-ref"]] = []
    if library := libc(sys.argv[1]):
        components.append(library)
        depends[purl(packages[root])].append(library["bom-ref"])
        depends[library["bom-ref"]] = []
    main_component = component(packages[root], sums) | {"type": "application"}
    body = {
        "component": main_component | {"properties": [{"name": "cargo:target", "value": sys.argv[1]}]},
        "components": sorted(components, key=lambda one: one["bom-ref"]),
        "dependencies": [{"ref": one, "dependsOn": sorted(set(others))} for one, others in sorted(depends.items())],
    }
    # The same for the same crates, so that two builds can be compared.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": body["component"]},
        "components": body["components"],
        "dependencies": body["dependencies"],
    }
    print(json.dumps(document, indent=2))


main()
