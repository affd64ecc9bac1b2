"""The inspector: a page over HTTP to look at snapshots and use them. A client of the gRPC contract and no more.

    browser ─► http (bounds, TLS) ─► guard (whose page is it) ─► site ─► gateway ─► gRPC, with the caller's token

What the page may see and do is therefore what its caller's token lets any client see and do: owners, limits, errors and
metrics are the door's. Nothing here imports the core, and nothing but `service.app` imports this.
"""
