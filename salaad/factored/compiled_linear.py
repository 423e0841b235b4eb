"""The compiled product of a factored layer under autograd."""

from typing import Any

import torch
from torch import Tensor

from salaad.factored import operators
from salaad.factored.autocast import without_autocast
from salaad.factored.slr_tensors import positions


class CompiledLinear(torch.autograd.Function):
    """The compiled product with gradients for x, U, V, the values of S and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        U: Tensor,
        V: Tensor,
        starts: Tensor,
        columns: Tensor,
        values: Tensor,
        bias: Tensor | None,
        products: operators.Products,
    ) -> Tensor:
        """Return y (…×n) of x (…×m)."""
        ctx.save_for_backward(x, U, V, starts, columns, values)
        ctx.products = products
        return products.linear(x, bias, (U, V, starts, columns, values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of the forward pass; None for those that need no gradient."""
        x, U, V, starts, columns, values = ctx.saved_tensors
        for_x, for_U, for_V, _, _, for_values, for_bias, _ = ctx.needs_input_grad
        G, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        with without_autocast(gradient.device):
            return (
                gradient @ ctx.products.dense((U, V, starts, columns, values)) if for_x else None,
                G.mT @ (rows @ V.mT) if for_U else None,
                (G @ U).mT @ rows if for_V else None,
                None,
                None,
                (G.mT @ rows).flatten()[positions(starts, columns, len(V.mT))] if for_values else None,
                G.sum(0) if for_bias else None,
                None,
            )
