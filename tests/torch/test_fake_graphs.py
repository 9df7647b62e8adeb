"""The captures of the fake accelerator: they record, refuse and expose the same errors as CUDA's."""

import gc
import threading

import fake_device
import pytest
import torch
from ranks import TORCH
from test_fake_device import COUNT, all_are, alone, ones, pinned, ranks, side_stream  # noqa: F401 (the fixture)

FAULTS = "capture_faults"


@alone
def test_a_capture_keeps_what_replays_do():
    source, target = ones(), torch.zeros(COUNT, device="fakegpu")
    with fake_device.capture() as graph:
        target.copy_(source)
        source.fill_(9)
    assert all_are(target, 0) and all_are(source, 1)
    for value in (2, 3):
        source.fill_(value)
        graph.replay()
        assert all_are(target, value) and all_are(source, 9)
    with fake_device.held():
        graph.replay()
        assert bool((fake_device.peek(target) == 3).all())
    assert all_are(target, 9)
    assert fake_device.counts()[FAULTS] == 0


@alone
def test_streams_join_a_capture_and_wait_in_it():
    """In a replay the streams are ordered only by their waits."""
    fake_device.set_delays(3, 500)
    value, early, late = (torch.zeros(COUNT, device="fakegpu") for _ in range(3))
    side = side_stream()
    with fake_device.capture() as graph:
        main = torch.accelerator.current_stream()
        fake_device.slow_fill(value, 5, ms=20)
        begun = torch.Event("fakegpu")
        side.wait_event(main.record_event(begun))
        with side:
            late.copy_(value)
        value.fill_(6)  # no wait orders this after the other stream
        main.wait_event(side.record_event())
        early.copy_(value)
    for _ in range(3):
        late.zero_()
        graph.replay()
        assert all_are(early, 6)
        assert set(late.cpu().tolist()) <= {5.0, 6.0}
    side.synchronize()
    with side:
        late.fill_(1)  # the stream is no longer captured
    side.synchronize()
    assert all_are(late, 1)


@alone
def test_joined_stream_must_be_waited_for():
    side, value = side_stream(), ones()
    with pytest.raises(RuntimeError, match="was not waited for at its end"):
        with fake_device.capture():
            side.wait_event(torch.accelerator.current_stream().record_event())
            with side:
                value.fill_(2)
    assert fake_device.counts()[FAULTS] == 1
    assert all_are(value, 1)


def refused(inside):
    before = fake_device.counts()[FAULTS]
    with pytest.raises(RuntimeError, match="fakegpu: "):
        with fake_device.capture():
            inside()
    assert fake_device.counts()[FAULTS] == before + 1


@alone
def test_host_calls_that_a_capture_forbids():
    tensor, outside = ones(), torch.accelerator.current_stream().record_event()
    kept = []

    def current():
        return torch.accelerator.current_stream()

    refused(lambda: current().query())
    refused(lambda: current().synchronize())
    refused(lambda: torch.accelerator.synchronize())
    refused(lambda: current().record_event().query())
    refused(lambda: current().record_event().synchronize())
    refused(lambda: tensor.cpu())
    refused(lambda: current().wait_event(outside))
    refused(lambda: pinned(1))
    with fake_device.capture():
        kept.append(current().record_event())
    before = fake_device.counts()[FAULTS]
    with pytest.raises(RuntimeError, match="a capture that has ended"):
        current().wait_event(kept[0])
    assert fake_device.counts()[FAULTS] == before + 1


@alone
def test_a_capture_that_went_wrong_is_none():
    tensor = ones()
    with pytest.raises(RuntimeError, match="the capture is invalid: .*query a stream"):
        with fake_device.capture():
            tensor.fill_(3)
            with pytest.raises(RuntimeError):
                torch.accelerator.current_stream().query()
    assert all_are(tensor, 1)


@alone
def test_memory_of_a_capture():
    """A capture reuses its own freed memory; after its end the graph still owns the memory."""
    seen, inside = torch.zeros(COUNT, device="fakegpu"), []
    side = side_stream()
    with fake_device.capture() as graph:
        temporary = torch.empty(COUNT, device="fakegpu").fill_(4)
        late = torch.Event("fakegpu")
        side.wait_event(torch.accelerator.current_stream().record_event())
        with side:
            fake_device.slow_fill(seen, 0, ms=20)
            seen.copy_(temporary)
        del temporary
        gc.collect()
        late.record(side)
        torch.accelerator.current_stream().wait_event(late)
        inside.append(torch.empty(COUNT, device="fakegpu").fill_(5))
    inside.clear()
    gc.collect()
    for _ in range(2):
        graph.replay()
        torch.accelerator.synchronize()
        assert fake_device.is_poison(seen)
    with fake_device.capture():
        temporary = torch.empty(COUNT, device="fakegpu")
        side.wait_event(torch.accelerator.current_stream().record_event())
        temporary.record_stream(side)
        torch.accelerator.current_stream().wait_event(side.record_event())
        del temporary
        gc.collect()
    assert fake_device.counts()["unreused_frees"] == 1


@pytest.mark.skipif(TORCH < (2, 13), reason="this torch does not query it")
@alone
def test_torch_may_query_whether_a_stream_is_captured():
    side = side_stream()
    with fake_device.capture() as graph:
        assert torch.ops.fake_device.is_capturing(torch.accelerator.current_stream())
        assert not torch.ops.fake_device.is_capturing(side)
    assert not torch.ops.fake_device.is_capturing(torch.accelerator.current_stream())
    graph.replay()


@alone
def test_queries_of_other_threads_beside_a_capture():
    """The laxer of the two modes applies: a query is refused only if the capture and the thread are both "global"."""
    outside = torch.accelerator.current_stream().record_event()
    side = side_stream()

    def on_a_thread(mode):
        def query():
            with fake_device.thread_mode(mode):
                for question in (outside.query, side.query, outside.synchronize, side.synchronize):
                    try:
                        question()
                    except RuntimeError:
                        refusals.append(question)

        refusals = []
        thread = threading.Thread(target=query)
        thread.start()
        thread.join()
        return len(refusals)

    for captured, asking, refused_ones in (
        ("global", "global", 4),
        ("global", "thread_local", 0),
        ("global", "relaxed", 0),
        ("thread_local", "global", 0),
        ("relaxed", "global", 0),
    ):
        value = ones()
        try:
            with fake_device.capture(mode=captured) as graph:
                value.fill_(2)
                seen = on_a_thread(asking)
            assert seen == refused_ones == 0, (captured, asking)
            graph.replay()
            assert all_are(value, 2)
        except RuntimeError as error:
            assert "the capture is invalid: no thread may" in str(error) and seen == refused_ones, (captured, asking)


@alone
def test_a_thread_that_captures_may_query_only_when_it_relaxes_the_mode():
    outside = torch.accelerator.current_stream().record_event()
    for mode in ("global", "thread_local"):
        with pytest.raises(RuntimeError, match="no thread may query an event"), fake_device.capture(mode=mode):
            outside.query()
        with fake_device.capture(mode=mode), fake_device.thread_mode("relaxed"):
            outside.query()
    with fake_device.capture(mode="relaxed"):
        outside.query()
