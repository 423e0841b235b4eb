"""Fitting a cut model on text to the hidden states and predictions of the dense model.

Begin with `tuned_model`, which holds the trained tensors. `matching` fits one Transformer layer after the other,
`distillation` all layers together, at one size or at many.
"""
