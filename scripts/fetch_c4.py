"""Download shards of C4 and the t5-base tokenizer once, so that training needs no network.

Shards that are already there are not fetched again, and a broken download goes on where it stopped.
"""

import json
import shlex
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from huggingface_hub import hf_hub_download
from huggingface_hub.utils import logging
from tqdm import tqdm

from salaad.common.errors import DISK, UserError, run_command
from salaad.common.files import writable_folder
from salaad.data.documents import C4_SHARDS, c4_files
from salaad.data.text import DEFAULT_TOKENIZER

REPOSITORY = "allenai/c4"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "spiece.model")


def main() -> None:
    """Fetch what the command line asks for and print the options that use it."""
    options = read_options()
    writable_folder(options.output)
    logging.set_verbosity_error()  # it would tell every retry; one sentence at the end is enough
    jobs = [(DEFAULT_TOKENIZER, "model", name, options.output / "t5-base") for name in TOKENIZER_FILES]
    for split, count in (("train", options.train), ("validation", options.validation)):
        names = [address.partition(f"{REPOSITORY}/")[2] for address in c4_files(split)[:count]]
        jobs += [(REPOSITORY, "dataset", name, options.output) for name in names]
    for job in tqdm(jobs, "files", disable=not sys.stdout.isatty()):
        fetch(*job)
    print("Everything is there. Train on it with:")
    print(" ".join(training_options(options.output)))


def read_options() -> Namespace:
    """The command line, checked.

    Raises:
        UserError: a number of shards that C4 does not have.
    """
    parser = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("c4"), help="folder to fill")
    parser.add_argument("--train", type=int, default=1, help="training shards of 356 317 documents (about 0.3 GB) each")
    parser.add_argument("--validation", type=int, default=1, help="validation shards of about 45 600 documents each")
    options = parser.parse_args()
    for split, count in C4_SHARDS.items():
        if not 1 <= getattr(options, split) <= count:
            raise UserError(f"--{split} is {getattr(options, split)}, but C4 has {count} shards; give 1 to {count}")
    return options


def fetch(repository: str, kind: str, name: str, folder: Path) -> None:
    """Bring one file of a hub repository into a folder.

    Raises:
        UserError: the hub cannot be reached or has no such file.
        OSError: the disk does not take the file.
    """
    try:
        hf_hub_download(repository, name, repo_type=kind, local_dir=folder)
    except Exception as error:  # which class depends on the HTTP library below the hub's client
        if getattr(error, "errno", None) in DISK:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise UserError(
            f"{repository}/{name} cannot be fetched ({reason}); connect to the hub and run the same command again"
        ) from error


def training_options(folder: Path) -> list[str]:
    """Return the options of train.py that use the text and the tokenizer in a folder."""
    folder = folder.resolve()
    files, validation = (json.dumps([f"{folder}/en/c4-{split}.*.json.gz"]) for split in ("train", "validation"))
    values = {"source": "files", "files": files, "validation_files": validation, "tokenizer": f"{folder}/t5-base"}
    return [f"--data.{name} {shlex.quote(value)}" for name, value in values.items()]


if __name__ == "__main__":
    run_command(main)
