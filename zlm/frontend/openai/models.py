"""GET /v1/models and /v1/models/{id}: the served names. Pure."""

from typing import Any

from zlm.config import Resolved
from zlm.frontend.openai.fields import model_name


def model_list(resolved: Resolved, created: int) -> dict[str, Any]:
    """Return every served name; *created* is when the server started, seconds since the epoch."""
    data = [_card(name, resolved, created) for name in resolved.served_names]
    return {"object": "list", "data": data}


def model_card(name: str, resolved: Resolved, created: int) -> dict[str, Any]:
    """Return one served name; raise NotFound if it is none."""
    return _card(model_name(name, resolved), resolved, created)


def _card(name: str, resolved: Resolved, created: int) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "zlm",
        "root": resolved.config.model.model,
        "parent": None,
        "max_model_len": resolved.max_model_len,
        "permission": [permission],
    }
