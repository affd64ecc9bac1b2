"""Models that see images, through mlx-vlm. Owns how an image becomes features, and features part of a model call.

    prepare    a decoded picture ─► the ids and arrays that upstream's processor makes of it (any thread)
    model      the model as `service.engine.calls.Calls`: tower, prefill calls that images touch, decode with places
    pacing     a tower in parts
    attention  the tower's attention, as a CPU is quick at it
    places     rotary places of text and images in three axes; pure
    runs       attention that goes both ways inside an image
    families   which of these a family needs
    upstream   everything borrowed from mlx-vlm

One image's features are the embeddings of its whole span, made by upstream's own `get_input_embeddings` for the span
alone: scaled, merged and with separators as upstream has them, and depending on nothing but the image.
"""
