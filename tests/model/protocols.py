"""The protocols of csrc/kernel/gpu as small programs, the outcomes that each excludes, and the bugs that break it.

A program's threads are lanes: those of a rank `a` are a0, a1, ... in one CTA of one GPU. Their instructions are the
operations of TileExec and CudaMachine, which instruction() replaces by their PTX as the source has it now: a weaker
scope in the source makes a program fail here. Barriers and fences that a guarantee does not need are left out, which
only allows more executions. A packet is one word here, data:stamp, as each half of a packet is.
"""

import re
from dataclasses import dataclass, field

import source

WEAK = {"write": "st.weak", "read": "ld.weak"}
HOST = {"host_signal": "st.release.sys", "host_acquire": "poll.acquire.sys"}  # std::atomic of a CPU thread
# The kernels have no such fences. They stand for what the guarantee of rule 7 rests on: see UNPROVED.
ASSUMED = {"kernel_ends": "fence.sc.sys", "loads_have_returned": "fence.sc.sys"}

BUGS = {"add_unordered": "atom.relaxed.gpu", "claim_in_block": "atom.acq_rel.cta", "poll_unordered": "poll.relaxed.sys"}


def instruction(words, ptx):
    """The PTX instruction of an operation, as ptx.py writes it."""
    name, *rest = words
    fixed = WEAK | HOST | ASSUMED
    if name in fixed:
        return " ".join([fixed[name], *rest])
    if name in ("use", "if"):
        return " ".join(words)
    if name in ("all", "sync"):
        return f"{ptx[name]} {rest[0]}"
    if name in ("await_packet", "wait_for"):  # await_word(), peek_pack() in a wait; TileExec::wait_for()
        return " ".join([ptx["peek_packet" if name == "await_packet" else "acquire"].replace("ld.", "poll."), *rest])
    return " ".join([ptx[name], *rest])


def program(text, ptx=None):
    """A program for ptx.find()."""
    ptx = (ptx or source.instructions()) | BUGS
    lines = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("init "):
            lines.append(line)
            continue
        head, _, body = line.partition(":")
        place = {"h": "host.0"}.get(head[0], f"{head[0]}.{head[2] if len(head) == 3 else '0'}")
        code = [instruction(one.split(), ptx) for one in body.split(";") if one.strip()]
        lines.append(f"{head} {place}: {'; '.join(code)}")
    return "\n".join(lines)


@dataclass
class Protocol:
    guarantee: str
    models: tuple  # functions of the kernels
    text: str
    never: tuple  # outcomes
    bugs: dict = field(default_factory=dict)  # what is wrong: replacements in the text
    races: bool = False  # whether reads may race with writes

    def broken(self, bug):
        text = self.text
        for old, new in self.bugs[bug]:
            text, count = re.subn(old, new, text)
            if count == 0:
                raise ValueError(f"{bug}: the program has no {old}")
        return text


