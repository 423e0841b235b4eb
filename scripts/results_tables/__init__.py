"""The generated tables of the project's README and of the README in each folder of results/.

Begin with `nano`. There is a module per folder, whose function `sections` returns every marked section by name, as
Markdown; `compared` adds the goals to those of `elastic`, and `elastic_picture` draws them. `measured` reads the
rows that these show, and `all_methods` makes the table that opens results/README.md. Tables that the page of a GPU has
too are in `deployment`.
"""

from scripts.trainings import ROOT

RESULTS = ROOT / "results"
