"""Text generation: checkpoints, the decoder, sampling, language, and the generator that puts them to work.

Other parts import model and multi_device (a model at work), transformer (shape, weights, step), text_options,
precision, answer_frames, and the packages checkpoint, language, sampling, decoder and generator.
"""
