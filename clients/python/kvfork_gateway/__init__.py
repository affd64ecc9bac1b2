"""An OpenAI-compatible HTTP gateway: a client of the contract, in a process of its own (`kvfork gateway`).

Reading order: request and messages (what is asked), completions (what becomes of it), conversations (what is gone on
from), answer and completion (what is told), http, serving. Needs the `gateway` extra, and nothing of the server.
"""
