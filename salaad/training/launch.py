"""Ranks, device and precision of a run, through accelerate."""

import os
import warnings
from datetime import timedelta

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from salaad.common import distributed, locks
from salaad.common.errors import UserError, leave
from salaad.common.launcher import follow_launcher
from salaad.config.run import DataConfig, RunConfig
from salaad.data.retries import longest_wait
from salaad.methods.optimizer import projection_weights
from salaad.model.loss import SummedLoss

_BUCKET = 25  # MiB; torch's own


def start_accelerator(config: RunConfig) -> Accelerator:
    """Ranks, device and precision; refuses what is not supported."""
    follow_launcher()
    require_devices()
    logging.disable_progress_bar()  # every checkpoint would draw one
    # accelerate knows no other name for the setting yet.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    torch.set_float32_matmul_precision("high" if config.train.precision == "tf32" else "highest")
    accelerator = Accelerator(
        # Said outright, because several processes on a machine without a GPU would otherwise each run alone.
        cpu=not torch.cuda.is_available(),
        mixed_precision="bf16" if config.train.precision == "bf16-mixed" else "no",
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
    """How long a sum over the ranks may take, in a step or an evaluation: one of them may be waiting for its text.

    The retries of the hub alone take longer than the 10 minutes that GPUs are given otherwise. A rank reads more than
    one file, so that it gets twice the longest wait for one; but no longer than anybody's disk.
    """
    own = InitProcessGroupKwargs(backend="nccl" if torch.cuda.is_available() else "gloo").timeout
    text = 2 * longest_wait(data.retries) * (1 + data.max_lost_files)
    return max(own, timedelta(seconds=min(text, distributed.PATIENCE)))


def require_devices() -> None:
    """Refuse several processes where a machine has no working GPU, unless they were meant for the CPU.

    Raises:
        UserError: they were not: accelerate was not told to use the CPU, and the devices were not set to -1. That none
            is visible says nothing, as schedulers leave it so by mistake.
    """
    ranks, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("-1")  # as cpu2.yaml has it for its processes
    on_cpu = asked or os.environ.get("ACCELERATE_USE_CPU") == "True"
    if ranks > 1 and not on_cpu and not torch.cuda.is_available():
        raise UserError(
            f"{ranks} processes were launched, {local} of them on this machine, where torch {torch.__version__} finds "
            "no GPU; mend the driver, install torch for it or make GPUs visible, or launch with "
            "configs/accelerate/cpu2.yaml to train on the CPU"
        )


def distribute(accelerator: Accelerator, loss: SummedLoss, apart: list[nn.Parameter], config: RunConfig) -> nn.Module:
    """Wrap `loss` for data parallelism; the gradients of the parameters `apart` are averaged by `average_gradients`.

    After its first backward the wrapper lays the gradients out anew, in the order in which they came. With three ranks
    or more that changes the order of sums. So a gradient that nobody uses goes first, in every start of a run alike.
    """
    distributed.barrier()  # reading the weights may have taken some longer than devices may take for a sum
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
    """MiB of gradients that are averaged at once beside a compiled backward pass: those of a layer, or torch's 25.

    A backward that is one graph gives all its gradients at its end, too late to average any of them beside it. So torch
    cuts the graph wherever a bucket is full. At 25 MiB that is five times in every layer of 1b: nothing is fused across
    a cut, and every piece is compiled for itself, as none is like another. With a layer's gradients in a bucket there
    is one cut a layer, and what is averaged when the backward has ended is still no more than one layer's.
    """
    left_out = {id(parameter) for parameter in apart}
    averaged = sum(p.nbytes for p in projection_weights(model) if p.requires_grad and id(p) not in left_out)
    layers = getattr(model.config, "num_hidden_layers", None) or 1
    return max(_BUCKET, averaged // layers // 2**20)


def leave_together(accelerator: Accelerator) -> None:
    """End a run that is finished: a rank that leaves before the others can make them wait for good.

    Several ranks leave without tidying up. The thread of torch's gloo group asks for the interpreter at its end, which
    whoever takes the group down holds while it waits for that thread: now and then neither goes on.
    """
    distributed.barrier()
    locks.release()
    if distributed.world_size() > 1:
        leave(0)
    accelerator.end_training()
