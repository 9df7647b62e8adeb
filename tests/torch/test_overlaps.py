"""Outputs that partly overlap inputs. `tests/torch/test_tensors.py` covers in-place calls."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, only_nvx
from reference import assert_same, small_numbers


def numbers(rank, count):
    return small_numbers(torch.float32, count, rank)


def slots_of(whole, count, shift):
    """The ranks' slots of `whole`, shifted by `shift` elements."""
    return [whole[p * count + shift : (p + 1) * count + shift] for p in range(whole.numel() // count - 1)]


@only_nvx
@on_ranks(2, 3)
def test_gathers_into_memory_of_the_input(rank, world):
    """The input is another rank's slot of the output, or none: received data must not overwrite unsent data."""
    for count in (3, 1000, 70_001):
        want = [numbers(r, count) for r in range(world)]
        for place, shift in ((rank, 1), ((rank + 1) % world, 0), ((rank + 1) % world, count // 2)):
            whole = torch.zeros((world + 1) * count)
            outputs, given = slots_of(whole, count, 0), slots_of(whole, count, shift)[place]
            what = f"count {count}, the input in slot {place} and {shift} on"
            given.copy_(want[rank])
            dist.all_gather_into_tensor(whole[: world * count], given)
            assert_same(torch.cat(outputs), torch.cat(want), f"all_gather_into_tensor, {what}")
            given.copy_(want[rank])
            dist.all_gather(outputs, given)
            assert_same(torch.cat(outputs), torch.cat(want), f"all_gather, {what}")
            given.copy_(want[rank])
            dist.gather(given, outputs if rank == 0 else None, dst=0)
            if rank == 0:
                assert_same(torch.cat(outputs), torch.cat(want), f"gather, {what}")


@only_nvx
@on_ranks(2, 3)
def test_scatters_into_memory_of_the_input(rank, world):
    for count in (3, 1000, 70_001):
        given = [numbers(r, world * count) for r in range(world)]
        want = sum(given)[rank * count : (rank + 1) * count]

        def fresh(of, place, shift, count=count, given=given):
            whole = torch.cat([given[of], torch.zeros(count)])
            return whole[: world * count], slots_of(whole, count, 0), slots_of(whole, count, shift)[place]

        for place, shift in ((rank, 1), ((rank + 1) % world, 0), ((rank + 1) % world, count // 2)):
            what = f"count {count}, the output in slot {place} and {shift} on"
            inputs, _, output = fresh(rank, place, shift)
            dist.reduce_scatter_tensor(output, inputs)
            assert_same(output, want, f"reduce_scatter_tensor, {what}")
            _, slots, output = fresh(rank, place, shift)
            dist.reduce_scatter(output, slots)
            assert_same(output, want, f"reduce_scatter, {what}")
            _, slots, output = fresh(0, place, shift)
            dist.scatter(output, slots if rank == 0 else None, src=0)
            assert_same(output, given[0][rank * count : (rank + 1) * count], f"scatter, {what}")


@only_nvx
@on_ranks(2, 3)
def test_all_to_all_into_memory_of_the_input(rank, world):
    """The output has another order, other splits, or a shift."""
    for count in (3, 1000, 70_001):
        sent = [numbers(r, world * count) for r in range(world)]
        want = [s[rank * count : (rank + 1) * count] for s in sent]
        pieces = list(sent[rank].clone().chunk(world))
        outputs = pieces[::-1]
        dist.all_to_all(outputs, pieces)
        assert_same(torch.cat(outputs), torch.cat(want), f"all_to_all in reverse, count {count}")
        whole = torch.cat([sent[rank], torch.zeros(1)])
        dist.all_to_all_single(whole[1:], whole[:-1])
        assert_same(whole[1:], torch.cat(want), f"all_to_all_single, one on, count {count}")
        whole = sent[rank].clone()
        give, take = [count] * world, [count] * world
        if rank < 2:  # rank 0 keeps less and so sends rank 1 more than it receives from it
            give[rank], give[1 - rank] = (count - 1, count + 1) if rank == 0 else (count + 1, count - 1)
            take[rank], take[1 - rank] = (count - 1, count - 1) if rank == 0 else (count + 1, count + 1)
            whole, room = torch.zeros(world * count + 2), sum(take)
            inputs, output = whole[: world * count], whole[:room]
            inputs.copy_(sent[rank])
        else:
            inputs = output = whole
        dist.all_to_all_single(output, inputs, take, give)
        starts = [count - 1 if rank == 1 and r == 0 else rank * count for r in range(world)]
        if rank == 1:
            starts[1] = count - 1
        parts = [sent[r][starts[r] : starts[r] + take[r]] for r in range(world)]
        assert_same(output, torch.cat(parts), f"all_to_all_single with other splits, count {count}")


@on_ranks(2, 3)
def test_operations_of_one_call_that_share_memory(rank, world):
    """The second input lies in the first output, as gloo reads all inputs first."""
    group = dist.group.WORLD
    for count in (4, 70_001):
        first, second = ([numbers(2 * r + i, count) for r in range(world)] for i in (0, 1))
        outputs, mine = [torch.zeros(world * count) for _ in "12"], first[rank].clone()
        outputs[0][:count] = second[rank]
        group.allgather_into_tensor_coalesced(outputs, [mine, outputs[0][:count]]).wait()
        assert_same(outputs[0], torch.cat(first), f"all_gather_into_tensor_coalesced, count {count}")
        assert_same(outputs[1], torch.cat(second), f"all_gather_into_tensor_coalesced, second, count {count}")

        lists = [[torch.zeros(count) for _ in "12"] for _ in range(world)]
        lists[0][0].copy_(second[rank])
        dist.all_gather_coalesced(lists, [mine, lists[0][0]])
        for p in range(world):
            assert_same(lists[p][0], first[p], f"all_gather_coalesced, rank {p}, count {count}")
            assert_same(lists[p][1], second[p], f"all_gather_coalesced, second, rank {p}, count {count}")

        given = [numbers(r, 2 * world * count) for r in range(world)]
        inputs = list(given[rank].clone().chunk(2))
        results = [inputs[1][:count], torch.zeros(count)]
        with dist._coalescing_manager(async_ops=True) as pending:
            for output, input in zip(results, inputs, strict=True):
                dist.reduce_scatter_tensor(output, input)
        pending.wait()
        want = sum(given).chunk(2 * world)
        assert_same(results[0], want[rank], f"reduce_scatter_tensor, count {count}")
        assert_same(results[1], want[world + rank], f"reduce_scatter_tensor, second, count {count}")


@only_nvx
@on_ranks(2, 3)
def test_lists_that_share_a_part_of_their_memory_are_refused(rank, world):
    whole = torch.zeros(6)
    with pytest.raises(ValueError, match="tensors 1 and 0 of the list share a part of their memory"):
        dist.group.WORLD.broadcast([whole[:4], whole[2:]], dist.BroadcastOptions()).wait()
    mine = numbers(rank, 4)
    dist.broadcast(mine, src=0)
    assert_same(mine, numbers(0, 4), "a broadcast afterwards")


@only_nvx
@on_ranks(2, 3)
def test_outputs_that_share_memory_hold_the_last_one(rank, world):
    """The result does not depend on arrival order: it is the same on all ranks, and the same as over gloo."""
    for count in (3, 1000, 70_001):
        want = numbers(world - 1, count)
        out, mine = torch.zeros(count), numbers(rank, count)
        dist.all_gather([out] * world, mine)
        assert_same(out, want, f"all_gather of {count}")
        out.zero_()
        dist.all_to_all([out] * world, [mine.clone() for _ in range(world)])
        assert_same(out, want, f"all_to_all of {count}")
        out.zero_()
        dist.gather(mine, [out] * world if rank == 0 else None, dst=0)
        if rank == 0:
            assert_same(out, want, f"gather of {count}")
        whole = torch.zeros(count + world - 1)
        dist.all_gather([whole[p : p + count] for p in range(world)], mine)
        assert_same(whole[world - 1 :], want, f"all_gather of {count}, one element on")
        assert whole[0] == numbers(0, count)[0]


@only_nvx
@on_ranks(2, 3)
def test_strided_and_contiguous_outputs_that_share_memory_hold_the_last_one(rank, world):
    mine, last = numbers(rank, 1024).view(32, 32), numbers(world - 1, 1024).view(32, 32)
    for strided in range(world):
        buffer = torch.zeros(32, 32)
        outputs = [buffer.t() if p == strided else buffer for p in range(world)]
        dist.all_gather(outputs, mine)
        assert_same(outputs[-1], last, f"all_gather, output {strided} is strided")
        dist.all_to_all(outputs, [mine.clone() for _ in range(world)])
        assert_same(outputs[-1], last, f"all_to_all, output {strided} is strided")
        dist.gather(mine, outputs if rank == 0 else None, dst=0)
        assert_same(outputs[-1], last, f"gather, output {strided} is strided")
