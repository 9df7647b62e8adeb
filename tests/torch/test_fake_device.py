"""The fake accelerator itself: it must expose the races that it models, and no others."""

import ctypes
import gc
import signal

import fake_device
import pytest
import torch
import warm
from ranks import HERE, Ranks, on_ranks

COUNT = 1000


@pytest.fixture(scope="module")
def ranks():
    """A separate pool: a process that has loaded the device keeps it."""
    fake_device.build()
    pool = Ranks()
    yield pool
    pool.close()


def alone(body):
    """Runs the body in one process that has the device; all streams are idle at the start."""

    def test():
        fake_device.load()
        fake_device.set_delays(7, 50)
        fake_device.drain()
        fake_device.reset_counts()
        body()

    test.__name__, test.__qualname__, test.__module__ = body.__name__, body.__qualname__, body.__module__
    test.__doc__ = body.__doc__
    return on_ranks(1, kind="bare")(test)


def ones():
    return torch.ones(COUNT, device="fakegpu")


def side_stream():
    return torch.Stream(device="fakegpu")


def pinned(value):
    return torch.full((COUNT,), float(value)).pin_memory()


def all_are(tensor, value):
    return bool((tensor.cpu() == value).all())


# --- streams and events -------------------------------------------------------------------------------------


@alone
def test_a_side_stream_does_not_wait_by_itself():
    source, side = torch.zeros(COUNT, device="fakegpu"), side_stream()
    torch.accelerator.synchronize()
    with fake_device.held():
        source.fill_(5)
        with side:
            seen = source.clone()
        side.synchronize()
    assert all_are(seen, 0) and all_are(source, 5)


@alone
def test_new_memory_belongs_to_the_allocating_stream():
    side = side_stream()
    with fake_device.held():
        fresh = torch.empty(COUNT, device="fakegpu")
        with side:
            fresh.fill_(3)
        side.synchronize()
        assert bool((fake_device.peek(fresh) == 3).all())
    torch.accelerator.synchronize()
    assert fake_device.is_poison(fresh)


@alone
def test_a_side_stream_that_waits_sees_what_was_made():
    for seed in range(5):
        fake_device.set_delays(seed, 300)
        source, side = torch.zeros(COUNT, device="fakegpu"), side_stream()
        fake_device.slow_fill(source, 5, ms=5)
        made = torch.accelerator.current_stream().record_event()
        side.wait_event(made)
        with side:
            seen = source.clone()
        torch.accelerator.current_stream().wait_stream(side)
        assert all_are(seen, 5)


@alone
def test_an_event_is_waited_for_as_it_was_then():
    first, second, waiting = side_stream(), side_stream(), side_stream()
    value = torch.zeros(COUNT, device="fakegpu")
    torch.accelerator.synchronize()
    event = first.record_event()
    waiting.wait_event(event)
    with fake_device.held(second):
        second.record_event(event)
        assert not event.query()
        with waiting:
            value.fill_(1)
        waiting.synchronize()
        assert bool((fake_device.peek(value) == 1).all())
    event.synchronize()
    assert event.query()


@alone
def test_work_is_enqueued_and_queries_report_its_end():
    stream, target = torch.accelerator.current_stream(), ones()
    torch.accelerator.synchronize()
    assert stream.query()
    with fake_device.held():
        target.zero_()
        event = stream.record_event()
        assert not stream.query() and not event.query()
        assert bool((fake_device.peek(target) == 1).all())
    event.synchronize()
    assert event.query() and bool((fake_device.peek(target) == 0).all())


@alone
def test_devices_wait_for_each_other_in_copies():
    source = torch.zeros(COUNT, device="fakegpu:0")
    fake_device.slow_fill(source, 4, ms=5)
    there = source.to("fakegpu:1", non_blocking=True)
    source.fill_(9)
    assert there.device.index == 1 and all_are(there, 4)


# --- memory -------------------------------------------------------------------------------------------------


def use_on_a_side_stream_then_free(record):
    """The data that a side stream reads from a tensor that was freed before the side stream reached it."""
    side, seen = side_stream(), torch.zeros(COUNT, device="fakegpu")
    source = ones()
    torch.accelerator.synchronize()
    with fake_device.held(side):
        with side:
            seen.copy_(source)
        if record:
            source.record_stream(side)
        del source
        gc.collect()
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    return seen


@alone
def test_freed_before_it_was_used_is_poison():
    assert fake_device.is_poison(use_on_a_side_stream_then_free(record=False))


@alone
def test_recorded_memory_waits_for_its_user():
    seen = use_on_a_side_stream_then_free(record=True)
    assert all_are(seen, 1)
    assert fake_device.counts()["data_recorded"] == 1


@alone
def test_freed_memory_serves_what_its_own_stream_had_to_do():
    seen = torch.zeros(COUNT, device="fakegpu")
    with fake_device.held():
        seen.copy_(ones())
        gc.collect()
    assert all_are(seen, 1)


