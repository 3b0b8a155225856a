#!/usr/bin/env python3
"""chart-readme.py CHART [REFERENCE]: prints the README of the chart, with its table of values made from the comments of values.yaml.

Its commands are those for a clone of the repository, or with REFERENCE (such as oci://…) those for the published chart, whose values name
its image.

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

    {install}

    helm test agentloop --namespace agentloop-system

The test checks that the controller is available, that the custom resources exist, and that the API server accepts an Agent.

## Upgrade

    {upgrade}

This upgrades the custom resource definitions too (`crds.enabled`). Agents keep running, in pods with the old image; a pod gets the new one when it is next created.

## Uninstall

    helm uninstall agentloop --namespace agentloop-system --wait

The custom resource definitions stay, and with them all Agents (`crds.keep`). To remove everything, delete the Agents, Sensors and AgentBudgets
before you uninstall, while the controller can still clean up ([details](../../docs/tasks/installing.md#uninstall)), and the definitions afterwards:

    kubectl delete crd agents.agentloop.dev agentbudgets.agentloop.dev sensors.agentloop.dev

## Values

Unknown keys are rejected. Generated from the comments of [values.yaml](values.yaml) by `make generate`.

| value | description | default |
|---|---|---|
"""

# The commands to install and to upgrade: from a clone, where no image is published, and of a published chart.
CLONE = (
    """helm upgrade --install agentloop charts/agentloop --namespace agentloop-system --create-namespace --wait \\
      --set image.repository=REGISTRY/agentloop --set image.tag=TAG""",
    """helm upgrade agentloop charts/agentloop --namespace agentloop-system --reset-then-reuse-values --wait \\
      --set image.tag=NEW_TAG""",
)
PUBLISHED = (
    """helm upgrade --install agentloop {reference} --version {version} \\
      --namespace agentloop-system --create-namespace --wait""",
    """helm upgrade agentloop {reference} --version NEW_VERSION \\
      --namespace agentloop-system --reset-then-reuse-values --wait""",
)


def main():
    chart = pathlib.Path(sys.argv[1])
    meta = (chart / "Chart.yaml").read_text()
    field = lambda name: re.search(rf'^{name}: "?([^"\n]*)"?$', meta, re.M).group(1)
    kubernetes = field("kubeVersion").removeprefix(">=").removesuffix(".0-0") + " or newer"
    commands = CLONE
    if len(sys.argv) > 2:
        commands = [command.format(reference=sys.argv[2], version=field("version")) for command in PUBLISHED]
    install, upgrade = commands
    print(HEAD.format(description=field("description"), kubernetes=kubernetes, install=install, upgrade=upgrade), end="")
    for path, described, default in entries((chart / "values.yaml").read_text()):
        if not described:
            sys.exit(f"values.yaml: {path} has no comment")
        print(f"| `{path}` | {cell(described)} | {cell(default) and f'`{cell(default)}`'} |")


main()
