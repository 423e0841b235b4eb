"""Cross-entropy of a linear head, summed in float32, without holding the logits of all tokens at once.

Otherwise the logits of a large vocabulary, not the activations, would limit the micro-batch. The tokens go through the
head in chunks, and the gradient of a chunk is computed with its loss, so nothing is computed twice. On a GPU a kernel
overwrites the logits by their gradient. torch's own `linear_cross_entropy` takes chunks too, but sums in the dtype of
its input: in bfloat16 its loss is off by up to 2 %.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.common import native
from salaad.common.errors import UserError
from salaad.model.causal import without_mask

IGNORED = -100
# Number of logits held at once: what fits into the cache of a CPU, or what keeps a GPU busy.
_CHUNK = {"cpu": 2**19, "cuda": 2**27}
_FEWEST_TOKENS = 128


def summed_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The sum over tokens of the cross-entropy of hidden·headᵀ at `targets`, in nats (0-d, float32).

    Args:
        hidden: tokens × width.
        head: vocabulary × width.
        targets: token ids (tokens) below vocabulary; −100 is ignored. For any other id torch raises IndexError on a
            CPU, and on a GPU the loss of our kernel is NaN.

    Under autocast the products are computed in its dtype, the sums in float32.
    """
    hidden, head = _as_autocast(hidden, head)
    with torch.autocast(hidden.device.type, enabled=False):
        return _SummedCrossEntropy.apply(hidden, head, targets, torch.is_grad_enabled())


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in the dtype in which autocast would multiply them; unchanged where autocast is off."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def loss_bytes(tokens: int, width: int, vocabulary: int, element: int) -> int:
    """Bytes that `summed_cross_entropy` needs on a GPU besides its arguments, whose elements take `element` bytes each.

    These are the logits of a chunk and the gradients of `hidden` and `head`, the latter summed in float32 and then
    rounded.
    """
    logits = min(tokens, _tokens_at_once("cuda", vocabulary)) * vocabulary
    head = vocabulary * width * (4 if element == 4 else 4 + element)
    return logits * element + tokens * width * element + head


def _tokens_at_once(device: str, vocabulary: int) -> int:
    """Return the number of tokens in a chunk."""
    return max(_FEWEST_TOKENS, _CHUNK.get(device, _CHUNK["cpu"]) // vocabulary)


def _sum_over_chunks(
    ctx: Any,
    hidden: Tensor,
    head: Tensor,
    with_gradients: bool,
    of_chunk: Callable[[slice, Tensor, bool], tuple[Tensor, Tensor | None]],
) -> Tensor:
    """Return the loss summed over all chunks; with `with_gradients`, save the needed gradients for `_gradients`.

    Args:
        ctx: context of the autograd function, whose first two arguments are `hidden` and `head`.
        hidden: tokens × width.
        head: vocabulary × width.
        with_gradients: whether gradients may be needed.
        of_chunk: a function of a slice of the tokens, their logits, and whether the gradient is needed. It returns the
            summed loss (0-d, float32) and its gradient with respect to the logits, in their dtype.
    """
    for_hidden, for_head = (with_gradients and needed for needed in ctx.needs_input_grad[:2])
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if for_hidden else None
    grad_head = torch.zeros_like(head, dtype=torch.float32) if for_head else None
    size = _tokens_at_once(hidden.device.type, len(head))
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        h = hidden[chunk]
        loss, grad = of_chunk(chunk, h @ head.mT, for_hidden or for_head)
        total += loss
        if for_hidden:
            torch.mm(grad, head, out=grad_hidden[chunk])
        if for_head and head.dtype == torch.float32:
            grad_head.addmm_(grad.mT, h)
        elif for_head:
            grad_head += grad.mT @ h
    ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype) if for_head else None)
    return total


def _gradients(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of `hidden` and `head`, given the gradient of the summed loss.

    Raises:
        RuntimeError: second derivatives are asked for; the saved gradients are numbers to autograd.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("the summed loss has no second derivatives; take the loss that the model itself returns")
    grad_hidden, grad_head = (None if grad is None else grad * grad_total for grad in ctx.saved_tensors)
    return grad_hidden, grad_head


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, with_gradients: bool) -> Tensor:
        """Return the summed loss; with `with_gradients`, save the needed gradients for `backward`."""

        def of_chunk(chunk: slice, logits: Tensor, needed: bool) -> tuple[Tensor, Tensor | None]:
            return _loss_and_gradient(logits, targets[chunk], needed)

        return _sum_over_chunks(ctx, hidden, head, with_gradients, of_chunk)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_total), None, None


