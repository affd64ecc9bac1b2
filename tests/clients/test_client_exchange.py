"""Imports, exports and copies as the client makes them, and what becomes of an import that ends otherwise than well."""

from __future__ import annotations

import pytest
from contract_peer import Peer
from flavours import Flavour
from kvfork_client import Client, SaveOptions

DATA = [b"snapshots/plan-0001\n", b"abc"]


def test_options_that_make_no_message_are_refused_before_anything_is_sent(peer: Peer, flavour: Flavour) -> None:
    client = flavour.client(peer.address)
    with pytest.raises(ValueError, match="finite"):
        flavour.do(client.import_snapshot, DATA, options=SaveOptions(ttl=float("nan")))
    assert peer.seen == []
    assert flavour.do(client.import_snapshot, DATA).snapshot.name == "snapshots/plan-0001"


def test_a_closed_client_takes_no_import_as_it_takes_no_other_call(peer: Peer) -> None:
    client = Client(peer.address)
    client.close()
    for call in (client.check_import, lambda manifest: client.import_snapshot([manifest])):
        with pytest.raises(ValueError, match="Cannot invoke RPC"):
            call(b"snapshots/plan-0001")
