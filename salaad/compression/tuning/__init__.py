"""Fitting a cut model to what the dense one does on text, without labels.

Begin with `tuned_model`: what is trained. `matching` fits one Transformer layer after the other, `distillation` all of
them together, at one size or at all.
"""
