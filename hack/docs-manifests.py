#!/usr/bin/env python3
"""docs-manifests.py OUT PAGE...: writes the complete manifests of the pages into the folder OUT, named by page and line.

A manifest of which a page shows a part only has a line `# ...`; blocks whose fence says `unchecked` are no manifests. Both are
left to the tests of the pages. Needs Debian's python3-yaml.
"""

import pathlib
import re
import sys

import yaml


def blocks(text):
    """The YAML blocks, with the lines at which they begin."""
    fence = None
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*```\s*(.*)", line)
        if not mark:
            if fence:
                fence[1].append(line)
        elif fence:
            language, lines, start = fence
            fence = None
            if language == "yaml":
                yield start, "\n".join(lines)
        else:
            fence = (mark[1].strip(), [], number)


def main():
    out, found = pathlib.Path(sys.argv[1]), 0
    out.mkdir(parents=True)
    for page in map(pathlib.Path, sys.argv[2:]):
        for start, text in blocks(page.read_text()):
            if re.search(r"^\s*# \.\.\.$", text, re.MULTILINE):
                continue
            documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict) and {"apiVersion", "kind"} <= one.keys()]
            found += len(documents)
            if documents:
                name = f"{page.with_suffix('')}-{start}.yaml".replace("/", "-")
                (out / name).write_text(yaml.safe_dump_all(documents))
    if not found:
        sys.exit("docs-manifests.py: no manifest was found")


main()
