"""Section: the model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, field_validator

from services.config.fields import ATTENTION, COMPUTING, GATEWAY, WITH_MODEL, setting

ExpertFormat = Literal["auto", "dense", "int8", "int4", "int4-channel", "fp8", "mxfp4"]
DenseFormat = Literal["dense", "stored"]


class ModelSettings(BaseModel):
    """The checkpoint that is served, and how it is computed."""

    model: Path | None = setting(
        None,
        "checkpoint: a local folder, or a Hugging Face Hub ID (ORG/NAME), of which what is needed is downloaded to the "
        "Hub's cache",
        common=True,
        roles=WITH_MODEL,
    )
    revision: str | None = setting(
        None, "commit, branch or tag of a model on the Hub (default: its main branch)", roles=WITH_MODEL, min_length=1
    )
    served_model_name: str | None = setting(
        None,
        "name of the model in the API (default: the Hub ID, or the folder's name)",
        common=True,
        roles=WITH_MODEL,
        min_length=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "data type of weights and activations; auto uses that of the checkpoint", common=True, roles=COMPUTING
    )
    device: str = setting(
        "auto",
        "torch device, such as cpu or cuda:0; auto uses a GPU if there is one. With auto or cuda, `serve` and "
        "`workers` give each worker a GPU of its own",
        common=True,
        roles=COMPUTING,
    )
    expert_format: ExpertFormat = setting(
        "auto",
        "how the weights of experts are held in memory. auto: as the checkpoint has them if kernels take that, else in "
        "--dtype; dense: in --dtype; int8: rounded to 8 bits with a scale for each row; int4: to 4 bits with a scale "
        "for each 128 columns; int4-channel: to 4 bits with a scale for each row; fp8: to FP8 in blocks of 128 x 128; "
        "mxfp4: to FP4 with a scale for each 32 columns. Attention and expert workers need the same",
        common=True,
        roles=COMPUTING,
    )
    dense_format: DenseFormat = setting(
        "dense",
        "how the weights of linear layers outside of experts are held where a checkpoint has them quantised. dense: in "
        "--dtype; stored: as the checkpoint has them if kernels take that, which takes less memory and mostly more "
        "time. Attention and expert workers need the same",
        roles=COMPUTING,
        hidden=True,
    )
    batch_invariant: bool = setting(
        False,
        "compute each answer with the same bits whatever else is in the batch, whatever chunks its prompt came in and "
        "whatever of it was cached; slower. Attention and expert workers need the same",
        roles=COMPUTING,
    )
    max_model_len: int | None = setting(
        None,
        "maximum length of a prompt plus its output, in tokens (default: the model's limit, or the size of the KV "
        "cache if that is smaller)",
        common=True,
        roles=(GATEWAY, ATTENTION),
        ge=1,
    )

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        assert self.model is not None, "the role needs no model"
        return self.served_model_name or _name_of(self.model.resolve())

    @property
    def held_experts(self) -> ExpertFormat:
        """How experts are held: batch-invariant products are of numbers alone, so "auto" chooses these for them."""
        return "dense" if self.batch_invariant and self.expert_format == "auto" else self.expert_format

    @field_validator("model", mode="before")
    @classmethod
    def _keeps_what_is_a_folder(cls, value: object) -> object:
        """Makes a path that can only be a folder absolute: Path would drop ./, and the rest may be an id of the hub."""
        is_folder = isinstance(value, str) and (value.startswith(("./", "../", "~/")) or value.endswith("/"))
        return Path(str(value)).expanduser().absolute() if is_folder else value


def _name_of(folder: Path) -> str:
    """Returns the name of the folder; of a snapshot in the hub's cache, models--ORG--NAME/snapshots/HASH, ORG/NAME."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name
