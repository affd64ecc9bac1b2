"""Everything between text and token ids. Pure Python over the tokenizer's own files: no MLX, no gRPC, no clock.

tokens      ids ↔ text and bytes, EOS and BOS ids
template    what a chat template puts around a turn, learnt by rendering probes
turns       where in a turn a context of token ids ends
chat        a conversation, or new turns for a context, as token ids
detokenize  picked ids to valid UTF-8, one at a time
stops       stop strings across token borders
channels    answer, reasoning and tool calls told apart in a stream of text
formats     which marks a model writes around them
constraint  which tokens may come next for the text to have a form (llguidance)
stream      all of it joined for one generation: what to show, as what, and when to end
"""
