"""The language model: built from sizes or opened from a folder, its loss, its perplexity, the roles of its weights.

Begin with `build`; `weight_headers` compares a folder's weight files with its config.json before memory is allocated.
"""
