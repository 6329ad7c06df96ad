"""A run's state on disk and back: ``checkpoint.pt``, exact, or ``small/``, in pieces that travel.

``small`` keeps the float32 weights and, in 8 bits, the root of Adam's second moment. The first moment starts again at
zero and a moving average at the weights, so a run that goes on from it is close to the uninterrupted one, not equal.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pocket_moe.config import PocketConfig
from pocket_moe.errors import PocketError
from pocket_moe.model.export import replace_folder, require_tokenizer
from pocket_moe.model.model import PocketMoe
from pocket_moe.train.loop import Trainer

FULL: Final = "checkpoint.pt"
SMALL: Final = "small"
PIECE_BYTES: Final = 15 << 20
_E4M3_MAX, _E4M3_MIN = 448.0, 2.0**-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a run may not change while it goes on: ``data`` decides which tokens come when and what they mean,
    ``training`` what is learnt from them. ``training["steps"]`` alone may grow, while a "wsd" schedule is stable."""

    config: PocketConfig
    data: dict[str, Any]
    training: dict[str, Any]


def save_full(run: Path, trainer: Trainer, identity: Identity) -> None:
    """Atomic: the file is the old one or the new one."""
    cuda = trainer.device.type == "cuda"
    state = {
        "identity": asdict(identity),
        "trainer": trainer.state(),
        "random": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if cuda else None},
    }
    run.mkdir(parents=True, exist_ok=True)
    part = run / f".{FULL}.part"
    torch.save(state, part)
    os.replace(part, run / FULL)


def save_small(run: Path, trainer: Trainer, identity: Identity) -> None:
    """All or nothing. Each file holds at most 15 MiB of tensors (or one larger one)."""
    run.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".small-", dir=run))
    state = trainer.state()
    try:
        part.chmod(0o755)
        _save_pieces(part, "weights", {name: value.cpu() for name, value in state["model"].items()})
        roots = {name: moment["exp_avg_sq"].sqrt().cpu() for name, moment in state["moments"].items() if moment}
        _save_pieces(part, "roots", {key: value for name, root in roots.items() for key, value in _pack(name, root)})
        (part / "state.json").write_text(json.dumps({"identity": asdict(identity), "step": state["step"]}, indent=1))
        replace_folder(part, run / SMALL)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def resume(run: Path, trainer: Trainer, identity: Identity) -> bool:
    """Load the run's last state into ``trainer`` and the random generators; whether it is exact.

    Raises:
        PocketError: there is none, it is damaged, or belongs to another configuration, tokenizer, data or training.
    """
    state = _read(run)
    _check(run, state["identity"], identity, state["trainer"]["step"])
    trainer.load_state(state["trainer"])
    random = state.get("random")
    if random is not None:
        torch.set_rng_state(random["cpu"])
        if random["cuda"] is not None and trainer.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"])
    return random is not None


def load_weights(run: Path, *, tokenizer_dir: Path | None = None) -> PocketMoe:
    """The run's last weights in float32, averaged if it kept an average; in evaluation mode.

    Raises:
        PocketError: there are none, they are damaged, or were trained with another tokenizer than ``tokenizer_dir``'s.
    """
    state = _read(run)
    if tokenizer_dir is not None:
        require_tokenizer(tokenizer_dir, state["identity"]["data"]["tokenizer"])
    model = PocketMoe(PocketConfig(**state["identity"]["config"]))
    model.load_state_dict(state["trainer"]["model"])
    with torch.no_grad():
        for parameter, average in zip(model.parameters(), state["trainer"]["average"] or (), strict=False):
            parameter.copy_(average)
    return model.eval()


