"""Buckets of random plans: bounds, order, each byte once, and the same on both ends."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.config.errors import ConfigError
from mcore_rl.reshard.buckets import ALIGNMENT, Message, Round, Streams, boxes_of, schedule
from tests.unit.reshard.test_planner import Case, held, numbered, triples

# Of the small models here: rows are cut, messages are many, and some buckets hold a whole model.
SIZES = (16, 48, 256, 1024, 1 << 20)
EVERY = 12  # of the cases: some


def bucket_bytes_of(case: Case) -> int:
    """Smaller ones for fewer ranks only: their number is what takes time."""
    rng = random.Random(triples().index(case))
    worlds = len(case.devices.training) + len(case.devices.generation)
    return rng.choice(SIZES[1:] if worlds > 12 else SIZES)


def schedules(case: Case) -> dict[int, tuple[Round, ...]]:
    plan, size = case.plan, bucket_bytes_of(case)
    devices = {*case.devices.training, *case.devices.generation}
    return {device: schedule(plan, device, size) for device in devices}


@pytest.fixture(scope="module")
def scheduled() -> list[tuple[Case, dict[int, tuple[Round, ...]]]]:
    return [(case, schedules(case)) for case in triples()[::EVERY]]


def sends(rounds: tuple[Round, ...]) -> list[tuple[int, Message]]:
    return [step.send for one in rounds for step in one.steps if step.send is not None]


def test_what_arrives_is_each_parameter_once_and_the_network_carries_what_is_missing(scheduled):
    for case, by_device in scheduled:
        (training, rules), (served, vllm_rules) = case.sides
        whole = numbered(rules) | numbered(vllm_rules)
        sources, wanted = held(training, rules, whole), held(served, vllm_rules, whole)
        for rank, device in enumerate(case.devices.generation):
            filled = {name: np.zeros_like(array) for name, array in wanted[rank].items()}
            for one in by_device[device]:
                for slot in one.slots:
                    source = sources[slot.message.source_rank]
                    for part in slot.message.parts:
                        target = filled[part.target][box(part.target_offset, part.sizes)]
                        assert not target.any(), "written twice"
                        target[...] = source[part.source][box(part.source_offset, part.sizes)]
            assert {name: a.tolist() for name, a in filled.items()} == {
                name: a.tolist() for name, a in wanted[rank].items()
            }
            received = [s.receive for one in by_device[device] for s in one.steps if s.receive]
            num_bytes = sum(slot.message.num_bytes for _, slot in received)
            assert num_bytes == case.plan.totals().received[rank]


def test_boxes_that_continue_each_other_at_both_ends_are_one(scheduled):
    whole = 0  # parts that are gate and up of an expert or a layer
    for case, by_device in scheduled:
        (training, rules), _ = case.sides
        held_by = held(training, rules, numbered(rules))
        slots = (x for one in by_device.values() for r in one for x in r.slots)
        for message in (slot.message for slot in slots):
            shapes = {name: array.shape for name, array in held_by[message.source_rank].items()}
            whole += sum("fc1" in p.source and p.sizes == shapes[p.source] for p in message.parts)
            for one, other in itertools.pairwise(message.parts):
                ends = [
                    (start[0] + one.sizes[0], *start[1:])
                    for start in (one.source_offset, one.target_offset)
                ]
                starts = [other.source_offset, other.target_offset]
                is_same = one.sizes[1:] == other.sizes[1:] and one.itemsize == other.itemsize
                names = (one.source, one.target), (other.source, other.target)
                assert names[0] != names[1] or not is_same or ends != starts
    assert whole


def box(offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))


def test_messages_fit_into_buckets_of_the_size_without_overlap_and_aligned(scheduled):
    for case, by_device in scheduled:
        size = bucket_bytes_of(case)
        for rounds in by_device.values():
            assert all(message.num_bytes <= size for _, message in sends(rounds))
            for number, one in enumerate(rounds):
                end = 0
                for slot in one.slots:
                    message = slot.message
                    assert (message.bucket, slot.offset % ALIGNMENT) == (number, 0)
                    assert slot.offset >= end
                    end = slot.offset + message.num_bytes
                    starts = itertools.accumulate((p.num_bytes for p in message.parts), initial=0)
                    assert [*(p.start for p in message.parts), message.num_bytes] == list(starts)
                    assert all(part.start % part.itemsize == 0 for part in message.parts)
                assert end <= one.num_bytes <= size


def test_buckets_are_full_but_for_alignment_and_the_last(scheduled):
    """No more rounds than the bytes need: every copy is aligned once, and cut at every bucket."""
    for case, by_device in scheduled:
        plan, size = case.plan, bucket_bytes_of(case)
        for rank, device in enumerate(case.devices.generation):
            filled = [one.num_bytes for one in by_device[device] if one.num_bytes]
            needed = sum(
                math.ceil(copy.num_bytes / ALIGNMENT) * ALIGNMENT for copy in plan.received_by(rank)
            )
            assert len(filled) == math.ceil(needed / size)


def test_both_ends_know_the_same_messages_at_the_same_step(scheduled):
    for _, by_device in scheduled:
        out, into = {}, {}
        for device, rounds in by_device.items():
            for number, one in enumerate(rounds):
                for place, step in enumerate(one.steps):
                    if step.send is not None:
                        out[number, device, step.send[0]] = step.send[1], place
                    if step.receive is not None:
                        there, slot = step.receive
                        into[number, there, device] = slot.message, place
        assert out.keys() == into.keys()
        assert all(out[key][0] == into[key][0] for key in out)


def test_a_loop_that_waits_as_long_as_it_can_comes_to_its_end(scheduled):
    """Each device holds one message out and one in, and goes on when both have met their peers."""
    for _, by_device in scheduled:
        steps = {d: [s for one in rounds for s in one.steps] for d, rounds in by_device.items()}
        at = dict.fromkeys(steps, 0)
        done: set[tuple[int, int, int]] = set()  # bucket, from, to

        def begun(device: int, at: dict[int, int], steps: dict[int, list]) -> set:
            current = steps[device][at[device]] if at[device] < len(steps[device]) else None
            found = set()
            if current is not None and current.send is not None:
                found.add((current.send[1].bucket, device, current.send[0]))
            if current is not None and current.receive is not None:
                there, slot = current.receive
                found.add((slot.message.bucket, there, device))
            return found

        while any(at[device] < len(steps[device]) for device in steps):
            offered = [key for device in steps for key in begun(device, at, steps)]
            done |= {key for key in offered if offered.count(key) == 2}
            ready = [d for d in steps if at[d] < len(steps[d]) and begun(d, at, steps) <= done]
            assert ready, "every device waits"
            for device in ready:
                at[device] += 1


def test_layers_and_the_experts_of_a_layer_come_in_one_piece_from_different_beginnings():
    first_layers, first_experts = set(), set()
    for case in triples()[::EVERY][:15]:
        streams = Streams(case.plan, ALIGNMENT)  # which no two copies share
        for rank in range(len(case.devices.generation)):
            messages = sorted(streams.messages_into(rank), key=lambda message: message.bucket)
            targets = [part.target for message in messages for part in message.parts]
            layers = [".".join(name.split(".")[:3]) for name in targets]
            assert len(list(itertools.groupby(layers))) == len(set(layers))
            of_experts = [name.endswith("]") for name in targets]
            runs = itertools.groupby(zip(layers, of_experts, strict=True))
            pieces = [layer for (layer, is_expert), _ in runs if is_expert]
            assert len(pieces) == len(set(pieces))
            numbers = [name.split("[")[1] for name in targets if name.endswith("]")]
            first_experts.update(numbers[:1])
            first_layers.add(layers[0])
    assert len(first_layers) > 3
    assert len(first_experts) > 3


def test_receivers_that_need_the_same_do_not_draw_on_one_sender_at_a_time():
    """Over three pipeline stages: more than one of them sends in nearly every round."""
    case = next(c for c in triples() if c.layout.pp == 3 and c.generation.world_size >= 8)
    streams = Streams(case.plan, 256)
    by_bucket: dict[int, dict[int, int]] = {}
    for rank in range(case.generation.world_size):
        for message in streams.messages_into(rank):
            senders = by_bucket.setdefault(message.bucket, {})
            senders[message.source_rank] = senders.get(message.source_rank, 0) + message.num_bytes
    stages = [
        {case.sides[0][0].mesh.get_coordinate(rank).pp_rank for rank in senders}
        for senders in by_bucket.values()
    ]
    assert sum(len(found) > 1 for found in stages) > 0.8 * len(stages)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_boxes_of_a_run_are_its_elements_in_order(sizes, data):
    count = math.prod(sizes)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = np.arange(count).reshape(sizes)
    found = [
        whole[box(offset, part)].ravel() for offset, part in boxes_of(tuple(sizes), start, stop)
    ]
    assert np.concatenate([*found, np.empty(0, int)]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * len(sizes) + 1


@pytest.mark.parametrize("size", [0, 8, -16, 24])
def test_a_bucket_that_nothing_fits_into_is_refused(size):
    with pytest.raises(ConfigError, match="multiples of 16"):
        schedule(triples()[0].plan, 0, size)
