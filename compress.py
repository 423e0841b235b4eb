"""A model of the size you name, out of one checkpoint, without training: HPA, then a folder that opens anywhere."""

from transformers import logging

from salaad.cli import read_options
from salaad.compression import compress
from salaad.errors import run_command
from salaad.options import CompressOptions


def main() -> None:
    """Checkpoint × (budget, κ) → folder, and its sizes in Markdown."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    _, options, _ = read_options("compress.py", __doc__, {"": CompressOptions})
    print(compress(options))


if __name__ == "__main__":
    run_command(main)
