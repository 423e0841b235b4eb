"""Ranks, device and precision of a run, through accelerate."""

import os
import warnings
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType, GradientAccumulationPlugin, str_to_bool
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from salaad.common import distributed, locks
from salaad.common.errors import UserError, leave
from salaad.common.launcher import follow_launcher
from salaad.config.run import DataConfig, RunConfig
from salaad.data.retries import longest_wait
from salaad.data.text import Text, digests_of
from salaad.methods.optimizer import projection_weights
from salaad.model.loss import SummedLoss

_BUCKET = 25  # MiB; torch's default


def start_accelerator(config: RunConfig) -> Accelerator:
    """Return the accelerator with the run's ranks, device and precision; a UserError for what is not supported."""
    follow_launcher()
    require_devices()
    logging.disable_progress_bar()  # every checkpoint would draw one
    # accelerate knows no other name for the setting yet.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    # torch takes a first step that `step_unless` discards for one that was forgotten.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
    torch.set_float32_matmul_precision("high" if config.train.precision == "tf32" else "highest")
    accelerator = Accelerator(
        # Set explicitly, because several processes on a machine without a GPU would otherwise each run alone.
        cpu=not torch.cuda.is_available(),
        # These three explicitly as well, or the launcher's settings would overrule the run's.
        mixed_precision="bf16" if config.train.precision == "bf16-mixed" else "no",
        dynamo_backend="no",  # `train.compile` compiles the Transformer alone
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # the loss is divided by its targets
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            InitProcessGroupKwargs(timeout=patience(config.data)),
        ],
    )
    ranks = accelerator.num_processes
    if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise UserError(
            f"{accelerator.distributed_type.value} is not supported; launch with one of configs/accelerate/"
        )
    if config.train.batch % ranks:
        raise UserError(
            f"train.batch {config.train.batch} cannot be shared by {ranks} processes; give a multiple of {ranks}"
        )
    return accelerator


def patience(data: DataConfig) -> timedelta:
    """Return how long a sum over the ranks may take, in a step or an evaluation, while a rank waits for its text.

    The retries of the hub alone can take longer than 10 minutes, the default for GPUs. As a rank reads more than one
    file, it gets twice the longest wait for a file, but no more than ranks wait for a disk (`distributed.PATIENCE`).
    """
    own = InitProcessGroupKwargs(backend="nccl" if torch.cuda.is_available() else "gloo").timeout
    text = 2 * longest_wait(data.retries) * (1 + data.max_lost_files)
    return max(own, timedelta(seconds=min(text, distributed.PATIENCE)))


def require_devices() -> None:
    """Refuse several processes where a machine has no working GPU, unless they were meant for the CPU.

    Raises:
        UserError: accelerate was not told to use the CPU, and CUDA_VISIBLE_DEVICES was not set to -1. An empty list of
            devices does not count as such, as schedulers leave it by mistake. Also if a launcher's number is none.
    """
    # The last two are only looked at, as accelerate reads them.
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    ranks, local, *_ = (distributed.from_environment(name, 1) for name in names)
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")  # as cpu2.yaml has it for its processes
    on_cpu = distributed.from_environment("ACCELERATE_USE_CPU", False, str_to_bool) or asked
    if ranks > 1 and not on_cpu and not torch.cuda.is_available():
        raise UserError(
            f"{ranks} processes were launched, {local} of them on this machine, where torch {torch.__version__} finds "
            "no GPU; mend the driver, install torch for it or make GPUs visible, or launch with "
            "configs/accelerate/cpu2.yaml to train on the CPU"
        )


def require_same_text(text: Text) -> None:
    """Compare text and tokenizer of all ranks, by names and sizes of files and by a digest; collective.

    Raises:
        UserError: on every rank, if some do not read what rank 0 reads.
    """
    found = distributed.gather(digests_of(text))
    for what, first in found[0].items():
        if others := [rank for rank, digests in enumerate(found) if digests[what] != first]:
            named = ", ".join(map(str, others[:8])) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
            raise UserError(
                f"of {len(found)} ranks, rank {named} would not train on the text of rank 0 (the difference: {what}); "
                "give every machine the same files, by name and size, and the same tokenizer"
            )


def distribute(accelerator: Accelerator, loss: SummedLoss, apart: list[nn.Parameter], config: RunConfig) -> nn.Module:
    """Wrap `loss` for data parallelism; the gradients of the parameters `apart` are averaged by `average_gradients`.

    After its first backward pass the wrapper rearranges the gradients in the order in which they arrived. With three
    ranks or more that changes the order of sums. So every start of a run first computes a gradient that is not used.
    """
    distributed.barrier()  # reading the weights may have taken some ranks longer than a sum may take (`patience`)
    distributed.exclude_from_averaging(loss, apart)
    if config.train.compile:
        accelerator.ddp_handler.bucket_cap_mb = compiled_bucket(loss.model, apart)
    wrapped = accelerator.prepare(loss)
    if distributed.world_size() > 1:
        rows = min(config.train.micro_batch, config.train.batch // distributed.world_size())
        ids = torch.zeros(rows, config.data.sequence_length, dtype=torch.int64, device=accelerator.device)
        with torch.random.fork_rng([accelerator.device] if accelerator.device.type == "cuda" else []):
            accelerator.backward(wrapped(ids, ids))
        loss.zero_grad(set_to_none=True)
    return wrapped


def compiled_bucket(model: PreTrainedModel, apart: list[nn.Parameter]) -> int:
    """Return the bucket size in MiB for averaging gradients during a compiled backward pass: a layer's, at least 25.

    A backward pass that is one graph yields all gradients at its end, too late to average any of them meanwhile. So
    torch splits the graph wherever a bucket is full. At torch's 25 MiB that is five times in every layer of 1b: nothing
    is fused across a split, and every piece is compiled separately, as no two are alike. With a layer's gradients in a
    bucket there is one split per layer, and after the backward pass no more than one layer's remain to be averaged.
    """
    left_out = {id(parameter) for parameter in apart}
    averaged = sum(p.nbytes for p in projection_weights(model) if p.requires_grad and id(p) not in left_out)
    layers = getattr(model.config, "num_hidden_layers", None) or 1
    return max(_BUCKET, averaged // layers // 2**20)


def leave_together(accelerator: Accelerator) -> None:
    """End a finished run on all ranks at once, as a rank that exits early can make the others wait forever; collective.

    Several ranks exit without cleaning up, as that now and then deadlocks: the thread of torch's gloo group needs the
    interpreter lock to end, and whoever destroys the group holds this lock while waiting for that thread.
    """
    distributed.barrier()
    locks.release()
    if distributed.world_size() > 1:
        leave(0)
    accelerator.end_training()