# Every function that has operations which order or publish, and their order. A protocol names those that it models.
ORDERS = {
    # exec.h
    "wait_for": "wait acquire",
    "complete": "add(left) store(left) signal(completion)",
    "record": "claim(failed) signal(state)",
    "has_failed": "load(failed)",
    # packets
    "enter": "describe is_free all restamp put_packet send_places remember",
    "remember": "own.history= own.digests= own.epoch=",
    "meet": "await_word receive all pipe.last_met= decide_direct await_ready all all",
    "leave": "sync signal_peers(done) pipe.sent= pipe.taken= sync",
    "is_free": "wait_for(done)",
    "await_word": "wait peek_packet",
    "mismatch": "await_word",
    "restamp": "signal_peers(ready) restamp sync",
    "ChannelMemory.restamp": "pipe.last_met= put_packet put_packet",
    "put_pack": "put_packet put_packet",
    "peek_pack": "peek_packet peek_packet",
    "load_ahead": "wait peek_pack",
    "store_sum": "put_pack",
    "reduce_hot": "load_ahead store_sum",
    "gather_packs": "wait peek_pack",
    "reduce_gathered": "store_sum",
    "load_any": "load_ahead",
    "factor_of": "wait peek_packet",
    "reduce_elements": "load_any factor_of store_sum",
    "put_packets": "put_pack put_pack",
    "get_packets": "wait peek_pack all",
    "meet_and_reduce": "meet gather_packs reduce_gathered meet reduce_as",
    "reduce_packets": "put_packets meet_and_reduce all",
    "reduce_packets_two_shot": "put_packets meet_and_reduce get_packets",
    "exchange_packets": "put_packets meet get_packets",
    # chunks
    "await": "may_continue wait_for(credit) wait_for(posted) all none_has_failed",
    "publish": "all none_has_failed fence signal_behind(posted) signal_behind(credit)",
    "await_readers": "may_continue wait_for(credit) has_not_failed all",
    "reduce_chunks": "meet await copy_all reduce_as publish await_readers",
    "exchange_chunks": "put_packets meet get_packets await copy_all publish",
    "reduce_multicast": "meet await publish",
    # direct access
    "send_places": "put_packet put_packet signal(ready)",
    "await_ready": "wait acquire(ready)",
    "decide_direct": "peek_packet",
    "none_has_failed": "has_not_failed all",
    "has_not_failed": "wait acquire(quit)",
    "give_up": "signal_peers(quit)",
    # the ends
    "signal_peers": "acquire signal",
    "await_host": "may_continue wait_for all",
    "retire": "end_block complete",
    "run_jobs": "enter give_up leave retire",
    # Watched or counted only: no other access is ordered by these.
    "load_abort": "load_host(abort)",
    "read": "load_view load_view",
    "begin": "store_host(begun)",
    "may_continue": "load_host(abort)",
    "check_wait": "load(failed) load_host(abort)",
    "count_direct": "add(direct)",
    "end_block": "store_host(direct) load(direct) store_host(ended)",
}
UNORDERED = ("load_abort", "read", "begin", "may_continue", "check_wait", "count_direct", "end_block", "has_failed")

PACKETS = (
    "reduce_elements",
    "factor_of",
    "put_packets",
    "put_pack",
    "store_sum",
    "peek_pack",
    "load_ahead",
    "load_any",
    "reduce_hot",
    "gather_packs",
    "reduce_gathered",
    "meet_and_reduce",
)

