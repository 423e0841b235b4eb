"""A model of the size you name, or of every size, out of one checkpoint, without training, as a folder that opens."""

from transformers import logging

from salaad.common.errors import run_command
from salaad.compression.write import compress
from salaad.config.command_line import read_options
from salaad.config.commands import CompressOptions
from salaad.runs.model_on_disk import ModelOnDisk


def main() -> None:
    """Checkpoint × budget → folder, and its sizes in Markdown."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    command = read_options("compress.py", __doc__, {"": CompressOptions}, ModelOnDisk.open, with_data=("",))
    print(compress(command.options, command.model, command.data))


if __name__ == "__main__":
    run_command(main)
