"""The wire: openpi's bytes, every refusal by its kind, and frames that nobody meant."""

import json
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cebm.serving.protocol import DTYPES, KINDS, ErrorReply, Refused, one_line, pack, unpack
from cebm.serving.requests import Limits, Reader, Session, described, specified
from cebm.spaces import Part, Specification

SPEC = Specification((Part("joints", (3,), ("a", "b", "c")), Part("image", (2, 2))), 2, history=2, horizon=4)
JOINTS, IMAGE = np.arange(3, dtype=np.float32), np.ones((2, 2), np.uint8)


def reader(**limits: Any) -> Reader:
    return Reader(SPEC, Limits(**limits), 64, 10)


def with_array(key: bytes, value: Any) -> bytes:
    """A frame with an array in which one entry is a lie, or missing."""
    good: dict[bytes, Any] = {b"__ndarray__": True, b"data": bytes(12), b"dtype": "<f4", b"shape": [3]}
    if value is ...:
        del good[key]
    else:
        good[key] = value
    return msgpack.packb({"obs": good})


def test_the_bytes_are_openpis() -> None:
    """Written by hand after openpi_client.msgpack_numpy, whose keys are byte strings and whose shape is an array."""
    expected = (
        b"\x81\xa3obs\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x08\x00\x00\x80?\x00\x00\x00@"
        b"\xc4\x05dtype\xa3<f4\xc4\x05shape\x91\x02"
    )
    assert pack({"obs": np.array([1, 2], np.float32)}) == expected
    assert unpack(expected)["obs"].tolist() == [1, 2]
    number = b"\x83\xc4\x0d__npgeneric__\xc3\xc4\x04data\x05\xc4\x05dtype\xa3<i8"
    assert pack(np.int64(5)) == number and unpack(number) == 5 and unpack(number).dtype == np.int64


@given(arrays.arrays(st.sampled_from(sorted({*DTYPES.values()}, key=str)), arrays.array_shapes(min_dims=0, min_side=0)))
@settings(max_examples=60, deadline=None)
def test_arrays_come_back_as_they_were(values: np.ndarray) -> None:
    found = unpack(pack({"a": values, "b": [1, "two", None, 3.5, b"x"]}))
    assert found["a"].dtype == values.dtype and found["a"].shape == values.shape
    assert found["a"].tobytes() == values.tobytes() and found["b"] == [1, "two", None, 3.5, b"x"]


@pytest.mark.parametrize(
    "values", [np.array([object()]), np.zeros(2, complex), np.zeros(2, "V3"), np.array(["a"]), {1}]
)
def test_what_does_not_go_over_the_wire_is_not_packed(values: Any) -> None:
    with pytest.raises(TypeError, match="does not go over the wire"):
        pack({"obs": values})


