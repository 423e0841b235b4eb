"""How accelerate reads a command line: its resolved options, and the launch configuration that it gives to torch."""

from argparse import Namespace
from unittest.mock import patch

import torch.distributed.run as distrib_run
from accelerate.commands.launch import _validate_launch_command, launch_command_parser, multi_gpu_launcher
from torch.distributed.launcher.api import LaunchConfig


def resolved(words: list[str]) -> Namespace:
    """Return the options of `accelerate launch`, merged with the configuration file that `words` names."""
    return _validate_launch_command(launch_command_parser().parse_args(words))[0]


def torch_launch(words: list[str]) -> LaunchConfig:
    """Return the launch configuration that accelerate gives to torch for these options; nothing is started."""
    with patch.object(distrib_run, "run") as run, patch("accelerate.utils.launch.is_port_in_use", lambda port: False):
        multi_gpu_launcher(resolved(words))
    return distrib_run.config_from_args(run.call_args.args[0])[0]
