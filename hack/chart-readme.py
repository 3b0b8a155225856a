#!/usr/bin/env python3
"""chart-readme.py CHART: prints the README of the chart, with its table of values made from the comments of values.yaml.

Reads that file line by line, since Python has no YAML parser of its own. A comment directly above a key describes it. A key with a
comment, whose parts have none, is one value; a key whose parts have comments is a group, and its own comment introduces them.
"""

import pathlib
import re
import sys


def entries(text):
    """Yields (path, description, default) for each value. A default is text as in the file, on one line."""
    lines = text.splitlines()
    path, comment = [], []
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        stripped = line.strip()
        if not stripped:
            comment = []
            continue
        if stripped.startswith("#"):
            comment.append((len(line) - len(line.lstrip()), stripped[1:].removeprefix(" ")))
            continue
        indent = len(line) - len(line.lstrip())
        key, _, rest = stripped.partition(":")
        rest = rest.strip()
        path = path[: indent // 2] + [key]
        described = " ".join(words for depth, words in comment if depth == indent)
        comment = []
        if rest:
            yield ".".join(path), described, rest
            continue
        # What belongs to this key: the lines below that are deeper.
        end = number
        while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent):
            end += 1
        block = [below for below in lines[number:end] if below.strip()]
        if any(below.strip().startswith("#") for below in block):
            if described:
                yield ".".join(path), described, ""
            continue
        yield ".".join(path), described, flow(block)
        number = end


def flow(block):
    """A block of maps as one line in flow style."""
    parts, index = [], 0
    indent = len(block[0]) - len(block[0].lstrip())
    while index < len(block):
        key, _, rest = block[index].strip().partition(":")
        index += 1
        below = []
        while index < len(block) and len(block[index]) - len(block[index].lstrip()) > indent:
            below.append(block[index])
            index += 1
        parts.append(f"{key}: {rest.strip() or flow(below)}")
    return "{" + ", ".join(parts) + "}"


def cell(text):
    return text.replace("|", "\\|")


HEAD = """# agentloop

{description}. [Documentation](../../docs/README.md) · [installing](../../docs/tasks/installing.md)

Requires Kubernetes {kubernetes} and Helm 3.14 or newer.

## Install

    helm upgrade --install agentloop charts/agentloop --namespace agentloop-system --create-namespace --wait \\
      --set image.repository=REGISTRY/agentloop --set image.tag=TAG

    helm test agentloop --namespace agentloop-system

The test checks that the controller is available, that the custom resources exist, and that the API server accepts an Agent.

## Upgrade

    helm upgrade agentloop charts/agentloop --namespace agentloop-system --reset-then-reuse-values --wait

This upgrades the custom resource definitions too (`crds.enabled`). Agents keep running, in pods with the old image; a pod gets the new one when it is next created.

## Uninstall

    helm uninstall agentloop --namespace agentloop-system --wait

The custom resource definitions stay, and with them all Agents (`crds.keep`). To delete these too, and everything they stored:

    kubectl delete crd agents.agentloop.dev agentbudgets.agentloop.dev sensors.agentloop.dev

## Values

Unknown keys are rejected. Generated from the comments of [values.yaml](values.yaml) by `make generate`.

| value | description | default |
|---|---|---|
"""


def main():
    chart = pathlib.Path(sys.argv[1])
    meta = (chart / "Chart.yaml").read_text()
    field = lambda name: re.search(rf'^{name}: "?([^"\n]*)"?$', meta, re.M).group(1)
    kubernetes = field("kubeVersion").removeprefix(">=").removesuffix(".0-0") + " or newer"
    print(HEAD.format(description=field("description"), kubernetes=kubernetes), end="")
    for path, described, default in entries((chart / "values.yaml").read_text()):
        if not described:
            sys.exit(f"values.yaml: {path} has no comment")
        print(f"| `{path}` | {cell(described)} | {cell(default) and f'`{cell(default)}`'} |")


main()