def _read(run: Path) -> dict[str, Any]:
    """The later of the full and the small state; the full one if both are of the same step."""
    found: list[dict[str, Any]] = []
    try:
        if (run / FULL).is_file():
            found.append(torch.load(run / FULL, map_location="cpu", weights_only=True))
        if (run / SMALL).is_dir():
            found.append(_read_small(run / SMALL))
    except Exception as error:
        # torch.load raises what it likes on a damaged file.
        raise PocketError(
            f"The checkpoint in {run} cannot be read: {error}",
            hint="Remove the damaged file, or start the run anew without --resume.",
        ) from error
    if not found:
        raise PocketError(f"There is no checkpoint in {run}.", hint="Start the run without --resume.")
    return max(found, key=lambda state: int(state["trainer"]["step"]))


def _read_small(folder: Path) -> dict[str, Any]:
    header = json.loads((folder / "state.json").read_text())
    weights, packed = _load_pieces(folder, "weights"), _load_pieces(folder, "roots")
    step = torch.tensor(float(header["step"]))
    moments = {
        name: {"step": step.clone(), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": _unpack(name, packed).square()}
        for name, weight in weights.items()
        if f"{name}.codes" in packed
    }
    trainer = {"step": header["step"], "model": weights, "moments": moments, "average": []}
    return {"identity": header["identity"], "trainer": trainer}


def _check(run: Path, found: dict[str, Any], wanted: Identity, step: int) -> None:
    expected = json.loads(json.dumps(asdict(wanted)))
    differ = [
        (name, found.get(part, {}).get(name), value)
        for part in ("config", "data", "training")
        for name, value in expected[part].items()
        if found.get(part, {}).get(name) != value
    ]
    if [name for name, _, _ in differ] == ["steps"] and "training" in found:
        _check_steps(run, found["training"], expected["training"]["steps"], step)
    elif differ:
        listed = "; ".join(f"its {name} is {before}, not {value}" for name, before, value in differ)
        raise PocketError(
            f"The checkpoint in {run} belongs to another run: {listed}.",
            hint="Pass the options it was started with, on the same shards, or choose another --run.",
        )


def _check_steps(run: Path, training: dict[str, Any], steps: int, step: int) -> None:
    """A run may be made longer where no step so far would have had another rate."""
    before = training["steps"]
    stable = training["schedule"] == "wsd" and before - step >= training["decay"] * before
    if steps < before or not stable:
        raise PocketError(
            f"The run in {run} was to end after {before} steps, not {steps}, and is at step {step}: its steps may only "
            "grow, and only while a wsd schedule is stable.",
            hint=f"Pass --steps {before}, or choose another --run.",
        )


def _pack(name: str, root: Tensor) -> list[tuple[str, Tensor]]:
    """8-bit floats with one scale per row. Never rounded to 0 where it was not: Adam divides by it."""
    scale = root.amax(-1, keepdim=True) / _E4M3_MAX
    codes = (
        (root / scale.clamp_min(torch.finfo(torch.float32).tiny)).clamp(_E4M3_MIN, _E4M3_MAX).to(torch.float8_e4m3fn)
    )
    return [(f"{name}.codes", codes), (f"{name}.scale", scale)]


def _unpack(name: str, packed: dict[str, Tensor]) -> Tensor:
    return packed[f"{name}.codes"].float() * packed[f"{name}.scale"]


def _save_pieces(folder: Path, kind: str, tensors: dict[str, Tensor]) -> None:
    """First fit, largest first."""
    pieces: list[dict[str, Tensor]] = []
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        size = tensors[name].nbytes
        piece = next((p for p in pieces if sum(t.nbytes for t in p.values()) + size <= PIECE_BYTES), None)
        if piece is None:
            pieces.append(piece := {})
        piece[name] = tensors[name].contiguous()
    for index, piece in enumerate(pieces):
        path = folder / f"{kind}-{index}-of-{len(pieces)}.safetensors"
        save_file(piece, path)
        path.chmod(0o644)  # safetensors keeps what it writes from other users


def _load_pieces(folder: Path, kind: str) -> dict[str, Tensor]:
    files = sorted(folder.glob(f"{kind}-*-of-*.safetensors"))
    if not files or len(files) != int(files[0].stem.rpartition("-")[2]):
        raise SafetensorError(f"pieces of the {kind} are missing in {folder}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
