"""The size of classes of csrc, from tags of ctags: at most 40 methods, and 900 lines over all files of a class.

Overrides in a class that derives from one of c10d's do not count as methods: torch decides how many there are."""

MOST_METHODS = 40
MOST_LINES = 900


def breaches(tags):
    """`tags`: of classes (c), structs (s), prototypes (p) and functions (f)."""
    classes = {_full_name(tag): tag for tag in tags if tag["kind"] in ("class", "struct") and "end" in tag}
    methods = {name: set() for name in classes}
    lines = {name: tag["end"] - tag["line"] + 1 for name, tag in classes.items()}
    for tag in tags:
        owner = classes.get(tag.get("scope", ""))
        if tag["kind"] not in ("prototype", "function") or owner is None:
            continue
        if tag["path"] != owner["path"] or not owner["line"] <= tag["line"] <= owner["end"]:
            lines[tag["scope"]] += tag.get("end", tag["line"]) - tag["line"] + 1  # defined outside the class
        elif not (_overrides(tag) and _is_of_c10d(owner, classes)):
            methods[tag["scope"]].add(tag["name"] + tag.get("signature", ""))
    found = []
    for name, tag in sorted(classes.items()):
        where = f"{tag['path']}:{tag['line']}: {tag['name']}"
        if len(methods[name]) > MOST_METHODS:
            found.append(f"{where} has {len(methods[name])} methods (at most {MOST_METHODS})")
        if lines[name] > MOST_LINES:
            found.append(f"{where} has {lines[name]} lines in all its files (at most {MOST_LINES})")
    return found


def _full_name(tag):
    return "::".join(filter(None, (tag.get("scope"), tag["name"])))


def _overrides(tag):
    return not {"override", "final"}.isdisjoint(tag.get("properties", "").split(","))


def _is_of_c10d(tag, classes):
    """Whether the class derives from one of c10d's, directly or through others of its namespace."""
    for base in filter(None, tag.get("inherits", "").split(",")):
        parent = classes.get("::".join(filter(None, (tag.get("scope"), base))))
        if base.startswith("c10d::") or (parent is not None and _is_of_c10d(parent, classes)):
            return True
    return False


def _class(methods, lines=100, base="", properties="", name="X", outside=0):
    """Tags of a class with this many methods, and lines of a definition outside of it."""
    tags = [{"kind": "class", "name": name, "path": "x.h", "line": 1, "end": lines, "inherits": base}]
    for i in range(methods):
        method = {"kind": "prototype", "name": f"f{i}", "path": "x.h", "line": 2, "scope": name}
        tags.append(method | {"properties": properties})
    if outside:
        tags.append({"kind": "function", "name": "f0", "path": "x.cc", "line": 1, "end": outside, "scope": name})
    return tags


# (tags, whether it is a breach)
EXAMPLES = (
    (_class(40), False),
    (_class(41), True),
    (_class(41, base="c10d::Backend", properties="override,virtual"), False),
    (_class(41, base="Task", properties="override,virtual"), True),
    (_class(41, base="c10d::Backend"), True),
    (_class(0, base="c10d::Work", name="Base") + _class(41, base="Base", properties="final,virtual"), False),
    (_class(1, lines=400, outside=500), False),
    (_class(1, lines=400, outside=501), True),
)
