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
from mcore_rl.reshard.buckets import ALIGNMENT, Message, Round, Streams, schedule, split_range
from tests.unit.reshard.test_planner import Case, compute_parameters, number_elements, triples

# Of the small models here: rows are cut, messages are many, and some buckets hold a whole model.
SIZES = (16, 48, 256, 1024, 1 << 20)
EVERY = 12  # of the cases: some


def choose_bucket_bytes(case: Case) -> int:
    """Smaller ones for fewer ranks only: their number is what takes time."""
    rng = random.Random(triples().index(case))
    worlds = len(case.devices.training) + len(case.devices.generation)
    return rng.choice(SIZES[1:] if worlds > 12 else SIZES)


def schedule_devices(case: Case) -> dict[int, tuple[Round, ...]]:
    plan, size = case.plan, choose_bucket_bytes(case)
    devices = {*case.devices.training, *case.devices.generation}
    return {device: schedule(plan, device, size) for device in devices}


@pytest.fixture(scope="module")
def scheduled() -> list[tuple[Case, dict[int, tuple[Round, ...]]]]:
    return [(case, schedule_devices(case)) for case in triples()[::EVERY]]


def list_sends(rounds: tuple[Round, ...]) -> list[tuple[int, Message]]:
    return [step.send for round_ in rounds for step in round_.steps if step.send is not None]


def test_what_arrives_is_each_parameter_once_and_the_network_carries_what_is_missing(scheduled):
    for case, by_device in scheduled:
        (training, rules), (served, vllm_rules) = case.sides
        tensors = number_elements(rules) | number_elements(vllm_rules)
        sources = compute_parameters(training, rules, tensors)
        expected = compute_parameters(served, vllm_rules, tensors)
        for rank, device in enumerate(case.devices.generation):
            filled = {name: np.zeros_like(array) for name, array in expected[rank].items()}
            for round_ in by_device[device]:
                for slot in round_.slots:
                    source = sources[slot.message.source_rank]
                    for part in slot.message.parts:
                        target = filled[part.target][box(part.target_offset, part.sizes)]
                        assert not target.any(), "written twice"
                        target[...] = source[part.source][box(part.source_offset, part.sizes)]
            assert {name: a.tolist() for name, a in filled.items()} == {
                name: a.tolist() for name, a in expected[rank].items()
            }
            received = [
                s.receive for round_ in by_device[device] for s in round_.steps if s.receive
            ]
            num_bytes = sum(slot.message.num_bytes for _, slot in received)
            assert num_bytes == case.plan.compute_totals().received[rank]


def test_boxes_that_continue_each_other_at_both_ends_are_one(scheduled):
    num_merged = 0  # parts that are gate and up of an expert or a layer
    for case, by_device in scheduled:
        (training, rules), _ = case.sides
        held_by = compute_parameters(training, rules, number_elements(rules))
        slots = (x for part in by_device.values() for r in part for x in r.slots)
        for message in (slot.message for slot in slots):
            shapes = {name: array.shape for name, array in held_by[message.source_rank].items()}
            num_merged += sum(
                "fc1" in p.source and p.sizes == shapes[p.source] for p in message.parts
            )
            for part, following in itertools.pairwise(message.parts):
                ends = [
                    (start[0] + part.sizes[0], *start[1:])
                    for start in (part.source_offset, part.target_offset)
                ]
                starts = [following.source_offset, following.target_offset]
                is_same = (
                    part.sizes[1:] == following.sizes[1:] and part.itemsize == following.itemsize
                )
                names = (part.source, part.target), (following.source, following.target)
                assert names[0] != names[1] or not is_same or ends != starts
    assert num_merged


def box(offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))


def test_messages_fit_into_buckets_of_the_size_without_overlap_and_aligned(scheduled):
    for case, by_device in scheduled:
        size = choose_bucket_bytes(case)
        for rounds in by_device.values():
            assert all(message.num_bytes <= size for _, message in list_sends(rounds))
            for number, round_ in enumerate(rounds):
                end = 0
                for slot in round_.slots:
                    message = slot.message
                    assert (message.bucket, slot.offset % ALIGNMENT) == (number, 0)
                    assert slot.offset >= end
                    end = slot.offset + message.num_bytes
                    starts = itertools.accumulate((p.num_bytes for p in message.parts), initial=0)
                    assert [*(p.start for p in message.parts), message.num_bytes] == list(starts)
                    assert all(part.start % part.itemsize == 0 for part in message.parts)
                assert end <= round_.num_bytes <= size


