"""A model of the size you name, or of every size, out of one checkpoint, as a folder that opens."""

from functools import partial

from salaad.common.errors import run_command
from salaad.config.command_line import read_options
from salaad.config.commands import CompressOptions

read = partial(read_options, "compress.py", __doc__, {"": CompressOptions}, with_data=("",))

if __name__ == "__main__":
    run_command(partial(read, None))  # help and wrong options come before the imports below, which take seconds

from transformers import logging

from salaad.compression.write import compress
from salaad.runs.model_on_disk import ModelOnDisk


def main() -> None:
    """Write the compressed model's folder and print its sizes in Markdown."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    command = read(ModelOnDisk.open)
    print(compress(command.options, command.model, command.data))


if __name__ == "__main__":
    run_command(main)
