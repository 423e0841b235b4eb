"""The language model: built from sizes or opened from a folder, its loss, its perplexity, the roles of its weights.

Begin with `build`; `weight_headers` is what a folder's files are compared with before any memory is taken.
"""
