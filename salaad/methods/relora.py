"""ReLoRA: adapters that are merged into the weights and reset every q steps (2307.05695).

    every q steps:  W₀ += (α/r)·B·A,  A drawn again,  B = 0,  a random part of the adapters' moments = 0

so that the sum of many low-rank changes may have any rank. After a merge the learning rate rises linearly over
`rewarmup` steps, back to the cosine. The settings are those that ReLoRA's own group restates (2605.13652), without
the warm start at full rank, as in GaLore's table.

Different from the released code: there both A and B begin as zero, so that both gradients vanish and no projection is
trained in the first cycle; and the merge comes a step after the learning rate has restarted. Here A is drawn at the
start, and the merge comes before the first step of the restarted rate. All that the optimizer keeps for an entry
begins anew or nothing does, and the restarted rate begins at 1/`rewarmup` of the cosine.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.config.methods import ReloraConfig
from salaad.config.run import RunConfig
from salaad.methods.lora import Lora, draw
from salaad.methods.low_rank_layers import factored_layers
from salaad.methods.optimizer import restarted


class Relora(Lora):
    """Pretraining of adapters that are merged into the weights every q steps (ReLoRA)."""

    Settings = ReloraConfig

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().check(model, config)
        if config.optimizer.name == "Adafactor" and config.settings.prune:
            raise UserError(
                f"relora.prune is {config.settings.prune:g}, but Adafactor's moments are of whole rows and columns, of "
                "which no entry can be pruned alone; give another optimizer.name, or --relora.prune 0"
            )

    def build_optimizer(self) -> tuple[Optimizer, LambdaLR]:  # noqa: D102
        optimizer, schedule = super().build_optimizer()
        cosine, settings = schedule.lr_lambdas[0], self.config.settings
        return optimizer, LambdaLR(optimizer, restarted(cosine, settings.every, settings.rewarmup))

    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:  # noqa: D102
        if step % self.config.settings.every == 0:
            self.merge(optimizer, step)

    @torch.no_grad()
    def merge(self, optimizer: Optimizer, step: int) -> None:
        """Merge and reset every adapter, with random numbers that seed and step fix, the same on every rank."""
        # A generator takes 63 bits, and `seed` alone may have 53.
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + step) % 2**63)
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for layer in factored_layers(self.model).values():
            layer.weight.copy_(layer.dense_weight())
            fresh = torch.empty(layer.A.shape)
            draw(fresh, generator)
            layer.A.copy_(fresh)
            layer.B.zero_()
            for parameter in (layer.A, layer.B):
                state = optimizer.state.get(parameter, {})
                kept = torch.rand(parameter.shape, generator=generator) >= self.config.settings.prune
                for key, value in state.items():
                    if torch.is_tensor(value) and value.shape == parameter.shape:
                        on_device = kept.to(value.device)
                        value.mul_(on_device)
                        if key == "step_size":  # Rprop's own, which begins at the rate and would not leave zero
                            value.add_(~on_device, alpha=rates[parameter])