BAD_FRAMES = {
    "empty": (b"", "not-msgpack"),
    "truncated": (pack({"obs": JOINTS})[:-3], "not-msgpack"),
    "truncated in a header": (b"\x81\xa3obs\xc6\x00\x00", "not-msgpack"),
    "bytes left over": (pack({"obs": JOINTS}) + b"\x00", "not-msgpack"),
    "an extension": (msgpack.packb(msgpack.ExtType(5, b"abc")), "not-msgpack"),
    "a timestamp": (msgpack.packb(msgpack.Timestamp(1)), "not-msgpack"),
    "the byte that msgpack never uses": (b"\xc1", "not-msgpack"),
    "no UTF-8": (b"\x81\xa2\xff\xfe\x01", "not-msgpack"),
    "a list as a key": (b"\x81\x91\x01\x01", "not-msgpack"),
    "a huge list that is not there": (b"\xdd\x7f\xff\xff\xff", "not-msgpack"),
    "a huge map that is not there": (b"\xdf\x7f\xff\xff\xff", "not-msgpack"),
    "huge bytes that are not there": (b"\xc6\xff\xff\xff\xff", "not-msgpack"),
    "deep": (b"\x91" * 200 + b"\x01", "too-deep"),
    "deep maps": (b"\x81\x01" * 200 + b"\x01", "too-deep"),
    "many values": (msgpack.packb([0] * 5000), "too-many-values"),
    "many maps": (msgpack.packb([{}] * 4500), "too-many-values"),
    "object dtype": (with_array(b"dtype", "|O"), "bad-dtype"),
    "void dtype": (with_array(b"dtype", "|V4"), "bad-dtype"),
    "complex dtype": (with_array(b"dtype", "<c8"), "bad-dtype"),
    "text dtype": (with_array(b"dtype", "<U3"), "bad-dtype"),
    "long double dtype": (with_array(b"dtype", "<f16"), "bad-dtype"),
    "structured dtype": (with_array(b"dtype", "f4,f4,f4"), "bad-dtype"),
    "dtype of another type": (with_array(b"dtype", 4), "bad-dtype"),
    "unhashable dtype": (with_array(b"dtype", ["<f4"]), "bad-dtype"),
    "no dtype": (with_array(b"dtype", ...), "bad-dtype"),
    "no data": (with_array(b"data", ...), "bad-array"),
    "text for data": (with_array(b"data", "abcdefghijkl"), "bad-array"),
    "no shape": (with_array(b"shape", ...), "bad-array"),
    "too large a shape": (with_array(b"shape", [2**40]), "bad-array"),
    "an overflowing shape": (with_array(b"shape", [2**62, 4, 0]), "bad-array"),
    "a wrapping shape": (with_array(b"shape", [2**63, 2**63]), "bad-array"),
    "a negative shape": (with_array(b"shape", [-3]), "bad-array"),
    "two negative sizes": (with_array(b"shape", [-1, -3]), "bad-array"),
    "a fractional shape": (with_array(b"shape", [3.0]), "bad-array"),
    "true as a size": (with_array(b"shape", [True, 3]), "bad-array"),
    "many axes": (with_array(b"shape", [1] * 40 + [3]), "bad-array"),
    "a number that is none": (msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}), "bad-array"),
    "a number too large": (msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}), "bad-array"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_bad_frames_are_refused_by_their_kind(case: str) -> None:
    frame, kind = BAD_FRAMES[case]
    with pytest.raises(Refused) as refusal:
        unpack(frame)
    assert refusal.value.kind == kind and "\n" not in str(refusal.value) and len(str(refusal.value)) <= 300


