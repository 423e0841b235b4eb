"""The tables and figures: perplexity of every variant, the κ sweep, zero-shot accuracy, the structure of weights.

Begin with `variant_perplexity`; `tables` and `figures` only show what the others measured.
"""
