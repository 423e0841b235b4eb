"""What of a method's own settings is searched beside its learning rate: two other values each, the same for all.

Of numbers half and double of what the method brings; with a smaller or larger c SALAAD's controller moves the other
way, as in `salaad.config.suggestion`. Ranks and densities that are stored stay, since they make another size.
"""

from salaad.config.run import RunConfig

_NUMBERS = {
    "lora": ("alpha",),
    "relora": ("alpha",),
    "galore": ("scale",),
    "loro": ("every",),
    "sltrain": ("alpha",),
    "salaad": ("rho_constant", "-delta_alpha", "-delta_beta"),  # those with a dash by the inverse factor
}
_OTHERS = {
    "full_rank": (("--optimizer.weight_decay=0.1",), ("--optimizer.clip=0",)),
    "cola": (("--cola.keep_swiglu=false",), ("--optimizer.weight_decay=0",)),
    "lost": (("--lost.gamma=0.5",), ("--lost.gamma=0.9",)),
    "matformer": (("--matformer.train=summed",), ("--matformer.halvings=2",)),
}


def alternatives(config: RunConfig) -> list[tuple[str, ...]]:
    """Options of train.py for each; none of a method that is registered from outside."""
    if config.method in _OTHERS:
        return list(_OTHERS[config.method])
    names = _NUMBERS.get(config.method, ())
    return [tuple(_scaled(config, name, factor) for name in names) for factor in (0.5, 2) if names]


def _scaled(config: RunConfig, name: str, factor: float) -> str:
    key = name.removeprefix("-")
    value = getattr(config.settings, key)
    scaled = value / factor if name.startswith("-") else value * factor
    return f"--{config.method}.{key}={round(scaled) if isinstance(value, int) else f'{scaled:g}'}"
