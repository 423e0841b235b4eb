"""From text to batches that are the same at any number of processes, with a position that can be saved.

Files become documents (`documents`), rows of tokens (`rows`), then batches. Begin with `batches`.
"""