def test_a_lying_frame_allocates_nothing() -> None:
    """Lists in lists, each of which claims the rest of the frame: msgpack alone would make room for all of them."""
    frame = b"".join(b"\xdd" + (2**20 - 5 * i - 5).to_bytes(4, "big") for i in range(200))
    frame += b"\x00" * (2**20 - len(frame))
    unpack(pack(0))
    tracemalloc.start()
    with pytest.raises(Refused):
        unpack(frame)
    ours = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ours < 100_000


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good frame in which bytes were changed, taken out, doubled or cut off."""
    wishes = {"id": 3, "seed": 5, "previous": np.zeros(8), "deadline_ms": 5.0}
    frame = bytearray(pack({"joints": JOINTS, "image": IMAGE, "cebm": wishes}))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(frame) - 1)))
        how = draw(st.sampled_from(["set", "cut", "take", "double", "put"]))
        if how == "set" and frame:
            frame[place] = draw(st.integers(0, 255))
        elif how == "cut":
            del frame[place:]
        elif how == "take":
            del frame[place : place + draw(st.integers(1, 8))]
        elif how == "double":
            frame[place:place] = frame[place : place + 20]
        else:
            frame[place:place] = draw(st.binary(max_size=8))
    return bytes(frame)


@given(st.one_of(mutated(), st.binary(max_size=64)))
@settings(max_examples=400, deadline=None)
def test_any_frame_is_a_request_or_refused(frame: bytes) -> None:
    """Nothing else is raised, and a request that comes through is a valid one."""
    try:
        request = reader().request(unpack(frame))
    except Refused as refusal:
        assert refusal.kind in KINDS
        return
    assert request.call == "reset" or (request.obs.shape[1] == SPEC.frame and np.isfinite(request.obs).all())
    assert all(values.shape == (len(request.obs), SPEC.act_dim) for values in request.known.values())
    assert request.candidates is None or 1 <= request.candidates <= 1024


GOOD = {"joints": JOINTS, "image": IMAGE}
BAD_REQUESTS = {
    "no map": ([1, 2], "bad-request"),
    "no wishes": ({**GOOD, "cebm": 5}, "bad-request"),
    "an unknown wish": ({**GOOD, "cebm": {"speed": 1}}, "bad-request"),
    "an array for a call": ({**GOOD, "cebm": {"call": np.zeros(3)}}, "bad-request"),
    "many rows of large effort": ({"obs": np.zeros((200, 7)), "cebm": {"steps": 20}}, "too-much-effort"),
    "an unknown call": ({**GOOD, "cebm": {"call": "eval"}}, "bad-request"),
    "a negative seed": ({**GOOD, "cebm": {"seed": -1}}, "bad-request"),
    "a seed that is true": ({**GOOD, "cebm": {"seed": True}}, "bad-request"),
    "no candidates": ({**GOOD, "cebm": {"candidates": 0}}, "bad-request"),
    "too many candidates": ({**GOOD, "cebm": {"candidates": 1025}}, "too-much-effort"),
    "too many steps": ({**GOOD, "cebm": {"steps": 161}}, "too-much-effort"),
    "no time": ({**GOOD, "cebm": {"deadline_ms": 0}}, "bad-request"),
    "a deadline of NaN": ({**GOOD, "cebm": {"deadline_ms": float("nan")}}, "bad-request"),
    "candidates and a budget": ({**GOOD, "cebm": {"candidates": 2, "budget_ms": 5}}, "bad-request"),
    "more played than there are": ({**GOOD, "cebm": {"played": 5}}, "bad-request"),
    "a last action of another size": ({**GOOD, "cebm": {"previous": np.zeros(2)}}, "bad-request"),
    "a chunk for the action played last": ({**GOOD, "cebm": {"last": np.zeros(8)}}, "bad-request"),
    "a plan of one action": ({**GOOD, "cebm": {"plan": np.zeros(2)}}, "bad-request"),
    "a plan beside what was played": ({**GOOD, "cebm": {"plan": np.zeros(8), "played": 1}}, "bad-request"),
    "a last action that is not finite": ({**GOOD, "cebm": {"previous": np.full(8, np.inf)}}, "not-finite"),
    "too long a history": ({**GOOD, "cebm": {"history": np.zeros((2, 1, 7))}}, "bad-request"),
    "a history of another size": ({**GOOD, "cebm": {"history": np.zeros((1, 1, 6))}}, "bad-request"),
    "nothing": ({}, "bad-observation"),
    "a missing part": ({"joints": JOINTS}, "bad-observation"),
    "an unknown part": ({**GOOD, "prompt": "go"}, "bad-observation"),
    "a part that is no text": ({**GOOD, 5: 1}, "bad-observation"),
    "text for numbers": ({**GOOD, "joints": "abc"}, "bad-observation"),
    "ragged lists": ({**GOOD, "joints": [[1], [1, 2]]}, "bad-observation"),
    "a part of another shape": ({**GOOD, "image": np.ones(4)}, "bad-observation"),
    "parts of different batches": ({"joints": np.ones((2, 3)), "image": np.ones((3, 2, 2))}, "bad-observation"),
    "columns that fit nothing": ({"obs": np.zeros(8)}, "bad-observation"),
    "one number": ({"obs": 1.0}, "bad-observation"),
    "too many rows": ({"obs": np.zeros((257, 7))}, "too-much-effort"),
    "no rows": ({"obs": np.zeros((0, 7))}, "too-much-effort"),
    "NaN": ({**GOOD, "joints": np.full(3, np.nan)}, "not-finite"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_bad_requests_are_refused_by_their_kind(case: str) -> None:
    values, kind = BAD_REQUESTS[case]
    with pytest.raises(Refused) as refusal:
        reader().request(values)
    assert refusal.value.kind == kind


def test_observations_by_part_and_flat_are_the_same() -> None:
    flat = np.concatenate([JOINTS, IMAGE.ravel()])
    for values, single in (
        (GOOD, True),
        ({"joints": JOINTS.tolist(), "image": IMAGE.tolist()}, True),
        ({"obs": flat}, True),
        ({"joints": JOINTS[None], "image": IMAGE[None]}, False),
        ({"obs": flat[None]}, False),
    ):
        request = reader().request(values)
        assert np.array_equal(request.obs, flat[None]) and request.single == single and not request.whole
    assert reader().request({"obs": np.zeros((3, 14))}).whole


def test_a_session_remembers_like_a_runner() -> None:
    """Frames 1, 2, 3 give (1, 1), (1, 2), (2, 3); a refused request leaves no trace; a given history replaces it."""
    session, read = Session(SPEC, 0), reader()

    def asked(value: float, **wishes: Any) -> list[float]:
        request = read.request({"obs": np.full(7, value), "cebm": wishes})
        inputs = session.inputs(request)
        session.answered(request, np.arange(8.0)[None])
        return inputs[0, [0, 7]].tolist()

    assert asked(1) == [1, 1] and asked(2) == [1, 2]
    refused = read.request({"obs": np.full((2, 7), 9.0)})
    with pytest.raises(Refused, match="reset first"):
        session.inputs(refused)
    session.inputs(read.request({"obs": np.full(7, 9.0)}))  # never answered
    assert asked(3) == [2, 3] and asked(5, history=np.full((1, 1, 7), 4.0)) == [4, 5]
    played = read.request({"obs": np.zeros(7), "cebm": {"played": 3}})
    rest = [[6, 7, 6, 7, 6, 7, 6, 7]]
    assert {name: values.tolist() for name, values in session.known(played, ("previous",)).items()} == {
        "previous": rest
    }
    told = session.known(played, ("last", "plan"))
    assert {name: values.tolist() for name, values in told.items()} == {"plan": rest, "last": [[4, 5]]}
    session.forget()
    assert asked(6) == [6, 6]


def test_a_specification_crosses_the_wire_in_plain_words() -> None:
    assert specified(unpack(pack(described(SPEC)))) == SPEC
    for wrong in (None, {}, {**described(SPEC), "parts": 5}, {**described(SPEC), "action": 0}):
        with pytest.raises(ValueError, match=r"no specification|at least 1"):
            specified(wrong)


def test_the_sessions_seed_decides_its_numbers() -> None:
    request = reader().request(GOOD)
    one, same, other = (Session(SPEC, seed) for seed in (1, 1, 2))
    first = [one.seed(request) for _ in range(3)]
    assert first == [same.seed(request) for _ in range(3)] and len({*first}) == 3 and other.seed(request) != first[0]
    one.reset(1)
    assert one.seed(request) == first[0]
    assert one.seed(reader().request({**GOOD, "cebm": {"seed": 7}})) == 7
    assert one.seed(reader().request({**GOOD, "cebm": {"seed": None}})) == 0
    assert one.seed(reader().request({"obs": np.zeros((2, 7)), "cebm": {"seed": None}})) is None


def test_error_frames_are_one_line() -> None:
    reply = ErrorReply("busy", one_line("a\nb\tc\x00d" + "x" * 1000), "ab12", 4)
    text = reply.text()
    assert "\n" not in text and len(text) < 400 and ErrorReply.of_text(text) == reply
    assert json.loads(text)["error"] == "busy" and reply.message.startswith("a b c d")
    assert (
        ErrorReply.of_text("Traceback (most recent call last):\n  boom").message
        == "Traceback (most recent call last): boom"
    )
    with pytest.raises(ValueError, match="kind must be one of"):
        Refused("surprise", "")
