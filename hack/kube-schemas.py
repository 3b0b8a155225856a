#!/usr/bin/env python3
"""kube-schemas.py SWAGGER OUT CRD_FOLDER...: JSON schemas for kubeconform, without a download.

Those of Kubernetes come from the OpenAPI document in the module that the test cluster is built from, the others from
custom resource definitions. Unknown fields are errors. Needs Debian's python3-yaml.
"""

import json
import pathlib
import sys

import yaml

# What is taken over from a schema as it is.
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties")
# Any content.
FREE = ("io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1", "io.k8s.apimachinery.pkg.runtime.RawExtension")


def closed(schema, top=False):
    """The schema, with all objects closed that list their properties."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return {"$ref": schema["$ref"].replace("#/definitions/", "_definitions.json#/definitions/")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    # Only what says something about the form: formats of Kubernetes, for example, are none of JSON schema.
    out = {key: schema[key] for key in KEPT if key in schema}
    for key in ("items", "additionalProperties"):
        if key in schema:
            out[key] = closed(schema[key])
    if "properties" in schema:
        out["properties"] = {name: closed(part) for name, part in schema["properties"].items()}
        if top:
            text = {"type": "string"}
            out["properties"].update({"apiVersion": text, "kind": text, "metadata": {"type": "object"}})
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    return out


def write(out, kind, group, version, schema):
    parts = [kind, group.split(".")[0], version] if group else [kind, version]
    (out / ("-".join(parts).lower() + ".json")).write_text(json.dumps(schema))


def main():
    swagger, out = json.loads(pathlib.Path(sys.argv[1]).read_text()), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    definitions = {}
    for name, definition in swagger["definitions"].items():
        schema = closed(definition)
        if name in FREE or name.endswith("JSONSchemaProps") or name.endswith(".JSON"):
            schema = {}
        if name.endswith("resource.Quantity"):
            schema = {"oneOf": [{"type": "string"}, {"type": "number"}]}
        if name.endswith("util.intstr.IntOrString"):
            schema = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
        definitions[name] = schema
        for gvk in definition.get("x-kubernetes-group-version-kind", []):
            write(out, gvk["kind"], gvk["group"], gvk["version"], {"$ref": f"_definitions.json#/definitions/{name}"})
    (out / "_definitions.json").write_text(json.dumps({"definitions": definitions}))
    for file in sorted(file for folder in sys.argv[3:] for file in pathlib.Path(folder).glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        for version in crd["spec"]["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"], top=True)
            write(out, crd["spec"]["names"]["kind"], crd["spec"]["group"], version["name"], schema)


main()
