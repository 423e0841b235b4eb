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
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments of the forward pass; None for those that need no gradient.

        With `create_graph` autograd records these operations, so that second derivatives are right.
        """
        x, *tensors = ctx.saved_tensors
        U, V, starts, columns, _ = tensors
        for_x, for_U, for_V, _, _, for_values, for_bias, _ = ctx.needs_input_grad
        G, rows = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        with without_autocast(gradient.device):
            # Autograd cannot record the compiled sum.
            weight = operators.dense if torch.is_grad_enabled() else lambda *parts: ctx.products.dense(parts)
            return (
                gradient @ weight(*tensors) if for_x else None,
                G.mT @ (rows @ V.mT) if for_U else None,
                (G @ U).mT @ rows if for_V else None,
                None,
                None,
                (G.mT @ rows).flatten()[positions(starts, columns, len(V.mT))] if for_values else None,
                G.sum(0) if for_bias else None,
                None,
            )