@alone
def test_much_is_allocated_and_freed():
    for _ in range(40):
        # 160 MiB in total: more than the quarantine of freed memory.
        assert all_are(torch.full((1 << 20,), 2.0, device="fakegpu"), 2)


def test_a_host_that_reads_device_memory_is_killed():
    script = "import ctypes, torch, fake_device; fake_device.load(); x = torch.ones(9, device='fakegpu');"
    script += "torch.accelerator.synchronize(); ctypes.string_at(x.data_ptr(), 4)"
    done = warm.run(["-c", script], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr


# --- the host's side of copies ------------------------------------------------------------------------------


@alone
def test_a_pinned_copy_from_the_device_runs_later():
    source, target = ones(), pinned(0)
    torch.accelerator.synchronize()
    fake_device.reset_counts()
    with fake_device.held():
        target.copy_(source, non_blocking=True)
        event = torch.accelerator.current_stream().record_event()
        assert all_are(target, 0)
    event.synchronize()
    assert all_are(target, 1)
    counts = fake_device.counts()
    assert (counts["stream_syncs"], counts["event_syncs"]) == (0, 1)


@alone
def test_a_pinned_copy_to_the_device_reads_what_is_there_when_it_runs():
    source, target = pinned(1), torch.zeros(COUNT, device="fakegpu")
    with fake_device.held():
        target.copy_(source, non_blocking=True)
        source.fill_(2)
    assert all_are(target, 2)


@alone
def test_a_pinned_block_lives_until_its_copy_has_run():
    source, target = pinned(1), torch.zeros(COUNT, device="fakegpu")
    address = source.data_ptr()
    with fake_device.held():
        target.copy_(source, non_blocking=True)
        del source
        gc.collect()
    assert all_are(target, 1)
    fake_device.drain()
    assert ctypes.string_at(address, 1)[0] == fake_device.POISON


@alone
def test_without_pinned_memory_the_caller_waits():
    target = torch.zeros(COUNT)
    source = torch.zeros(COUNT, device="fakegpu")
    fake_device.slow_fill(source, 5, ms=20)
    fake_device.reset_counts()
    target.copy_(source, non_blocking=True)
    assert all_are(target, 5)
    assert fake_device.counts()["stream_syncs"] == 1


# --- the rest -----------------------------------------------------------------------------------------------


@alone
def test_counts():
    tensor, side = torch.empty(COUNT, device="fakegpu"), side_stream()
    host = torch.empty(COUNT, pin_memory=True)
    tensor.fill_(1)
    side.wait_stream(torch.accelerator.current_stream())
    host.copy_(tensor, non_blocking=True)
    assert fake_device.counts() == {
        "stream_syncs": 0,
        "event_syncs": 0,
        "device_syncs": 0,
        "device_allocations": 1,
        "pinned_allocations": 1,
        "stream_waits": 1,
        "data_recorded": 0,
        "fallbacks": 0,
        "capture_faults": 0,
        "unreused_frees": 0,
        "pinned_bytes": COUNT * 4,
        "launches": 0,
        "events_made": 1,
        "event_records": 1,
        "stray_calls": 0,
        "devices_chosen": 0,
    }
    side.synchronize()
    torch.accelerator.synchronize()
    (tensor + 1)[0].item()
    counts = fake_device.counts()
    assert counts["fallbacks"] == 1 and counts["device_syncs"] == 1 and counts["stream_syncs"] > 2


@alone
def test_a_model_trains_as_on_the_cpu():
    torch.manual_seed(3)
    inputs = torch.randn(16, 8)
    results = []
    for device in ("cpu", "fakegpu"):
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            loss = model(inputs.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append([p.detach().cpu() for p in model.parameters()])
    for on_cpu, on_device in zip(*results, strict=True):
        torch.testing.assert_close(on_device, on_cpu)


@alone
def test_strided_tensors_and_other_types_are_copied():
    host = torch.arange(24.0).view(2, 3, 4)
    there = host.transpose(0, 2).to("fakegpu")
    assert torch.equal(there.cpu(), host.transpose(0, 2))
    assert torch.equal(there[1:, :, 0].to(torch.int64).cpu(), host.transpose(0, 2)[1:, :, 0].to(torch.int64))
    there.untyped_storage().resize_(0)
    there.untyped_storage().resize_(96)
    assert there.untyped_storage().size() == 96


def test_an_exit_does_not_wait_for_a_stream_that_is_held():
    script = "import torch, fake_device; fake_device.load(); x = torch.ones(9, device='fakegpu');"
    script += "held = fake_device.held(); held.__enter__(); x.zero_(); del x"
    done = warm.run(["-c", script], cwd=HERE, timeout=30, check=False)
    assert done.returncode == 0
