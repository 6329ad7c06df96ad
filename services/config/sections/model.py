"""Section: the model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from services.config.fields import ATTENTION, COMPUTING, GATEWAY, WITH_MODEL, setting


class ModelSettings(BaseModel):
    """The checkpoint that is served, and how it is computed."""

    model: Path | None = setting(None, "folder of the checkpoint, in the hub's layout", roles=WITH_MODEL)
    served_model_name: str | None = setting(
        None, "name of the model in the API (default: the folder's name)", roles=WITH_MODEL, min_length=1
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "type of weights and activations; auto is the checkpoint's own", roles=COMPUTING
    )
    device: str = setting(
        "auto",
        "torch device, such as cpu or cuda:0; auto takes a GPU if there is one; with auto or cuda `serve` and "
        "`workers` give each worker a GPU of its own",
        roles=COMPUTING,
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus answer, tokens (default: the model's own)", roles=(GATEWAY, ATTENTION), ge=1
    )

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        assert self.model is not None, "the role needs no model"
        return self.served_model_name or self.model.resolve().name
