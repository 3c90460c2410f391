"""Malformed replies of a site: the server refuses them, and says whose they are."""

import re
from collections import Counter

import numpy as np
import pytest
from flwr.app import Message

from tests.support.peers.faulty_runs import place, plain, same_noise
from tests.support.peers.fuzzing import Fuzzer
from tp_flower.protocol.messages import action_named

__all__ = ["place", "plain", "same_noise"]
US = 3


class Tampering:
    """Change one site's first reply to an action."""

    def __init__(self, fuzzer: Fuzzer, action: str) -> None:
        self._fuzzer = fuzzer
        self._action = action
        self.what = ""

    def __call__(self, message: Message, reply: Message) -> Message:
        metadata = message.metadata
        is_it = (metadata.message_type, metadata.dst_node_id) == (self._action, US)
        if self.what or not is_it:
            return reply
        kind = action_named(self._action).reply
        self.what, content = next(self._fuzzer.mutants(reply.content, kind))
        return Message(content, reply_to=message)


@pytest.mark.cases("2-gram")
@pytest.mark.parametrize("name", ["gram", "sgd-sharded"])
@pytest.mark.parametrize("mutants", [2, 4])
def test_malformed_replies_are_refused_in_the_name_of_the_site(
    plain, place, name, mutants
):
    _, expected = plain(name)
    fuzzer = Fuzzer(np.random.default_rng(7), place)
    refused = Counter()
    asked = [action for action, node in dict.fromkeys(expected.asked) if node == US]
    for action in asked * mutants:
        federation, _ = plain(name)
        tampering = Tampering(fuzzer, action)
        ended = federation.train(tamper=tampering)
        assert tampering.what
        if ended.error is not None:
            refused[action] += 1
            text = str(ended.error)
            assert re.search(r"site 'us'|'us' \(table|node 3", text), (action, text)
    assert refused.keys() == {*asked}
    assert refused.total() >= len(asked) * mutants // 2