PROTOCOLS = [
    Protocol(
        "a packet's data come with its stamp, both halves of it",
        (*PACKETS, "get_packets", "await_word", "mismatch"),
        """
        init lo=old:9 hi=old:9
        a0: put_packet hi a:1; put_packet lo a:1
        b0: await_packet r lo :1; await_packet s hi :1
        """,
        ("r!=a:1", "s!=a:1", "stuck"),
        {
            "one half is not looked at": [("await_packet s hi :1", "peek_packet s hi")],
            "data and stamp are separate words": [
                ("await_packet s hi :1", "peek_packet s hi"),
                ("put_packet hi a:1; put_packet lo a:1", "put_packet lo a:1; put_packet hi a:1"),
            ],
        },
    ),
    Protocol(
        "a pack that one lane has gathered is added by another",
        ("gather_packs", "reduce_gathered", "meet_and_reduce", "meet", "reduce_packets", "reduce_packets_two_shot"),
        """
        init pack=old:9
        a0: put_packet pack a:1
        b0: await_packet r pack :1; write gathered 1; all 0
        b1: all 0; read s gathered
        """,
        ("r!=a:1", "s!=1", "stuck"),
        {
            "no barrier between the lane that gathers and the one that adds": [
                ("gathered 1; all 0", "gathered 1"),
                ("b1: all 0;", "b1:"),
            ],
        },
    ),
    Protocol(
        "a buffer of packets is reused after its reader was met in the epoch between, and is read before that",
        (*PACKETS, "enter", "meet", "leave", "reduce_packets", "reduce_packets_two_shot", "exchange_packets"),
        """
        init pack=old:9 arrival=old:8
        a0: put_packet pack a:1; all 0
        a1: await_packet g arrival :2; all 0
        a2: all 0; put_packet pack b:3
        b0: await_packet r pack :1; sync 0; await_packet s pack :3
        b1: sync 0; put_packet arrival x:2
        """,
        ("r!=a:1", "s!=b:3", "stuck"),
        {
            "the reader sends its next arrival before all of its lanes have read": [
                ("sync 0; put_packet arrival", "put_packet arrival")
            ],
            "the writer's lanes do not wait for the one that meets": [("a2: all 0;", "a2:")],
            "the writer does not wait": [("await_packet g arrival :2; all 0", "all 0")],
        },
    ),
    Protocol(
        "a buffer of packets is reused after its reader reported that it is done, where they do not meet",
        ("is_free", "signal_peers", "wait_for", "leave"),
        """
        init pack=old:9 data=none
        a0: put_packet pack a:1; all 0
        a1: wait_for d done >=1; all 0
        a2: all 0; put_packet pack b:3; write data changed
        b0: await_packet r pack :1; read t data; sync 0; await_packet s pack :3
        b1: sync 0; signal done 1
        """,
        ("r!=a:1", "s!=b:3", "t!=none", "stuck"),
        {
            "done is signalled before all lanes have read": [("sync 0; signal done 1", "signal done 1")],
            "done is signalled without release": [("signal done", "signal_behind done")],
            "the writer's lanes do not wait for the one that polls": [("a2: all 0;", "a2:")],
        },
    ),
    Protocol(
        "a packet stamped opaque never replaces one of this epoch, nor do the arrival's other writers",
        ("restamp", "ChannelMemory.restamp", "enter"),
        """
        init pack=old:9
        a0: put_packet pack a:1; sync 0
        a1: sync 0; put_packet pack x:2; sync 1
        a2: sync 0; sync 1; put_packet pack b:3
        b0: await_packet s pack :3
        """,
        ("stuck", "done [pack]!=b:3"),
        {
            "no barrier behind the stamps": [("a2: sync 0; sync 1;", "a2: sync 0;"), ("x:2; sync 1", "x:2")],
            "no barrier before them": [
                ("a0: put_packet pack a:1; sync 0", "a0: put_packet pack a:1"),
                ("a2: sync 0;", "a2:"),
            ],
        },
    ),
    Protocol(
        "a word of an arrival that decides how to go on can be read again, without its stamp, by another lane",
        ("decide_direct", "meet"),
        """
        init arrival=old:9
        a0: put_packet arrival a:1; await_packet g answer :2; put_packet arrival b:3
        b0: all 0; peek_packet r arrival; use r; all 1
        b1: await_packet p arrival :1; all 0; all 1; put_packet answer x:2
        """,
        ("r!=a:1", "stuck"),
        {
            "the lanes do not wait for the one that meets": [
                ("b0: all 0;", "b0:"),
                ("p arrival :1; all 0;", "p arrival :1;"),
            ],
            "nothing depends on the word, as on a factor": [("use r; ", "")],
        },
    ),
    Protocol(
        "a block's state of its peers, written by one lane, is read by the others behind a barrier",
        ("enter", "remember", "meet", "await", "publish", "leave"),
        """
        b0: write state 1; all 0; all 1; write state 2; all 2
        b1: all 0; read r state; all 1; all 2; read s state
        """,
        ("r!=1", "s!=2", "stuck"),
        {
            "no barrier behind the write": [("all 0; ", "")],
            "no barrier behind the read": [("all 1; ", "")],
        },
    ),
    Protocol(
        "the lanes of a reader see the chunk that a peer posted, and a slot is written again after they have read it",
        ("await", "publish", "wait_for", "reduce_chunks", "exchange_chunks"),
        """
        a0: write slot 1; all 0; all 1; write slot 2; all 2
        a1: all 0; fence; signal_behind posted 1; wait_for c credit >=1; all 1; all 2; fence; signal_behind posted 2
        b0: all 0; read r slot; all 1; all 2; read s slot
        b1: wait_for p posted >=1; all 0; all 1; fence; signal_behind credit 1; wait_for q posted >=2; all 2
        """,
        ("r!=1", "s!=2", "stuck"),
        {
            "no fence before posted": [("all 0; fence; signal_behind posted 1", "all 0; signal_behind posted 1")],
            "no fence before credit": [("fence; signal_behind credit", "signal_behind credit")],
            "posted before the other lanes have written": [
                ("all 0; fence; signal_behind posted 1", "fence; signal_behind posted 1; all 0")
            ],
            "credit before the other lanes have read": [
                ("all 1; fence; signal_behind credit 1", "fence; signal_behind credit 1; all 1")
            ],
            "the fence is behind the flag": [("fence; signal_behind posted 1", "signal_behind posted 1; fence")],
            "a lane reads without the barrier": [("b0: all 0;", "b0:"), ("p posted >=1; all 0", "p posted >=1")],
            "a lane writes without the barrier": [
                ("a0: write slot 1; all 0; all 1;", "a0: write slot 1; all 0;"),
                ("credit >=1; all 1", "credit >=1"),
            ],
            "the writer does not wait for the credit": [("wait_for c credit >=1; ", "")],
        },
    ),
    Protocol(
        "one fence serves the flags of all peers and the credits behind it",
        ("publish", "await"),
        """
        a0: write one 1; write two 1; read t back; all 0
        a1: all 0; fence; signal_behind posted1 1; signal_behind credit1 1; signal_behind posted2 1
        b1: wait_for p posted1 >=1; read r one; wait_for q credit1 >=1; write back 7
        c1: wait_for o posted2 >=1; read s two
        """,
        ("r!=1", "s!=1", "t=7", "stuck"),
        {"a fence for the first flag only": [("fence; signal_behind posted1 1;", "signal posted1 1;")]},
    ),
    Protocol(
        "the switch sums a part after its owner has staged it and before it replaces it, and a sum is read when it "
        "is there; proxies are left out",
        ("await", "publish", "reduce_multicast"),
        """
        a0: write in 1; all 0; all 1; read s sum; write in 2
        a1: all 0; fence; signal_behind posted 1; wait_for q summed >=1; all 1
        b0: all 0; read r in; write sum 5; all 1
        b1: wait_for p posted >=1; all 0; all 1; fence; signal_behind summed 1
        """,
        ("r!=1", "s!=5", "stuck"),
        {
            "a flag before the lanes have staged": [("all 0; fence; (signal_behind posted 1)", r"fence; \1; all 0")],
            "no fence behind the sums": [("fence; signal_behind summed", "signal_behind summed")],
            "the lanes that sum do not wait": [("b0: all 0;", "b0:"), ("posted >=1; all 0", "posted >=1")],
            "an input is replaced before the wait": [("(all 1; read s sum); write in 2", r"write in 2; \1")],
        },
    ),
    Protocol(
        "a tensor is accessed by a peer after its owner's earlier accesses, and by the owner after the peer's",
        ("send_places", "await_ready", "publish", "await_readers", "enter", "meet", "reduce_chunks"),
        """
        a0: write in 1; read u out; all 0; all 1; read v out; write in 2
        a1: all 0; signal ready 1; wait_for p posted >=1; wait_for c credit >=1; all 1
        b0: all 0; read r in; write out 7; all 1
        b1: wait_for o ready >=1; all 0; all 1; fence; signal_behind posted 1; signal_behind credit 1
        """,
        ("r!=1", "u=7", "v!=7", "stuck"),
        {
            "ready without release": [("signal ready", "signal_behind ready")],
            "ready before the owner's lanes are done": [("all 0; signal ready 1", "signal ready 1; all 0")],
            "the peer's lanes do not wait for the one that acquires ready": [
                ("b0: all 0;", "b0:"),
                ("ready >=1; all 0", "ready >=1"),
            ],
            "the owner does not wait for its readers": [("wait_for p posted >=1; wait_for c credit >=1; ", "")],
            "the peer reports before its lanes are done": [("all 1; fence; (.*?credit 1)", r"fence; \1; all 1")],
            "a relaxed fence of the peer": [("all 1; fence;", "all 1;")],
        },
    ),
    Protocol(
        "one failure of a rank is recorded, whichever blocks fail: a claim adds here, and succeeds if it reads 0",
        ("record",),
        """
        a00: claim one failed 1
        a01: claim two failed 1
        """,
        ("one=0 two=0",),
        {"a claim inside the block": [("claim", "claim_in_block")]},
    ),
    Protocol(
        "a verdict that the host reads is complete",
        ("record",),
        """
        a0: claim got failed 1; write verdict 1; signal state 1
        h0: host_acquire s state >=1; read r verdict
        """,
        ("r!=1", "stuck"),
        {
            "state without release": [("signal state", "signal_behind state")],
            "state before the verdict": [("(write verdict 1); (signal state 1)", r"\2; \1")],
        },
    ),
    Protocol(
        "a launch whose completion the host has seen is over, with the writes of all lanes of all blocks",
        ("complete", "retire", "leave"),
        """
        a00: write one 1; sync 0
        a10: sync 0; add first left 1; if first =1; signal completion 1
        a01: write two 1; sync 0
        a11: sync 0; add second left 1; if second =1; signal completion 1
        h0: host_acquire t completion >=1; read r one; read s two
        """,
        ("r!=1", "s!=1", "stuck"),
        {
            "a block counts itself before its lanes have ended": [
                ("sync 0; (add second left 1; if second =1;)", r"\1 sync 0;")
            ],
            "the completion without release": [("signal completion", "signal_behind completion")],
            "the count without order": [("add", "add_unordered")],
        },
    ),
    Protocol(
        "the host's writes before it raised a counter are seen by all lanes",
        ("await_host", "wait_for"),
        """
        h0: write slice 1; host_signal counter 1
        a0: wait_for c counter >=1; all 0
        a1: all 0; read r slice
        """,
        ("r!=1", "stuck"),
        {"no barrier behind the wait": [("a1: all 0;", "a1:"), ("counter >=1; all 0", "counter >=1")]},
    ),
    Protocol(
        "an input read in place is valid, or a check behind the barrier sees that its owner failed, if no load passes "
        "the barrier and no access the end of a kernel",
        ("none_has_failed", "has_not_failed", "give_up", "run_jobs", "publish"),
        """
        init in=1
        a0: signal quit 1; kernel_ends; write in 2
        b0: read r in; all 0
        b1: all 0; loads_have_returned; acquire q quit
        """,
        ("r=2 q=0",),
        {
            "quit is signalled behind the kernel's end": [
                ("signal quit 1; (kernel_ends; write in 2)", r"\1; signal quit 1")
            ],
            "the check is before the barrier": [
                ("all 0; loads_have_returned; acquire q quit", "acquire q quit; all 0")
            ],
            "a lane reads behind the barrier": [("read r in; all 0", "all 0; read r in")],
            "loads pass the barrier": [("loads_have_returned; ", "")],
            "accesses pass the end of a kernel": [("kernel_ends; ", "")],
        },
        races=True,
    ),
    # gpu/signals.h
    Protocol(
        "a signal is taken with the data written before its put",
        (),
        """
        init data=old
        a0: write data new; signal word 1
        b0: wait_for q word >=1; signal word 0; read r data
        """,
        ("r=old",),
        {
            "a put without release": [("data new; signal word", "data new; signal_behind word")],
            "a take without acquire": [("wait_for q word", "poll_unordered q word")],
        },
    ),
]


@dataclass
class Gap:
    """A guarantee that the kernels state and the model does not prove."""

    guarantee: str
    text: str
    outcome: str  # which the model allows
    rests_on: str


UNPROVED = [
    Gap(
        "an input read in place is valid or not used (rule 7 of push_channel.h)",
        """
        init in=1
        a0: signal quit 1; kernel_ends; write in 2
        b0: read r in; all 0
        b1: all 0; acquire q quit
        """,
        "r=2 q=0",
        "a lane stores what it has loaded, or a sum of it, before it reaches the barrier, so its loads have returned",
    ),
]

INSTRUCTIONS = {
    "sync": "bar",
    "all": "bar",
    "peek_packet": "ld.relaxed.sys",
    "put_packet": "st.relaxed.sys",
    "signal": "st.release.sys",
    "fence": "fence.acq_rel.sys",
    "signal_behind": "st.relaxed.sys",
    "acquire": "ld.acquire.sys",
    "load_host": "ld.relaxed.sys",
    "store_host": "st.relaxed.sys",
    "load": "ld.relaxed.gpu",
    "store": "st.relaxed.gpu",
    "claim": "atom.acq_rel.gpu",
    "add": "atom.acq_rel.gpu",
}
