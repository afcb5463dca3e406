"""Whatever passes between two layers travels as one tensor of rows, and comes out as it was."""

from dataclasses import replace

import pytest
import torch

from oobleck.core.instructions import Share
from oobleck.core.job.description import ITEM_BYTES, TensorSketch, TreeSketch
from oobleck.worker.models.tree import flatten, map_tensors, structure
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.step.mailbox import Packing, Wire, wire

CPU = torch.device("cpu")
ROWS = 5


def values(sketch, rows=ROWS, seed=0):
    source = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (rows, *sketch.shape), generator=source)
    dtype = getattr(torch, sketch.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(rows, *sketch.shape, generator=source).to(dtype)
    return bits.to(dtype)


def tensor(dtype="float32", *shape, gradient=False):
    return TensorSketch(shape=shape, dtype=dtype, gradient=gradient)


HIDDEN = tensor("float32", 3, 2, gradient=True)
#: One of each type, none of a size that is a multiple of the alignment.
ALL = [tensor(dtype, 3) for dtype in ITEM_BYTES]
PACKINGS = {
    "nothing": [],
    "one": [HIDDEN],
    "ints": [tensor("int64", 3)],
    "no numbers": [tensor("float32", 0)],
    "a number per row": [tensor("float64")],
    "two": [tensor("bool"), HIDDEN],
    "some are empty": [tensor("int8", 2, 0), tensor("int16", 7), tensor("float32", 0), HIDDEN],
    "all types": ALL,
    "all types backwards": ALL[::-1],
}


@pytest.mark.parametrize("sketches", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("rows", [0, 1, ROWS])
def test_tensors_come_out_as_they_went_in(sketches, rows):
    packing = Packing(sketches)
    given = [values(one, rows, seed) for seed, one in enumerate(sketches)]
    packed = packing.pack(given, rows, CPU)
    assert packed.shape == (rows, *packing.shape)
    assert packed.dtype == packing.dtype
    assert packed.is_contiguous()
    assert packing.row_bytes > 0, "a message is never empty"
    assert packed.nbytes == rows * packing.row_bytes
    for one, other in zip(given, packing.unpack(packed), strict=True):
        assert other.shape == one.shape
        assert other.dtype == one.dtype
        assert other.is_contiguous()
        assert torch.equal(one, other)


@pytest.mark.parametrize("sketches", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (7, 3)])
def test_rows_can_be_cut_anew_on_the_way(sketches, before, after):
    """From `before` workers to `after`, some of which may have no row."""
    packing = Packing(sketches)
    given = [values(one, ROWS, seed) for seed, one in enumerate(sketches)]
    packed = [
        packing.pack([one[rows.start : rows.stop] for one in given], len(rows), CPU)
        for rows in (Share(part, part + 1, before).of_rows(ROWS) for part in range(before))
    ]
    sent = torch.cat(packed)
    for part in range(after):
        rows = Share(part, part + 1, after).of_rows(ROWS)
        found = packing.unpack(sent[rows.start : rows.stop].contiguous())
        for one, other in zip(given, found, strict=True):
            assert torch.equal(one[rows.start : rows.stop], other)


def test_one_float_tensor_is_not_copied():
    packing = Packing([HIDDEN])
    given = values(HIDDEN)
    assert packing.pack([given], ROWS, CPU) is given
    assert packing.unpack(given) == [given]
    assert (packing.shape, packing.dtype) == ((3, 2), torch.float32)


@pytest.mark.parametrize("sketches", [[HIDDEN], [HIDDEN, HIDDEN]])
def test_a_missing_one_is_zeros(sketches):
    packing = Packing(sketches)
    packed = packing.pack([*[values(HIDDEN)] * (len(sketches) - 1), None], ROWS, CPU)
    found = packing.unpack(packed)[-1]
    assert torch.equal(found, torch.zeros(ROWS, 3, 2))


def test_packed_tensors_can_be_any_views():
    packing = Packing([HIDDEN, HIDDEN])
    given = values(HIDDEN).transpose(0, 1).contiguous().transpose(0, 1)
    assert not given.is_contiguous()
    one, other = packing.unpack(packing.pack([given, given[:1].expand(ROWS, 3, 2)], ROWS, CPU))
    assert torch.equal(one, given)
    assert torch.equal(other, given[:1].expand(ROWS, 3, 2))


def test_nothing_of_the_memory_before_is_sent():
    sketches = [tensor("int8", 3), tensor("int8", 5)]
    packing = Packing(sketches)
    ones = [torch.ones(ROWS, *one.shape, dtype=torch.int8) for one in sketches]
    for _ in range(20):
        torch.full((ROWS, *packing.shape), 255, dtype=torch.uint8)
        assert packing.pack(ones, ROWS, CPU).sum() == ROWS * 8


MIXED = TreeSketch(
    tensors=(tensor("bool", 4), HIDDEN, tensor("float32", gradient=True), tensor("float32", 2)),
    structure='{"mask":null,"x":["tuple",null,["list",null,null]]}',
)


def mixed(rows=ROWS):
    mask, x, y, z = (values(one, rows, seed) for seed, one in enumerate(MIXED.tensors))
    return {"mask": mask, "x": (x, [y, z])}


def test_a_tree_travels_and_the_gradients_of_those_that_have_one():
    between = Wire(MIXED)
    given = mixed()
    packed = between.pack(map_tensors(lambda one: one.clone(), given), ROWS, CPU)
    assert not packed.requires_grad
    found = between.unpack(packed)
    assert structure(found) == MIXED.structure
    assert all(map(torch.equal, flatten(given), flatten(found)))
    assert between.gradients.tensors == MIXED.tensors[1:3]

    cut, leaves = between.cut(found)
    assert [one.requires_grad for one in flatten(cut)] == [False, True, True, False]
    assert all(one is other for one, other in zip(leaves, flatten(cut)[1:3], strict=True))
    assert all(map(torch.equal, flatten(given), flatten(cut)))
    assert not any(one.requires_grad for one in flatten(found))
    same = between.with_gradient(cut)
    assert all(one is other for one, other in zip(leaves, same, strict=True))


def test_cutting_leaves_what_made_a_tree_alone():
    weight = torch.ones(2, requires_grad=True)
    x = weight * values(HIDDEN)
    cut, (leaf,) = Wire(TreeSketch(tensors=(HIDDEN,), structure='["tuple",null]')).cut((x,))
    assert isinstance(cut, tuple)
    leaf.sum().backward()
    assert weight.grad is None
    assert torch.equal(leaf.grad, torch.ones(ROWS, 3, 2))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tree: {**tree, "mask": tree["mask"].long()}, "gives torch.int64"),
        (lambda tree: {**tree, "mask": tree["mask"][:, :3]}, r"gives torch.bool \(5, 3\)"),
        (lambda tree: map_tensors(lambda one: one[:4], tree), r"\(4, 4\).*\(5, 4\)"),
        (lambda tree: {**tree, "x": list(tree["x"])}, r'\["list"'),
        (lambda tree: (tree,), r'gives \["tuple"'),
        (lambda tree: {**tree, "mask": 1}, r"layer 3 gives an int at \['mask'\]"),
        (lambda tree: tree["mask"], "gives null"),
    ],
)
def test_what_a_layer_was_not_described_with_is_refused(change, why):
    with pytest.raises(JobError, match=why):
        Wire(MIXED, "layer 3").pack(change(mixed()), ROWS, CPU)


def test_the_built_in_models_send_what_they_make(make_job):
    for precision, dtype in (
        ("fp64", torch.float64),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
    ):
        job = make_job(precision=precision)
        for boundary in range(4):
            between = wire(job, boundary)
            for packing in (between.values, between.gradients):
                assert packing.plain
                assert packing.shape == (8, 16)
                assert packing.dtype == dtype


def test_a_sketch_without_gradients_sends_something_back():
    """Programs have the message anyway."""
    sketches = tuple(replace(one, gradient=False) for one in ALL)
    text = '["tuple"' + ",null" * len(ALL) + "]"
    between = Wire(TreeSketch(tensors=sketches, structure=text))
    packed = between.gradients.pack([], ROWS, CPU)
    assert packed.numel() > 0
    assert between.gradients.unpack(packed) == []