def _loss_and_gradient(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Return the summed cross-entropy (0-d, float32), and its gradient with respect to the logits, in their dtype."""
    if not torch.compiler.is_compiling() and logits.dtype != torch.float64 and native.uses_triton(logits.device):
        from salaad.model import gpu_kernels  # Triton may be missing

        loss = gpu_kernels.cross_entropy_(logits, targets, IGNORED, with_gradient).sum()
        return loss, logits if with_gradient else None
    log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = F.nll_loss(log_p, targets, reduction="sum", ignore_index=IGNORED)
    if not with_gradient:
        return loss, None
    grad = log_p.exp_()
    grad.scatter_add_(1, targets.clamp_min(0)[:, None], grad.new_full((len(targets), 1), -1.0))
    return loss, grad.masked_fill_((targets == IGNORED)[:, None], 0).to(logits.dtype)


def summed_divergence(
    hidden: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, targets: Tensor, text_share: float
) -> Tensor:
    """The sum over tokens of KL(q ‖ p), in nats (0-d, float32), with gradients for `hidden` and `head`.

    q is the teacher's distribution or, for a token that has a target, a mixture: `text_share` of it is the target, the
    rest the teacher's distribution.

    Args:
        hidden: tokens × width; p is the softmax of hidden·headᵀ.
        head: vocabulary × width.
        teacher: the teacher's hidden states (tokens × its width).
        teacher_head: the teacher's head (vocabulary × its width).
        targets: token ids, or `IGNORED`.
        text_share: share of the text in q, from 0 to 1.
    """
    hidden, head, teacher, teacher_head = _as_autocast(hidden, head, teacher, teacher_head)
    with torch.autocast(hidden.device.type, enabled=False):
        return _SummedDivergence.apply(
            hidden, head, teacher, teacher_head, targets, text_share, torch.is_grad_enabled()
        )


class _SummedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Tensor,
        teacher_head: Tensor,
        targets: Tensor,
        text_share: float,
        with_gradients: bool,
    ) -> Tensor:
        """Return the summed divergence; gradients are saved as in `_SummedCrossEntropy`."""

        def of_chunk(chunk: slice, logits: Tensor, needed: bool) -> tuple[Tensor, Tensor | None]:
            q = F.softmax(teacher[chunk] @ teacher_head.mT, dim=-1, dtype=torch.float32)
            share = text_share * (targets[chunk] != IGNORED).float()[:, None]
            q.mul_(1 - share).scatter_add_(1, targets[chunk].clamp_min(0)[:, None], share)
            log_p = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            loss = (q * (q.clamp_min(torch.finfo(q.dtype).tiny).log() - log_p)).sum()
            return loss, log_p.exp_().sub_(q).to(logits.dtype) if needed else None  # p − q, as q sums to 1

        return _sum_over_chunks(ctx, hidden, head, with_gradients, of_chunk)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad_total), None, None, None, None, None


# Settings by which some architectures change the logits after the head.
_LOGIT_CHANGES = (
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
_ROUNDING = 0.05  # of logits computed in two ways in bfloat16, relative; a scale or a bias changes them by more


class SummedLoss(nn.Module):
    """Next-token negative log-likelihood of a causal LM, summed over the labelled tokens.

    The loss is a sum, so that the caller can divide by the number of tokens of the whole batch, and the result does not
    depend on how rows are spread over micro-batches and ranks.

    The model is run once on two tokens, to see that its logits are what this loss takes them to be, unless it has no
    values yet (on the meta device).

    Args:
        model: the causal LM.
        cure: what the user can do, for the error, if the loss does not suit the model.

    Raises:
        UserError: the logits are more than a linear head without bias, or transformers does not know the head's input.
    """

    def __init__(self, model: PreTrainedModel, cure: str = "give a model of another family") -> None:
        super().__init__()
        if model.base_model is model:
            raise UserError(
                f"transformers does not know what of a {type(model).__name__} comes before its head, which this loss "
                f"needs; {cure}"
            )
        head = model.get_output_embeddings()
        config = model.config.get_text_config()
        changed = [name for name in _LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
        if head is None or getattr(head, "bias", None) is not None or changed:
            what = ", ".join(changed) or ("no head" if head is None else "a bias")
            raise UserError(f"the model's logits have {what}, which this loss does not know; {cure}")
        self.model = model
        self.training = model.training  # so that whoever restores the mode of this module restores the model's
        if head.weight.device.type != "meta" and not self._gives_the_logits():
            raise UserError(
                f"the logits of a {type(model).__name__} are not the product of its last hidden states and its head, "
                f"as this loss takes them to be; {cure}"
            )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss in nats (0-d) of `input_ids` and `labels` (rows × length), labels equal to ids or −100 (ignored)."""
        return summed_cross_entropy(*self.hidden_and_head(input_ids), next_tokens(labels))

    def hidden_and_head(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the logits: the last hidden states (tokens × width) and the head's weight."""
        with without_mask(self.model):
            hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1), self.model.get_output_embeddings().weight

    @torch.no_grad()
    def _gives_the_logits(self) -> bool:
        """Whether the product of `hidden_and_head` is the model's logits, as far as rounding lets one see."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()  # without dropout
        try:
            device = self.model.get_output_embeddings().weight.device
            ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
            hidden, head = self.hidden_and_head(ids)
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            for module, mode in modes:
                module.training = mode
        error = torch.linalg.vector_norm(hidden.to(head.dtype) @ head.mT - logits, dtype=torch.float32)
        return not error > _ROUNDING * torch.linalg.vector_norm(logits, dtype=torch.float32)  # NaN is another matter


class SummedDivergence(SummedLoss):
    """The divergence of a causal LM's predictions from a teacher's and the text, summed over the labelled tokens.

    Args:
        model: the causal LM, as for `SummedLoss`.
        text_share: share of the text, as for `summed_divergence`.
        cure: what the user can do, as for `SummedLoss`.
    """

    def __init__(self, model: PreTrainedModel, text_share: float, cure: str) -> None:
        super().__init__(model, cure)
        self.text_share = text_share

    def forward(self, input_ids: Tensor, labels: Tensor, teacher: tuple[Tensor, Tensor]) -> Tensor:
        """Return the divergence in nats (0-d); `teacher` is the teacher's `hidden_and_head` of the same rows."""
        hidden, head = self.hidden_and_head(input_ids)
        real, targets = (labels != IGNORED).flatten(), next_tokens(labels)
        return summed_divergence(hidden[real], head, teacher[0][real], teacher[1], targets[real], self.text_share)


def next_tokens(labels: Tensor) -> Tensor:
    """Return the target of every position of `labels` (rows × length), flattened; `IGNORED` at the end of each row."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
