"""The kvfork server. From bytes on a socket to tokens on a stream:

    rpc ─► core (generations, derivations, directory) ─► loop ─► steps ─► engine
                      │                                    │
                      └── kvcache: names, plans ───────────┴── kvcache: state

Reading order: request, events, work, plan (the nouns); scheduler, steps, orders, sequence, recorder, opening, keeping,
ends, loop (the engine thread); resolve, runtime, generations, derivations, watching (the event loop); facts, metering,
totals, tracing, calls, metrics (what is shown of it); app (who builds what).
Threads: the event loop owns calls and names, the engine thread owns scheduler, engine and every MLX object, the store's
I/O thread owns files.
"""
