"""Searches and measurements behind decisions of the library; each is a command, and its results lie under results/.

Begin with `search_nano`, which chose the settings of nano; `record_spectra` and `try_solvers` stand behind the solvers
of the singular-value threshold, `search_elastic` behind the settings of the elastic curve.
"""
