"""The scales of a checkpoint's fp8 keys and values, under one name each. No torch.

    ...self_attn.k_scale                 compressed-tensors, and the name that they have here
    ...self_attn.k_proj.k_scale          ModelOpt
    ...self_attn.k_proj.output_scale     compressed-tensors' first form, fbgemm
    ...self_attn.kv_scale                AutoFP8: one for both

and alike with v. A scale is one number, or one a KV head.
"""

from collections.abc import Iterable

NAMES = ("k_scale", "v_scale")
UNUSED = ("q_scale", "k_zero_point", "v_zero_point", "prob_output_scale")
_FORMS = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")
_MODULE = ".self_attn."


def cache_scales(stored: Iterable[str]) -> dict[str, str]:
    """Return the name here of each scale among the tensors *stored*, and its name there."""
    present = {name for name in stored if _MODULE in name and "scale" in name}
    modules = {name.partition(_MODULE)[0] for name in present}
    found = {}
    for module in modules:
        for kind in ("k", "v"):
            for form in _FORMS:
                name = module + _MODULE + form.format(kind)
                if name in present:
                    found[f"{module}{_MODULE}{kind}_scale"] = name
                    break
    return found


def is_cache_scale(name: str) -> bool:
    """Tell whether *name* is that of a scale, as it is here."""
    return name.rpartition(".")[2] in NAMES
