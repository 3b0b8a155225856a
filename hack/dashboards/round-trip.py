"""round-trip.py FILE...: reads dashboards into the models of Grafana's SDK and writes them again. A field that is lost or
changed is an error: Grafana would ignore it. Defaults that the models add are not."""

import json
import sys

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import panelcfg_config
from grafana_foundation_sdk.models.dashboard import Dashboard

# What Grafana reads and the models leave out.
NOT_MODELLED = {
    ".id",  # null: a new dashboard
    ".annotations.list[].step",  # of annotations from Prometheus
    ".annotations.list[].titleFormat",
    ".templating.list[].definition",  # the query as the editor of variables shows it
}


def lost(before, after, path="", kind=""):
    """Yields the path, the path without indices, and what became of each field of `before` that is not in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            if name in after:
                yield from lost(value, after[name], f"{path}.{name}", f"{kind}.{name}")
            else:
                yield f"{path}.{name}", f"{kind}.{name}", "is lost"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after)):
            yield from lost(one, other, f"{path}[{index}]", f"{kind}[]")
    elif before != after:
        yield path, kind, f"is {json.dumps(before)} and becomes {json.dumps(after)}"


def errors(file, found):
    with open(file, encoding="utf-8") as source:
        before = json.load(source)
    after = json.loads(JSONEncoder().encode(Dashboard.from_json(before)))
    for path, kind, what in lost(before, after):
        found.add(kind)
        if kind not in NOT_MODELLED:
            yield f"{path} {what}"
    for panel in before["panels"]:
        if panel["type"] != "row" and panelcfg_config(panel["type"]) is None:
            yield f"the panel {panel['title']} is of the unknown type {panel['type']}"


def main(files):
    register_default_plugins()
    found = set()
    all_errors = [f"{file}: {error}" for file in files for error in errors(file, found)]
    all_errors += [f"{kind} is modelled by now: remove it from NOT_MODELLED" for kind in sorted(NOT_MODELLED - found)]
    if not files:
        all_errors.append("no dashboard is named")
    print("\n".join(all_errors) or f"{len(files)} dashboards are read and written without a loss")
    return 1 if all_errors else 0


sys.exit(main(sys.argv[1:]))
