"""Any optimizer of torch.optim by name, and the learning rate: linear warm-up, then a cosine to a floor."""

import inspect
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.config.run import OptimizerConfig

# The base class, and optimizers that need a closure, sparse gradients or 2-D weights only.
_UNFIT = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of torch.optim called `name`; raise a UserError that lists the known ones if there is none."""
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and key not in _UNFIT
    }
    if name not in known:
        raise UserError(f"optimizer.name is {name!r}, which does not serve here; give one of {', '.join(known)}")
    return known[name]


def require_optimizer(config: OptimizerConfig) -> None:
    """Raise a UserError if the optimizer is unknown, or has no weight decay where one is asked for."""
    accepted = inspect.signature(optimizer_class(config.name)).parameters
    if config.weight_decay and "weight_decay" not in accepted:
        raise UserError(
            f"optimizer.weight_decay is {config.weight_decay:g}, but {config.name} has none; give "
            "--optimizer.weight_decay 0, or another optimizer.name"
        )


def projection_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the matrices of a model that belong to no embedding, be it of tokens or of positions, nor its LM head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = [layer for layer in model.modules() if layer in ends or isinstance(layer, nn.Embedding)]
    kept = {id(p) for layer in tables for p in layer.parameters()}
    return [p for p in model.parameters() if p.ndim > 1 and id(p) not in kept]


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, steps: int, projections: Iterable[nn.Parameter] = ()
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Build the optimizer, fused where possible, and its learning-rate schedule over `steps` steps.

    The parameters in `projections` become a second group if `config.projection_lr` is not 1. A bfloat16 weight whose
    gradient is kept in float32 (`grad_dtype`) gets float32 moments, under the names that Adam and AdamW use.
    """
    parameters = [p for p in parameters if p.requires_grad]
    cls = optimizer_class(config.name)
    mixed = [p for p in parameters if p.grad_dtype not in (None, p.dtype)]
    wanted = {
        "lr": config.lr,
        "betas": config.betas,
        # Adafactor takes a pair here, whose first half is its own epsilon for squares.
        "eps": (None, 1e-3) if cls is torch.optim.Adafactor else config.eps,
        "weight_decay": config.weight_decay,
        "foreach" if mixed else "fused": True,
    }
    accepted = inspect.signature(cls).parameters
    apart = {id(p) for p in projections} if config.projection_lr != 1 else set()
    groups = [{"params": [p for p in parameters if id(p) not in apart]}]
    if slower := [p for p in parameters if id(p) in apart]:
        groups.append({"params": slower, "lr": config.lr * config.projection_lr})
    optimizer = cls(groups, **{key: value for key, value in wanted.items() if key in accepted})
    for p in mixed:
        moments = {key: torch.zeros_like(p, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.zeros(()), **moments}
    return optimizer, LambdaLR(optimizer, warmup_and_cosine(config, steps))


def warmup_and_cosine(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """Return step → learning rate as a share of its peak: a linear rise, then a cosine down to `config.final_lr`."""
    warmup = round(config.warmup * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2

    return factor


def restarted(factor: Callable[[int], float], every: int, rewarmup: int) -> Callable[[int], float]:
    """Return `factor` with a new rise after every `every` steps, linear from 1/`rewarmup` over `rewarmup` steps."""

    def rising(step: int) -> float:
        after = step % every
        return factor(step) * ((after + 1) / rewarmup if step >= every and after < rewarmup else 1)

    return rising


def step_unless(broken: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of the optimizer, unless `broken` (float32, 0-d, on the device) is 1.

    A fused optimizer reads `broken` on the device. With any other the host waits for `broken` once a step: where torch
    has no fused form, and for bfloat16 weights with float32 gradients and moments (`build_optimizer`), as torch's fused
    Adam requires one dtype. Without the wait a broken step would have to be undone on the device, from a copy of
    weights and moments made and read in every step: several passes over the largest part of the memory. The wait costs
    the device the time until the optimizer's first kernel arrives.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        # As torch's GradScaler tells a fused optimizer of an overflow.
        optimizer.found_inf, optimizer.grad_scale = broken, None
        optimizer.step()
    elif not broken:
        optimizer.step()


def place_schedule(schedule: LambdaLR, step: int) -> None:
    """Set the schedule, and the learning rate of every group, to their state after `step` steps."""
    schedule.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load `state`, keeping the dtype of every saved moment, which torch would cast to the dtype of its weight."""
    optimizer.load_state_dict(state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state["state"].items():
        current = optimizer.state[parameters[index]]
        for key, value in saved.items():
            if torch.is_tensor(value) and value.dtype != current[key].dtype:
                current[key] = value.to(current[key].device)
