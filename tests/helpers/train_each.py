"""Several trainings one after the other in one launch, whose start takes seconds: `train_each.py ARGUMENTS.json`."""

import json
import sys
from pathlib import Path

import train
from tests.helpers.training import run_training


def main() -> None:
    """Run every list of options in the file."""
    train.leave_together = lambda accelerator: accelerator.wait_for_everyone()
    for arguments, output in json.loads(Path(sys.argv[1]).read_text()):
        run_training(arguments, Path(output))


if __name__ == "__main__":
    main()
