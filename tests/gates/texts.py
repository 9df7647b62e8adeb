"""Gates over the text of the tree. Each rule is a function of (path, text) or of the output of ctags, so selftest
can pass it a breach."""

import pathlib
import re
import statistics

import classes as class_rules
import kernels as kernel_rules
import layers as layer_rules
import names as name_rules
import words as word_rules
from common import Failed, shut_if

CODE = (".cc", ".h", ".cu", ".py")


def format_cpp(context):
    files = context.sources(".cc", ".h", ".cu", under=("csrc", "tests"))
    mode = ["-i"] if context.fix else ["--dry-run", "-Werror", "--ferror-limit=3"]
    if files:
        context.run([context.tool("clang-format-14"), *mode, *files], "clang-format", cwd=context.root)
    return f"{len(files)} files"


def ruff(context):
    tool = context.tool("ruff")
    fixes = (["--fix"], []) if context.fix else ([], ["--check"])
    scripts = [f for f in context.files if not f.suffix and context.read(f).startswith("#!/usr/bin/env python3")]
    context.run([tool, "check", "-q", *fixes[0], ".", *scripts], "ruff check", cwd=context.root)
    context.run([tool, "format", "-q", *fixes[1], ".", *scripts], "ruff format", cwd=context.root)


def shell(context):
    """A script's sourced pieces are checked through it, because they use its variables."""
    scripts = [f for f in context.files if re.match(r"#!.*\b(ba)?sh\n", context.read(f))]
    context.run([context.tool("shellcheck"), "-x", *scripts], "shellcheck", cwd=context.root)
    return f"{len(scripts)} scripts"


def layers(context):
    files = context.sources(".cc", ".h", ".cu", under=("csrc",))
    paths = [f.relative_to("csrc").as_posix() for f in files]
    breaches = [b for f, path in zip(files, paths, strict=True) for b in layer_rules.breaches(path, context.read(f))]
    breaches += layer_rules.circles(layer_rules.FOLDERS)
    shut_if(breaches, "includes that layers.py does not allow")
    shut_if(layer_rules.crowded(paths), "folders with too many units")
    folders, components = {f.parent for f in files}, {f.parts[1] for f in files}
    return f"{len(files)} files in {len(folders)} folders of {len(components)} components"


def sizes(context):
    files = context.sources(*CODE)
    lines = {f: context.read(f).count("\n") for f in files}
    breaches = [f"{f}: {n} lines (at most 600)" for f, n in lines.items() if n > 600]
    functions = [(t["end"] - t["line"] + 1, t) for t in context.tags(files, kinds="f") if "end" in t]
    breaches += long_functions(functions)
    breaches += class_rules.breaches(context.tags(context.sources(".cc", ".h", ".cu", under=("csrc",)), kinds="cfps"))
    shut_if(breaches, "files, functions or classes too large")
    if functions:
        spans = sorted(n for n, _ in functions)
        return (
            f"{len(spans)} functions: median {statistics.median(spans):.0f} lines, "
            f"p99 {spans[len(spans) * 99 // 100]}, longest {spans[-1]}; longest file {max(lines.values())}"
        )


def long_functions(functions):
    """No function has over 100 lines; at most one in a hundred has over 80."""

    def say(n, tag, most):
        return f"{tag['path']}:{tag['line']}: {tag['name']}() has {n} lines (at most {most})"

    breaches = [say(n, tag, 100) for n, tag in functions if n > 100]
    long = [(n, tag) for n, tag in functions if 80 < n <= 100]
    if len(long) * 100 > len(functions):
        breaches += [say(n, tag, 80) for n, tag in long]
    return breaches


def names(context):
    breaches = [b for f in context.files for b in name_rules.file_breaches(f)]
    tags = context.tags(context.sources(".cc", ".h", ".cu", under=("csrc", "tests")), kinds="cdfgstu")
    breaches += [b for tag in tags for b in name_rules.tag_breaches(tag)]
    shut_if(breaches, "names against the style")
    return f"{len(context.files)} files, {len(tags)} names"


def words(context):
    private, origin = word_rules.private_words(context.root)
    breaches = []
    for f in context.files:
        if not word_rules.is_binary(context.root / f):
            breaches += word_rules.breaches(f.as_posix(), context.read(f), private)
        breaches += word_rules.breaches(f.as_posix(), f.as_posix(), private)
    shut_if(breaches, "words that do not belong in the tree")
    return f"{len(context.files)} files; {origin}"


def selftest(context):
    """Each rule must be able to fail: it is shown one breach and one near miss."""
    cases = [
        *[(layer_rules.breaches(p, t), bad, f"layers: {p}: {t}") for p, t, bad in layer_rules.EXAMPLES],
        *[(class_rules.breaches(tags), bad, f"sizes: {tags[0]}") for tags, bad in class_rules.EXAMPLES],
        *[(layer_rules.circles(f), bad, f"layers: {f}") for f, bad in layer_rules.CIRCLE_EXAMPLES],
        *[(layer_rules.crowded(p), bad, f"layers: {len(p)} files") for p, bad in layer_rules.UNIT_EXAMPLES],
        *[(kernel_rules.text_breaches(t), bad, f"cuda: {t}") for t, bad in kernel_rules.EXAMPLES],
        *[
            (kernel_rules.resource_breaches(kernel_rules.resources(t)), bad, f"cuda: {t}")
            for t, bad in kernel_rules.RESOURCE_EXAMPLES
        ],
        *[(kernel_rules.code_breaches(t), bad, f"cuda: {t}") for t, bad in kernel_rules.CODE_EXAMPLES],
        *[(kernel_rules.path_faults(t), bad, f"cuda: {t}") for t, bad in kernel_rules.PATH_EXAMPLES],
        *[(name_rules.file_breaches(pathlib.Path(p)), bad, f"names: {p}") for p, bad in name_rules.FILE_EXAMPLES],
        *[(name_rules.tag_breaches(tag), bad, f"names: {tag}") for tag, bad in name_rules.TAG_EXAMPLES],
        *[
            (word_rules.breaches("x", t, word_rules.EXAMPLE_PRIVATE), bad, f"words: {t}")
            for t, bad in word_rules.EXAMPLES
        ],
    ]
    tag = {"path": "x.cc", "line": 1, "name": "f"}
    for spans, bad in (
        ([101], True),
        ([100] + [5] * 99, False),
        ([81] * 2 + [5] * 98, True),
        ([80] * 3, False),
    ):
        cases.append((long_functions([(n, tag) for n in spans]), bad, f"sizes: {spans[:3]}"))
    wrong = [f"{what}: {found or 'let through'}" for found, bad, what in cases if bool(found) != bad]
    if wrong:
        raise Failed("a rule misjudges its examples", "\n".join(wrong))
    return f"{len(cases)} breaches and near misses, all judged rightly"