def test_buckets_are_full_but_for_alignment_and_the_last(scheduled):
    """Check that there are no more rounds than the bytes need: every copy is aligned once."""
    for case, by_device in scheduled:
        plan, size = case.plan, choose_bucket_bytes(case)
        for rank, device in enumerate(case.devices.generation):
            filled = [round_.num_bytes for round_ in by_device[device] if round_.num_bytes]
            needed = sum(
                math.ceil(copy.num_bytes / ALIGNMENT) * ALIGNMENT
                for copy in plan.list_received(rank)
            )
            assert len(filled) == math.ceil(needed / size)


def test_both_ends_know_the_same_messages_at_the_same_step(scheduled):
    for _, by_device in scheduled:
        out, into = {}, {}
        for device, rounds in by_device.items():
            for number, round_ in enumerate(rounds):
                for place, step in enumerate(round_.steps):
                    if step.send is not None:
                        out[number, device, step.send[0]] = step.send[1], place
                    if step.receive is not None:
                        there, slot = step.receive
                        into[number, there, device] = slot.message, place
        assert out.keys() == into.keys()
        assert all(out[key][0] == into[key][0] for key in out)


def test_a_loop_that_waits_as_long_as_it_can_comes_to_its_end(scheduled):
    """Simulate devices that wait for both messages of a step before the next one."""
    for _, by_device in scheduled:
        steps = {
            d: [s for round_ in rounds for s in round_.steps] for d, rounds in by_device.items()
        }
        positions = dict.fromkeys(steps, 0)
        done: set[tuple[int, int, int]] = set()  # bucket, from, to

        def list_current(device: int, positions: dict[int, int], steps: dict[int, list]) -> set:
            current = (
                steps[device][positions[device]] if positions[device] < len(steps[device]) else None
            )
            keys = set()
            if current is not None and current.send is not None:
                keys.add((current.send[1].bucket, device, current.send[0]))
            if current is not None and current.receive is not None:
                there, slot = current.receive
                keys.add((slot.message.bucket, there, device))
            return keys

        while any(positions[device] < len(steps[device]) for device in steps):
            offered = [key for device in steps for key in list_current(device, positions, steps)]
            done |= {key for key in offered if offered.count(key) == 2}
            ready = [
                d
                for d in steps
                if positions[d] < len(steps[d]) and list_current(d, positions, steps) <= done
            ]
            assert ready, "every device waits"
            for device in ready:
                positions[device] += 1


def test_layers_and_the_experts_of_a_layer_come_in_one_piece_from_different_beginnings():
    first_layers, first_experts = set(), set()
    for case in triples()[::EVERY][:15]:
        streams = Streams(case.plan, ALIGNMENT)  # which no two copies share
        for rank in range(len(case.devices.generation)):
            messages = sorted(streams.list_received(rank), key=lambda message: message.bucket)
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
        for message in streams.list_received(rank):
            senders = by_bucket.setdefault(message.bucket, {})
            senders[message.source_rank] = senders.get(message.source_rank, 0) + message.num_bytes
    stages = [
        {case.sides[0][0].mesh.get_coordinate(rank).pp_rank for rank in senders}
        for senders in by_bucket.values()
    ]
    assert sum(len(senders) > 1 for senders in stages) > 0.8 * len(stages)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_boxes_of_a_run_are_its_elements_in_order(sizes, data):
    count = math.prod(sizes)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    array = np.arange(count).reshape(sizes)
    boxes = [
        array[box(offset, part)].ravel() for offset, part in split_range(tuple(sizes), start, stop)
    ]
    assert np.concatenate([*boxes, np.empty(0, int)]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(sizes) + 1


@pytest.mark.parametrize("size", [0, 8, -16, 24])
def test_a_bucket_that_nothing_fits_into_is_refused(size):
    with pytest.raises(ConfigError, match="multiples of 16"):
        schedule(triples()[0].plan, 0, size)
