"""Reads the kernels' source: the instruction of each operation of CudaMachine, and the order of the operations and of
the steps around them in each function that has any."""

import pathlib
import re

KERNEL = pathlib.Path(__file__).resolve().parents[2] / "csrc" / "kernel"
GPU = ("push_channel", "channel_memory", "packs", "reduce_any", "device_collectives", "multicast")
FILES = ("exec.h", *(f"gpu/{one}.h" for one in GPU))

# The operations that order or publish, and the functions whose place among them a protocol relies on.
OPERATIONS = "put_packet|peek_packet|signal|signal_behind|fence|acquire|sync|all"
WORDS = "load|store|claim|add|load_host|store_host|load_view"  # operations whose names others have too
STEPS = """put_pack|peek_pack|await_word|wait_for|none_has_failed|has_not_failed|signal_peers|restamp|await_ready|
decide_direct|is_free|describe|send_places|remember|receive|copy_all|gather_packs|reduce_gathered|meet_and_reduce|
reduce_as|meet|await|publish|await_readers|enter|leave|factor_of|give_up|retire|
complete|load_ahead|store_sum|wait|load_any|get_packets|put_packets|end_block|may_continue|own|pipe""".replace("\n", "")
OBJECT = r"(?:(?:ex_?|lane|ch|Machine|memory)(?:\.|::))?\b"
CALL = re.compile(
    rf"(?<![\w:]){OBJECT}({OPERATIONS}|{STEPS})(?:<[\w:<>, ]+>)?\((?=([^;{{}}]*))"
    rf"|(?<![\w:])(?:ex_?\.|lane\.|Machine::)({WORDS})\((?=([^;{{}}]*))"
)
MEMBER = re.compile(r"\b(posted|credit|done|ready|quit|failed|abort|left|begun|ended|direct|state|completion)\b")
STATE = re.compile(r"\b(own|pipe)\(\w*\)\.(\w+)(?:\[[^=]*\])? =(?!=)")


def text_of(file):
    return (KERNEL / file).read_text()


def bare(file):
    """C++ without comments and directives."""
    text = re.sub(r"//[^\n]*", "", text_of(file))
    return re.sub(r"^\s*#[^\n]*$", "", text, flags=re.MULTILINE)


def body_at(text, start):
    """The text between the next brace and the one that closes it."""
    begin = text.index("{", start)
    depth = 0
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin + 1 : i]
    raise ValueError("a brace is not closed")


def instructions():
    """The PTX of each operation of CudaMachine, such as {"signal": "st.release.sys"}."""
    text = bare("exec.h")
    text = body_at(text, text.index("class CudaMachine"))
    found = {}
    for head in re.finditer(r"__device__ [\w:&]+ (\w+)\([^{};]*\) const \{", text):
        if one := instruction_of(body_at(text, head.end() - 1)):
            found.setdefault(head[1], set()).add(one)
    return {name: "|".join(sorted(ones)) for name, ones in found.items()}


def instruction_of(body):
    if ptx := re.search(r'asm volatile\("((?:ld|st|fence)\.[\w.]+)', body):
        return ptx[1].removesuffix(".v2.u64")
    if "__syncthreads" in body:
        return "bar"
    access = re.search(
        r"(system|device)_ref.*?\.(store|load|fetch_add|compare_exchange_strong)\(.*?memory_order_(\w+)", body, re.S
    )
    if not access:
        return ""
    kind = {"store": "st", "load": "ld"}.get(access[2], "atom")
    return f"{kind}.{access[3]}.{ {'system': 'sys', 'device': 'gpu'}[access[1]] }"


def orders():
    """The steps of each function in the order of its text, such as {"publish": "all fence signal_behind(posted)"}. The
    functions of ChannelMemory and of packs.h are not members of what calls them, but no two have the same name, except
    restamp."""
    found = {}
    for file in FILES:
        text = bare(file)
        if file == "exec.h":
            text = text[text.index("class TileExec") : text.index("class CudaMachine")]
        heads = r"\bNVX_\w+(?: static)?(?: inline)? [\w:&<>* ]+ [*&]?(\w+)\([^;{}]*\)(?: const)? \{"
        for head in re.finditer(heads, text):
            steps = " ".join(steps_of(body_at(text, head.end() - 1)))
            if steps:
                name = "ChannelMemory.restamp" if (file, head[1]) == ("gpu/channel_memory.h", "restamp") else head[1]
                found[name] = steps
    return found


def body_of(file, function):
    text = bare(file)
    return body_at(text, re.search(rf"\bNVX_\w+ [\w ]*?{function}\(", text).end())


def guards(function, step):
    """The conditions and loops in a function of PushChannel around its first call of an operation."""
    found = []
    for line in body_of("gpu/push_channel.h", function).splitlines():
        if head := re.match(r"\s*((?:if|for) \((?:[^()]|\((?:[^()]|\(\))*\))*\))", line):
            found.append(head[1])
        if re.search(rf"\b{step}\(", line):
            return found
        if re.match(r"\s*(return|\})|.*;$", line) and not re.match(r"\s*Peer&", line):
            found.clear()
    return found


def steps_of(body):
    for call in CALL.finditer(body):
        name, arguments = call[1] or call[3], call[2] or call[4] or ""
        if name in ("own", "pipe"):  # the rank's own state: where it is written
            if written := STATE.match(body, call.start()):
                yield f"{name}.{written[2]}="
            continue
        member = MEMBER.search(inside(arguments)) if call[3] or name in MEMBERS else None
        yield name + (f"({member[1]})" if member else "")


def inside(arguments):
    """The arguments of a call, up to its closing parenthesis."""
    depth = 1
    for i, char in enumerate(arguments):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if depth == 0:
            return arguments[:i]
    return arguments


MEMBERS = ("signal", "signal_behind", "acquire", "wait_for", "signal_peers")
