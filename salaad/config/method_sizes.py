"""The settings of each method as its source gives them, by the size of the model: nano, 60m, 130m, 350m and 1b.

Sources: the papers and released scripts of ReLoRA (as repeated in 2605.13652), GaLore (2403.03507), LORO (ICLR 2025),
CoLA (2502.10940) and SLTrain (2406.02214). The learning rates of plain LoRA pretraining, of LOST and of ReLoRA at 1b
were never released: in their place stand those of ReLoRA, of SLTrain and of ReLoRA at 350m. The optimizer is what the
runs of these papers share: Adam with β 0.9 and 0.999 and, unless given, no decay, no clipping and a tenth of the steps
as warm-up. No source has `nano`: there the learning rates are those that a short search found (results/methods), the
rank is a quarter of the width, LORO's factors begin with a product of the dense size, and all else is as at 60m.
"""

from typing import Any

from salaad.config.run import ModelConfig

_WIDTHS = (128, 512, 768, 1024, 2048)
_ADAM: dict[str, Any] = {
    "optimizer.projection_lr": 1.0,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 0.0,
    "optimizer.warmup": 0.1,
}
_RANKS = [32, 128, 256, 256, 512]
# Method → setting → value, or a list of one per size; None leaves the configuration's own.
_SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {**_ADAM, "optimizer.lr": [2e-3, 1e-3, 1e-3, 5e-4, 5e-4], "lora.rank": _RANKS},
    "relora": {
        **_ADAM,
        "optimizer.lr": [2e-3, 1e-3, 1e-3, 5e-4, 5e-4],
        "optimizer.clip": [1.0, 1.0, 1.0, 0.0, 0.0],
        "relora.rank": _RANKS,
        "relora.every": [1000, 1000, 5000, 5000, 5000],
        "relora.rewarmup": [100, 100, 100, 200, 200],
    },
    "galore": {**_ADAM, "optimizer.lr": 1e-2, "optimizer.eps": 1e-6, "galore.rank": _RANKS},
    "loro": {
        **_ADAM,
        "optimizer.lr": [5e-3, 1e-2, 1e-2, 1e-2, 5e-3],
        "optimizer.eps": 1e-6,
        "optimizer.warmup": [0.1, 0.1, 0.1, 0.0333, 0.1],
        "loro.rank": _RANKS,
        "loro.every": [500, 500, 500, 500, 200],
        "loro.init": ["scaled", "xavier", "xavier", "xavier", "xavier"],
    },
    "cola": {
        **_ADAM,
        "optimizer.lr": [3e-3, 6e-3, 3e-3, 3e-3, 2e-3],
        "optimizer.weight_decay": 0.01,
        "optimizer.clip": 0.5,
        "optimizer.warmup": [0.2, 0.2, 0.1, 0.1, 0.1],
        "cola.rank": _RANKS,
        "cola.keep_swiglu": [True, True, True, False, False],
    },
    "matformer": {"optimizer.lr": [1.5e-3, None, None, None, None]},
    "lost": {**_ADAM, "optimizer.lr": 3e-3, "lost.rank": _RANKS},
    "sltrain": {
        **_ADAM,
        "optimizer.lr": 3e-3,
        "optimizer.warmup": [0.1, 0.1, 0.1, 0.1, 0.0714],
        "sltrain.rank": _RANKS,
        "sltrain.alpha": [32.0, 32.0, 16.0, 16.0, 8.0],
    },
}


def settings_of(method: str, model: ModelConfig) -> dict[str, Any]:
    """Return setting (its name in a configuration) → value for a method; empty for a method without a table.

    A model of another width has the settings of the next smaller size (of nano below that), and a quarter of its width
    as rank. The width of a model from a folder is not known: the result is empty, and the method's defaults hold.
    """
    if method not in _SETTINGS or model.path is not None:
        return {}
    size = max((i for i, width in enumerate(_WIDTHS) if width <= model.hidden_size), default=0)
    values = {key: value[size] if isinstance(value, list) else value for key, value in _SETTINGS[method].items()}
    found = {key: value for key, value in values.items() if value is not None}
    if model.hidden_size not in _WIDTHS and f"{method}.rank" in found:
        found[f"{method}.rank"] = max(1, model.hidden_size // 4)
    return found
