"""Tests of the draw store: whatever is offered in whatever pieces, it holds every stride-th transition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knowable as kn
from knowable.core.chains.draw_store import DrawStore, rows_within

CHAINS, DIMENSION = 2, 3
EACH = CHAINS * DIMENSION * 4  # bytes of one draw of all chains in float32


def transitions(count: int) -> torch.Tensor:
    """Positions that say which transition, chain and coordinate they are."""
    return (torch.arange(float(count * CHAINS * DIMENSION)) + 0.1).reshape(count, CHAINS, DIMENSION)  # no byte is zero


def store(*, rows: int | None = None, **settings) -> DrawStore:
    """A store of float32 draws with room for that many."""
    return DrawStore(
        CHAINS, DIMENSION, dtype=torch.float32, max_bytes=None if rows is None else rows * EACH, **settings
    )


def stride_for(count: int, rows: int | None) -> int:
    """The slow obvious rule: the least power of two at which all that is kept fits."""
    stride = 1
    while rows is not None and -(-count // stride) > rows:
        stride *= 2
    return stride


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.integers(0, 70), max_size=8),
    rows=st.one_of(st.none(), st.integers(8, 80)),
)
def test_any_sequence_of_pieces_leaves_every_stride_th_transition(pieces, rows):
    offered = transitions(sum(pieces))
    found = store(rows=rows)
    for piece in offered.split(pieces) if pieces else ():
        found.add(piece)
    assert found.seen == len(offered)
    assert found.stride == stride_for(len(offered), rows)
    assert torch.equal(found.draws, offered[:: found.stride])


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 300), more=st.integers(0, 300), rows=st.one_of(st.none(), st.integers(8, 80)))
def test_a_restored_store_goes_on_as_the_one_that_was_saved(count, more, rows):
    offered = transitions(count + more)
    whole, first, second = store(rows=rows), store(rows=rows), store(rows=rows)
    whole.add(offered)
    first.add(offered[:count])
    second.restore(first.draws.clone(), first.seen, first.stride)
    second.add(offered[count:])
    assert (second.seen, second.stride) == (whole.seen, whole.stride)
    assert torch.equal(second.draws, whole.draws)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 200), block=st.integers(1, 200), part=st.integers(0, 200), rows=st.integers(8, 40))
def test_going_back_and_offering_the_same_again_ends_as_if_nothing_had_happened(count, block, part, rows):
    offered = transitions(count + block)
    whole, found = store(rows=rows), store(rows=rows)
    whole.add(offered)
    found.add(offered[:count])
    found.add(offered[count : count + min(part, block)])  # interrupted somewhere in the block, halved or not
    found.back_to(count)
    assert torch.equal(found.draws, offered[:count:][:: found.stride])
    found.add(offered[count:])
    assert (found.seen, found.stride) == (whole.seen, whole.stride)
    assert torch.equal(found.draws, whole.draws)


def test_draws_are_kept_in_the_dtype_asked_for():
    found = DrawStore(CHAINS, DIMENSION, dtype=torch.bfloat16)
    found.add(transitions(5) / 7)
    assert found.draws.dtype == torch.bfloat16
    assert torch.equal(found.draws, (transitions(5) / 7).bfloat16())


def test_chain_by_chain_the_draws_are_the_same():
    found = store()
    found.add(transitions(100))
    assert found.by_chain().is_contiguous()
    assert torch.equal(found.by_chain(), transitions(100).transpose(0, 1))


@pytest.mark.parametrize("count", [1, 2, 7, 30])
@pytest.mark.parametrize("chains", [1, 2, 5])
def test_long_draws_change_places_in_the_memory_they_are_in(count, chains):
    draws = torch.randn(count, chains, 1024)
    found = DrawStore(chains, 1024, dtype=torch.float32, expected=count)
    found.add(draws)
    before = found.draws.data_ptr()
    ordered = found.by_chain()
    assert torch.equal(ordered, draws.transpose(0, 1))
    assert ordered.data_ptr() == before and ordered.is_contiguous()


def test_room_for_what_is_expected_is_made_once():
    found = DrawStore(CHAINS, DIMENSION, dtype=torch.float32, expected=500)
    before = found._data.data_ptr()
    found.add(transitions(500))
    assert found.draws.data_ptr() == before
    found.add(transitions(501)[500:])  # more than expected is no harm
    assert torch.equal(found.draws, transitions(501))


# --- in a file -----------------------------------------------------------------------------------------------


def test_draws_in_a_file_are_the_draws(tmp_path):
    found, file = store(file=tmp_path / "deep" / "draws.bin"), tmp_path / "deep" / "draws.bin"
    for piece in transitions(300).split(70):
        found.add(piece)
    assert torch.equal(found.draws, transitions(300))
    assert torch.equal(_content(file)[: 300 * EACH // 4], transitions(300).flatten())


def test_draws_in_a_file_chain_by_chain_are_on_disk_and_nowhere_else(tmp_path):
    file = tmp_path / "draws.bin"
    found = store(file=file)
    found.add(transitions(130))
    ordered = found.by_chain()
    assert torch.equal(ordered, transitions(130).transpose(0, 1))
    assert [each.name for each in tmp_path.iterdir()] == ["draws.bin"]
    assert torch.equal(_content(file), ordered.flatten())
    ordered[0, 0, 0] = -1.0  # the tensor's memory is the file
    assert _content(file)[0] == -1.0


def test_a_second_run_with_the_same_file_leaves_the_draws_of_the_first_alone(tmp_path):
    first = store(file=tmp_path / "draws.bin")
    first.add(transitions(20))
    kept = first.by_chain()
    second = store(file=tmp_path / "draws.bin")
    second.add(-transitions(40))
    assert torch.equal(kept, transitions(20).transpose(0, 1))
    assert torch.equal(second.by_chain(), -transitions(40).transpose(0, 1))


def test_a_restored_store_in_a_file_goes_on(tmp_path):
    first, second = store(file=tmp_path / "a"), store(file=tmp_path / "b")
    first.add(transitions(100)[:30])
    second.restore(first.draws.clone(), first.seen, first.stride)
    second.add(transitions(100)[30:])
    assert torch.equal(second.draws, transitions(100))


def test_a_folder_as_file_is_refused(tmp_path):
    with pytest.raises(kn.InvalidArgument, match="file must be the name of a file"):
        store(file=tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(kn.InvalidArgument, match=r"file=.* cannot be written"):
        store(file=tmp_path / "file" / "draws")


# --- memory ----------------------------------------------------------------------------------------------------------


def test_draws_never_take_more_than_the_memory_allowed():
    found = store(rows=20)
    for piece in transitions(500).split(7):
        found.add(piece)
        assert found._data.numel() * found._data.element_size() <= 20 * EACH


def test_memory_for_hardly_any_draws_is_refused():
    with pytest.raises(kn.InvalidArgument, match="holds fewer than 8 draws of 2 chains"):
        store(rows=7)
    assert rows_within(8 * EACH, CHAINS, DIMENSION, torch.float32) == 8
    assert rows_within(None, CHAINS, DIMENSION, torch.float32) is None


def _content(file) -> torch.Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)
