#!/usr/bin/env python3
"""sbom.py TARGET [ROOT]: prints a CycloneDX 1.5 document of what is linked into the binary for that target.

The crates come from `cargo metadata`, with the features and the platform of the build; their checksums from Cargo.lock. Crates that are
used only by build scripts, macros and tests are left out. The SQLite that libsqlite3-sys compiles is a component of its own. ROOT is the
root of the image: with it, the document has the checksum of the binary there, and the CA roots.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse
import uuid

# Of the CA roots, in the image and on the machine that builds it.
ROOTS = "etc/ssl/certs/ca-certificates.crt"


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


def encoded(text):
    """A version, or the value of a qualifier, as package URLs have it: `+` is %2B."""
    return urllib.parse.quote(text, safe=":")


def sha256(path):
    return [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]


def purl(package):
    return f"pkg:cargo/{package['name']}@{encoded(package['version'])}"


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
        # Scanners look for vulnerabilities of a C library by this name.
        "cpe": f"cpe:2.3:a:sqlite:sqlite:{version}:*:*:*:*:*:*:*",
        "licenses": [{"license": {"name": "Public Domain"}}],
        "externalReferences": [{"type": "website", "url": "https://sqlite.org"}],
    }


def debian(name, license_id):
    """An installed package of Debian or a system like it, with the source package in which vulnerabilities are reported; or nothing."""
    fields = ["Version", "Architecture", "source:Package", "source:Version", "Built-Using"]
    wanted = "\t".join(f"${{{field}}}" for field in fields) + "\n"
    try:
        asked = subprocess.run(["dpkg-query", "-W", "-f", wanted, name], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    if asked.returncode != 0:
        return None
    version, architecture, source, source_version, built_using = asked.stdout.splitlines()[0].split("\t")
    # A library for another architecture is a copy, made by a source package that has no code of the library.
    if copied := re.search(r"\bglibc \(= ([^)]+)\)", built_using):
        source, source_version = "glibc", copied.group(1)
    release = pathlib.Path("/etc/os-release")
    system = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', release.read_text() if release.exists() else "", re.M))
    distribution = system.get("ID", "debian")
    qualifiers = {
        "arch": architecture,
        "distro": "-".join(filter(None, [distribution, system.get("VERSION_ID")])),
        "upstream": source if source_version == version else f"{source}@{source_version}",
    }
    listed = "&".join(f"{key}={encoded(value)}" for key, value in qualifiers.items())
    reference = f"pkg:deb/{distribution}/{name}@{encoded(version)}?{listed}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
        "licenses": [{"license": {"id": license_id}}],
    }


def libc(target):
    """The C library of Debian, which the binary contains since it is static; nothing on another system."""
    architecture = target.partition("-")[0]
    cross = {"aarch64": "arm64", "x86_64": "amd64"}[architecture]
    name = "libc6-dev" if architecture == os.uname().machine else f"libc6-dev-{cross}-cross"
    return debian(name, "LGPL-2.1-or-later")


def roots(image):
    """The CA roots in the image, which are those of the machine that builds it."""
    name = "ca-certificates"
    package = debian(name, "MPL-2.0") or {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "licenses": [{"license": {"id": "MPL-2.0"}}],
    }
    return package | {"hashes": sha256(image / ROOTS), "evidence": {"occurrences": [{"location": f"/{ROOTS}"}]}}


def main():
    image = pathlib.Path(sys.argv[2]).absolute() if len(sys.argv) > 2 else None
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
    main_component = component(packages[root], sums) | {"type": "application"}
    installed = [libc(sys.argv[1])]
    if image:
        main_component["hashes"] = sha256(image / "agentloop")
        installed.append(roots(image))
    for other in filter(None, installed):
        components.append(other)
        depends[purl(packages[root])].append(other["bom-ref"])
        depends[other["bom-ref"]] = []
    body = {
        "component": main_component | {"properties": [{"name": "cargo:target", "value": sys.argv[1]}]},
        "components": sorted(components, key=lambda one: one["bom-ref"]),
        "dependencies": [{"ref": one, "dependsOn": sorted(set(others))} for one, others in sorted(depends.items())],
    }
    # The same for the same crates and the same binary, so that two builds can be compared.
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
