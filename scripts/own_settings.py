"""The settings of each method that are searched beside its learning rate: two alternatives for every method.

For numbers these are half and double the method's default; SALAAD's controller steps are doubled where its c is halved
and vice versa, as in `salaad.config.suggestion`. Stored ranks and densities stay, since they change the model's size.
Alternatives in `SHOWN_ONLY` are tried and shown, but not taken for the training in full.
"""

from salaad.config.run import RunConfig

_NUMBERS = {
    "lora": ("alpha",),
    "relora": ("alpha",),
    "galore": ("scale",),
    "loro": ("every",),
    "sltrain": ("alpha",),
    "salaad": ("rho_constant", "-delta_alpha", "-delta_beta"),  # with a dash: by the inverse factor
}
_OTHERS = {
    "full_rank": (("--optimizer.weight_decay=0.1",), ("--optimizer.clip=0",)),
    "cola": (("--cola.keep_swiglu=false",), ("--optimizer.weight_decay=0",)),
    "lost": (("--lost.gamma=0.5",), ("--lost.gamma=0.9",)),
    "matformer": (("--matformer.train=summed",), ("--matformer.halvings=2",)),
}

# MatFormer summed takes several times the operations for the same tokens, for which every method could train longer.
# With fewer halvings it gives fewer sizes.
SHOWN_ONLY = ("--matformer.train=summed", "--matformer.halvings=2")


def alternatives(config: RunConfig) -> list[tuple[str, ...]]:
    """Return the alternatives as options of train.py; none for a method that is registered from outside."""
    if config.method in _OTHERS:
        return list(_OTHERS[config.method])
    names = _NUMBERS.get(config.method, ())
    return [tuple(_scaled(config, name, factor) for name in names) for factor in (0.5, 2) if names]


def _scaled(config: RunConfig, name: str, factor: float) -> str:
    key = name.removeprefix("-")
    value = getattr(config.settings, key)
    scaled = value / factor if name.startswith("-") else value * factor
    return f"--{config.method}.{key}={round(scaled) if isinstance(value, int) else f'{scaled:g}'}"
