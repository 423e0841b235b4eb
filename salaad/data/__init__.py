"""From text to batches that are the same at every number of processes, with a position that can be saved.

A batch comes by way of documents (`documents`), rows of tokens (`rows`) and `batches`; begin with the last.
"""
