#!/usr/bin/env python3
"""Figures of the code: sizes of files and functions, names, comments. `hack/code-figures.py [DIRECTORY...]` (default: src).

Reads tokens, not meaning: strings and comments are blanked, braces are counted, and modules under `#[cfg(test)]` and test
files are left out. Names: a type of one word (`Lease`) needs its module to say what it is; a shared name is one that two
definitions or more have.
"""

import collections
import pathlib
import re
import statistics
import sys

TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|b?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\.[^\']*|[^\\\'])\'', re.S
)
TYPE = re.compile(r"\b(?:struct|enum|union|trait|type)\s+([A-Z]\w*)")
FUNCTION = re.compile(r"\bfn\s+(\w+)")
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")


def blank(match):
    return re.sub(r"[^\n]", " ", match.group())


def block_end(code, start):
    """The end of the block that begins at the first brace after `start`; None for a declaration without one."""
    depth = 0
    for place in range(start, len(code)):
        if code[place] == ";" and depth == 0:
            return None
        if code[place] == "{":
            depth += 1
        elif code[place] == "}":
            depth -= 1
            if depth == 0:
                return place + 1
    return len(code)


def without_tests(text, code):
    for match in reversed(list(re.finditer(r"#\[cfg\(test\)\]\s*(?:pub(?:\([^)]*\))? )?(?:mod|fn|impl|use|const)\b", code))):
        end = block_end(code, match.start()) or code.index(";", match.start()) + 1
        text, code = text[: match.start()] + text[end:], code[: match.start()] + code[end:]
    return text, code


def is_test(path):
    return path.stem == "tests" or path.stem.endswith("_tests") or "tests" in path.parts or "crash_tests" in path.parts


def percentile(values, percent):
    values = sorted(values)
    return values[min(len(values) - 1, len(values) * percent // 100)] if values else 0


def main():
    roots = [pathlib.Path(root) for root in sys.argv[1:]] or [pathlib.Path("src")]
    lines, lengths, types, functions = [], [], collections.Counter(), collections.Counter()
    counts = collections.Counter()
    for path in sorted(path for root in roots for path in root.rglob("*.rs") if not is_test(path)):
        text = path.read_text()
        text, code = without_tests(text, TOKEN.sub(blank, text))
        rows = text.splitlines()
        lines.append(len(rows))
        types.update(TYPE.findall(code))
        for match in FUNCTION.finditer(code):
            functions[match.group(1)] += 1
            if (end := block_end(code, match.start())) is not None:
                lengths.append(code.count("\n", match.start(), end) + 1)
        for row, bare in zip(rows, code.splitlines()):
            counts["code"] += bool(bare.strip())
            counts["doc"] += row.lstrip().startswith("///")
            counts["short doc"] += row.lstrip().startswith("///") and len(row.split()) <= 4
            counts["inline"] += row.lstrip().startswith("// ")
            counts["link"] += bool(re.search(r"///.*\[`", row))
    one_word = sum(number for name, number in types.items() if len(WORDS.findall(name)) == 1)
    shared = sum(number for number in types.values() if number > 1)
    one_word_functions = sum(number for name, number in functions.items() if "_" not in name.strip("_"))
    total, all_functions = sum(types.values()), sum(functions.values())
    figures = {
        "files": len(lines),
        "lines": sum(lines),
        "lines a file, median/p90/max": f"{statistics.median(lines):.0f}/{percentile(lines, 90)}/{max(lines)}",
        "files over 400 lines": sum(number > 400 for number in lines),
        "lines a function, median/p90/p99/max": f"{statistics.median(lengths):.0f}/{percentile(lengths, 90)}/{percentile(lengths, 99)}/{max(lengths)}",
        "functions over 50 lines, %": f"{100 * sum(number > 50 for number in lengths) / len(lengths):.1f}",
        "types": total,
        "types of one word, %": f"{100 * one_word / total:.0f}",
        "types that share their name, %": f"{100 * shared / total:.0f}",
        "functions of one word, %": f"{100 * one_word_functions / all_functions:.0f}",
        "inline comments per 100 lines of code": f"{100 * counts['inline'] / counts['code']:.1f}",
        "lines of doc comment per 100 lines of code": f"{100 * counts['doc'] / counts['code']:.1f}",
        "doc comments of three words or fewer, % of lines": f"{100 * counts['short doc'] / max(1, counts['doc']):.1f}",
        "doc comments with a link, % of lines": f"{100 * counts['link'] / max(1, counts['doc']):.1f}",
    }
    for name, figure in figures.items():
        print(f"{name:52} {figure}")
    often = [f"{name} {number}" for name, number in types.most_common(25) if number > 1]
    print(f"names of several types: {', '.join(often)}")


main()
