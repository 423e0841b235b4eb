"""Searches and measurements behind decisions of the library; each is a command, and its results lie under results/.

Begin with `search_nano`, which chose the settings of nano; `record_spectra` and `try_solvers` stand behind the solvers
of the singular-value threshold. `probe_allocation` asks how far cuts by energy are from the best ones.
"""
