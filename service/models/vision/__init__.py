"""The tiny vision model: its pictures, questions and chats, its training, its folder. Importing this imports no MLX.

Owns all of `tiny-vision`. Does not serve it: to the engine it is a model folder like any other. Reading order:
scenes, drawing, questions, chats, tokens, folder, pointing, batches, net, looking, gallery, train, evaluate.
"""
