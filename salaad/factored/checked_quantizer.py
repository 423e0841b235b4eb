"""What both folder formats have in common when transformers opens them: entry, checks before a model is built."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from salaad.common.errors import UserError
from salaad.model.weight_headers import check_layers


class FolderEntry(QuantizationConfigMixin):
    """The base class of the entry `quantization_config` of both formats."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute, as transformers reads the entry of a configuration that `from_pretrained` is given."""
        return getattr(self, key, default)


class CheckedQuantizer(HfQuantizer):
    """The base class of the quantizers of both formats, by whose hooks transformers opens and saves a folder."""

    FORMAT_VERSIONS: tuple[int, ...]
    # What the folder holds if its U, V and S are computed when it is opened; None if they are read as they are stored.
    computed_on_opening: str | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Check the folder's version and the device map; transformers calls this again with a map that it has inferred.

        Raises:
            UserError: the folder has another version of the format; the map offloads modules, and their U, V and S are
                not in the files in the form in which a layer uses them, so that they could not be loaded again.
        """
        found = self.quantization_config.format
        if found not in self.FORMAT_VERSIONS:
            known = " or ".join(map(str, self.FORMAT_VERSIONS))
            raise UserError(f"the folder has format {found}, this version reads {known}; use the version that wrote it")
        offloaded, folder = _offloaded_to(device_map), self.computed_on_opening
        if offloaded and folder is not None:
            raise UserError(
                f"device_map offloads modules to {' and '.join(offloaded)}, where {folder} loses U, V and S; "
                "leave device_map out, or let compress.py write a folder of one size in floats, which can be offloaded"
            )

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Check the configuration and return it unchanged: no other hook gets it before the model is built from it."""
        check_layers(config)
        return config

    def is_serializable(self) -> bool:
        """True: `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: U, V and the entries of S, whose positions stay, have gradients."""
        return True


def _offloaded_to(device_map: Any) -> list[str]:
    """The places, cpu or disk, from which a device map has modules loaded anew for every forward pass."""
    devices = {str(device) for device in device_map.values()} if isinstance(device_map, Mapping) else set()
    return sorted(devices & ({"disk"} if devices <= {"cpu", "disk", "mps"} else {"cpu", "disk"}))
