"""Bodies of requests that prepare a site."""

import msgspec
import numpy as np

from tp_flower.protocol.codec import decode
from tp_flower.protocol.packet import Packet
from tp_flower.protocol.training_messages import PrepareRequest, PrivacyTerms
from tp_flower.settings import PrivacySettings

CLEAR = msgspec.to_builtins(PrivacyTerms.of(PrivacySettings()))


OUTLINE = {"strategy": "vfl-sgd", "epochs": 1}


PART = {
    "id": 0,
    "encoder": {},
    "model": {},
    "update": "local",
    "l2": 0.0,
    "device": "cpu",
    "label-scale": 1.0,
    "mean-multiplicity": 1.0,
}


def body(joined_rows, arrays, **facts):
    """A part of a request with these arrays, as a site decodes it."""
    part = {**PART, "joined-rows": joined_rows, **facts}
    header = {"privacy": CLEAR, "outline": OUTLINE, "parts": [part]}
    named = {(0, name): np.asarray(values) for name, values in arrays.items()}
    return decode(PrepareRequest, Packet(header, named)).parts[0]
