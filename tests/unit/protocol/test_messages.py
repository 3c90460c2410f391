"""The contract between the sides: what is declared travels, and nothing else does."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.files import output_of
from tests.support.peers import message_values
from tp_flower.errors import ErrorKind, MessageError, RangeError
from tp_flower.methods.admm.messages import AdmmReply, AdmmRequest, AdmmStep
from tp_flower.methods.coreset.messages import DrawPart, DrawRequest
from tp_flower.protocol import codec, training_messages
from tp_flower.protocol.codec import (
    add_envelope,
    check_sizes,
    decode,
    decode_reply,
    encode,
    is_failure,
    read_envelope,
)
from tp_flower.protocol.fields import Request, field_bytes, layout_of
from tp_flower.protocol.inference_messages import ScorePart
from tp_flower.protocol.messages import (
    ACTIONS,
    Failure,
    ReplyEnvelope,
    RequestEnvelope,
)
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.protocol.setup_messages import (
    DescribeRequest,
    ExtractedPart,
    ShardStatistics,
    StatisticsOfPart,
)

ENVELOPES = (RequestEnvelope, ReplyEnvelope)
each_message = pytest.mark.parametrize(
    "kind", message_values.MESSAGES, ids=lambda k: k.__name__
)
IMPORTS = """
import time
import flwr.app, msgspec, numpy, numpy.typing
started = time.process_time()
import tp_flower.protocol.messages
print(time.process_time() - started)
"""


def refused(match):
    """Expect a message to be refused, with such a text."""
    return pytest.raises(MessageError, match=match)


def test_every_action_has_a_request_and_a_reply_of_its_own():
    assert len(set(message_values.MESSAGES)) == 2 * len(ACTIONS)
    declared = {
        kind
        for kind in Request.__subclasses__()
        if kind.__module__.startswith("tp_flower.")
    }
    unsent = declared - set(message_values.MESSAGES)
    assert not unsent, "declare an action with them"


@each_message
def test_every_field_is_disclosed_or_of_the_schedule(kind):
    names = set(layout_of(kind).values.values())
    if layout_of(kind).part is not None:
        part = layout_of(layout_of(kind).part)
        arrays = (*part.arrays.values(), *part.families.values())
        names |= {*part.values.values(), *(field for field, _ in arrays)}
    disclosed = {field for group in kind.discloses for field in group.fields}
    missing = names - disclosed - set(kind.schedule)
    assert not missing, "name them in the fields of a Discloses, or in the schedule"
    assert disclosed | set(kind.schedule) == names
    assert not disclosed & set(kind.schedule)
    assert len(set(kind.schedule)) == len(kind.schedule)
    for group in kind.discloses:
        assert group.carries
        assert len(set(group.fields)) == len(group.fields)


@each_message
def test_arrays_are_of_parts_and_no_name_is_the_envelopes(kind):
    layout = layout_of(kind)
    assert not layout.arrays
    assert not layout.families
    taken = {field for envelope in ENVELOPES for field in layout_of(envelope).values}
    assert not layout.values.keys() & {*taken, message_values.PARTS}
    if layout.part is not None:
        part = layout_of(layout.part)
        assert "id" not in part.values
        assert not any("/" in name for name in (*part.arrays, *part.families))


def same(one: Packet, other: Packet) -> bool:
    """Whether two packets are the same, their arrays bit by bit."""
    bits, other_bits = (
        {key: (a.dtype, a.shape, a.tobytes()) for key, a in packet.arrays.items()}
        for packet in (one, other)
    )
    return one.header == other.header and bits == other_bits


@each_message
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_messages_round_trip(kind, data):
    packet = encode(data.draw(message_values.messages(kind)))
    # of a decoded message the packet is the same again
    assert same(encode(decode(kind, unpack(pack(packet)))), packet)


def refusal(read, *arguments) -> str:
    """Why something cannot be read; nothing where it can."""
    try:
        read(*arguments)
    except MessageError as error:
        return str(error)
    return ""


@each_message
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_not_declared_is_refused(kind, data):
    message = data.draw(message_values.messages(kind))
    for wrong in message_values.malformed(kind, message):
        error = refusal(decode, kind, wrong.packet)
        assert error, wrong.what
        assert wrong.field in error, wrong.what


def read(kind, values):
    packet = Packet(values)
    return decode(kind, packet) if kind is Failure else read_envelope(kind, packet)


@pytest.mark.parametrize("kind", [*ENVELOPES, Failure], ids=lambda k: k.__name__)
def test_envelopes_and_failures_are_checked_as_messages_are(kind):
    good = {
        "run": "0f" * 16,
        "round": 3,
        "seconds": 0.5,
        "error": "no",
        "kind": "refused",
        "part": 3,
    }
    values = {name: good[name] for name in layout_of(kind).values if name in good}
    assert msgspec.to_builtins(read(kind, values)).items() >= values.items()
    wrong = [{**values, message_values.EXTRA: 1}] if kind is Failure else []
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        others = message_values.wrong_values(field.type, values.get(name))
        wrong += [{**values, name: value} for value in others]
        if field.required:
            wrong.append({key: values[key] for key in values if key != name})
    assert len(wrong) > 10
    for malformed_values in wrong:
        assert refusal(read, kind, malformed_values), malformed_values


def test_a_message_and_its_envelope_travel_together():
    for message, envelope in (
        (admm(), RequestEnvelope(run="0f" * 16, round=3, after=2)),
        (Failure(error="no", kind=ErrorKind.BEHIND), ReplyEnvelope(round=3, at=1)),
    ):
        packet = unpack(pack(add_envelope(encode(message), envelope)))
        assert same(encode(decode(type(message), packet)), encode(message))
        assert read_envelope(type(envelope), packet) == envelope
    with refused("'round' is -1; allowed: `int`"):
        add_envelope(encode(admm()), ReplyEnvelope(round=-1))


def test_a_failure_stands_in_place_of_a_reply():
    failure = Failure(error="no", kind=ErrorKind.REFUSED, part=4)
    assert decode_reply(AdmmReply, encode(failure)) == failure
    assert is_failure(encode(failure))
    with refused("it has arrays, but none are declared"):
        decode_reply(AdmmReply, Packet(encode(failure).header, {(0, "x"): STEP}))


FIT = {
    "kappa": 1.0,
    "rho_in": {},
    "epoch": 1,
    "seed": 0,
    "local_epochs": 0,
    "learning_rate": 0.0,
}
STEP = np.zeros((3, 2), np.float32)


def admm(step=STEP, fit=None, **facts):
    fit = training_messages.LocalFit(**{**FIT, **(fit or {})})
    parts = {4: AdmmStep(step)}
    facts = {"evaluate": False, "scores_number": 1, **facts}
    return AdmmRequest(fit=fit, parts=parts, **facts)


def draw(**facts):
    return DrawRequest({4: DrawPart(**{"count": 1, "scale": 1.0, **facts})})


def categories(hashes, counts):
    return ShardStatistics(
        {
            4: StatisticsOfPart(
                statistics=[], category_hashes=hashes, category_counts=counts
            )
        }
    )


@pytest.fixture
def unchecked(monkeypatch):
    """Make the packet of a message as one would who does not check it."""

    def packet_of(message):
        with monkeypatch.context() as patched:
            patched.setattr(codec, "decode", lambda *_: None)
            return encode(message)

    return packet_of


COUNTS = np.ones(3, np.int64)
HASHES = np.zeros((3, 2), np.uint64)
WRONG = [
    (admm(scores_number=-1), "'scores-number' is -1; allowed: `int` >= 0"),
    (admm(evaluate="yes"), "'evaluate' is 'yes'; allowed: `bool`"),
    (admm(fit={"kappa": 0.0}), "'fit' is {.*; allowed: .*> 0.0 - at `\\$.fit.kappa`"),
    (draw(scale=1.5), "'scale' is 1.5; allowed: `float` <= 1.0"),
    (draw(count=1.0), "'count' is 1.0; allowed: `int`"),
    (admm(STEP.astype(float)), r"'step' is float64 of shape \(3, 2\); allowed"),
    (admm(STEP[0]), r"'step' .* \(2,\); allowed: float32 of shape trained x "),
    (admm(STEP + np.float32(1e31)), r"'step' has numbers .* -1e\+30 to 1e\+30"),
    (admm(STEP * np.float32(np.nan)), "'step' has numbers that are not finite"),
    (
        categories({"0": HASHES[:2]}, {"0": COUNTS}),
        r"'category-counts/0' is int64 of shape \(3,\); allowed: int64 of shape 2 ",
    ),
    (draw(gram=np.zeros((2, 3))), r"'gram' .* \(2, 3\); allowed: .* 2 \(columns\) x 2"),
]


@pytest.mark.parametrize(("message", "words"), WRONG)
def test_both_sides_refuse_alike_and_say_what_is_allowed(message, words, unchecked):
    packet = unchecked(message)
    with refused(words) as sending:
        encode(message)
    with refused(words) as reading:
        decode(type(message), packet)
    assert str(sending.value) == str(reading.value)
    is_range = "has numbers" in words
    assert isinstance(sending.value, RangeError) == is_range
    assert isinstance(reading.value, RangeError) == is_range
    is_of_part = not any(name in words for name in ("scores-number", "evaluate", "fit"))
    assert sending.value.part == reading.value.part == (4 if is_of_part else None)


@pytest.mark.parametrize("names", [("{}", "{}/0"), ("{}/0", "{}"), ("{}",)])
def test_an_array_beside_its_family_or_where_none_is_declared_is_refused(names):
    with refused("it has arrays, but none are declared"):
        decode(DescribeRequest, Packet({}, {(0, "x"): COUNTS}))
    good = encode(categories({}, {}))
    family = "category-counts"
    arrays = {(4, name.format(family)): COUNTS for name in names}
    with refused(f"it has array '{family}', which is not decl"):
        decode(ShardStatistics, Packet(good.header, arrays))


def test_sizes_that_the_reader_knows_are_compared():
    body = AdmmStep(STEP)
    check_sizes(body, trained=3)
    check_sizes(body, trained=3, outputs=2, scored=9)
    with refused(r"\(3, 2\); allowed: .* 4 \(trained\) x"):
        check_sizes(body, trained=4)
    # a mask has a bit for every row
    part = ScorePart(model_part=0, digest="0" * 64, rows=np.zeros(2, np.uint8))
    for rows in (9, 16):
        check_sizes(part, rows=rows)
    for rows in (0, 8, 17):
        with refused(r"'rows' is uint8 of shape \(2,\)"):
            check_sizes(part, rows=rows)


def test_members_of_a_family_have_sizes_of_their_own():
    message = categories({"0": HASHES[:2], "1": HASHES}, {"0": COUNTS[:2], "1": COUNTS})
    received = decode(ShardStatistics, encode(message)).parts[4].category_hashes
    assert {key: len(array) for key, array in received.items()} == {"0": 2, "1": 3}


def test_bytes_of_an_array():
    sizes = {"trained": 9, "outputs": 2, "rows": 9}
    assert field_bytes(AdmmStep, "step", sizes) == 72
    assert field_bytes(ScorePart, "rows", sizes) == 2
    assert field_bytes(ExtractedPart, "row_hashes", sizes) == 144
    with pytest.raises(KeyError, match="trained"):
        field_bytes(AdmmStep, "step", {})


def test_the_declarations_take_no_time_to_import():
    # a third of this is needed: the bound is for slow machines
    assert min(float(output_of(IMPORTS)) for _ in range(5)) < 0.1
